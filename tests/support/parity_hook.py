"""A hook that rewards chance, so that a random model has something to learn and every iteration an update."""

from collections.abc import Mapping

from agentrl.workflow.hooks import Hook
from agentrl.workflow.trajectory import Episode


class Lucky(Hook):
    """Adds a part `luck` of 0 or 1, which follows from the sampled tokens alone."""

    def on_rollout_end(self, episode: Episode) -> Mapping[str, float]:
        """Odd or even."""
        return {"luck": float(sum(sum(step.sampled_ids) for step in episode.steps) % 2)}
