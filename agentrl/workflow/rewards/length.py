"""length: a penalty for an episode's tokens, step by step, relative to the most tokens that its run allows.

A step earns -tokens / (max_new_tokens x max_steps). So the episode earns from -1.0, if it used all tokens, to 0.0. The weight
says how much of a right answer the full length costs: `--reward length=0.1`. Every token costs the same; for a penalty only
near the limit see `overlong`.
"""

from agentrl.workflow.trajectory import Episode


def length(episode: Episode) -> tuple[float, ...]:
    """Return the penalty of each step.

    Raises:
        ValueError: the episode has no run, so its limits are unknown.
    """
    if episode.limits is None:
        raise ValueError("it needs the token limit of a run, and this episode has no run")
    max_tokens = episode.limits.max_new_tokens * episode.limits.max_steps
    return tuple(-len(step.sampled_ids) / max_tokens for step in episode.steps)
