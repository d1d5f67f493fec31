"""length: what an episode's tokens cost, step by step: its share of the most that its run would let it sample, less than 0.

A step earns -tokens / (max_new_tokens x max_steps), so that the episode earns from -1.0, where it used up all it had, to 0.0.
The weight is how much of a right answer the whole length is worth: `--reward length=0.1`. Every token costs the same; for a
punishment that begins near the limit see `overlong`.
"""

from agentrl.workflow.trajectory import Episode


def length(episode: Episode) -> tuple[float, ...]:
    """Of each step.

    Raises:
        ValueError: the episode's run, and its limits, are not known.
    """
    if episode.limits is None:
        raise ValueError("it needs the token limit of a run, and this episode has no run")
    max_tokens = episode.limits.max_new_tokens * episode.limits.max_steps
    return tuple(-len(step.sampled_ids) / max_tokens for step in episode.steps)
