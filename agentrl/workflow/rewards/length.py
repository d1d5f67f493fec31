"""length: a penalty for the tokens of an episode, per step, relative to the most tokens that the run allows.

A step earns -tokens / (max_new_tokens x max_steps), so an episode earns between -1.0, if it used all tokens, and 0.0. For a
penalty only near the limit see `overlong`.
"""

from agentrl.workflow.trajectory import Episode


def length(episode: Episode) -> tuple[float, ...]:
    """Return the penalty of each step. Raise ValueError if the episode has no run, so its limits are unknown."""
    if episode.limits is None:
        raise ValueError("it needs the token limit of a run, and this episode has no run")
    max_tokens = episode.limits.max_new_tokens * episode.limits.max_steps
    return tuple(-len(step.sampled_ids) / max_tokens for step in episode.steps)
