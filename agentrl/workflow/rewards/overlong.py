"""overlong: DAPO's soft punishment of a turn that comes near the limit on its tokens (arXiv 2503.14476, equation 13).

A turn of n tokens, of the most that it may have and with the last `cache` of these as the zone in which it is punished, earns

    0                               where n <= most - cache
    ((most - cache) - n) / cache    from there to the limit
    -1                              beyond it, and where the limit cut it

The limit is the run's `rollout.max_new_tokens`, and the zone its last fifth, which is DAPO's (4,096 of 20,480). There the
response is one turn; here each turn is cut for itself, and is punished for itself. Limits of one's own, in a file `mine.py`:

    from agentrl.workflow.rewards.overlong import within

    brief = within(max_tokens=400, cache=100)

and `--reward mine:brief=0.5`, or `--reward overlong=0.5` for the run's.
"""

from agentrl.workflow.rewards import Reward
from agentrl.workflow.trajectory import Episode, Step

CACHE_SHARE = 0.2


def overlong(episode: Episode) -> tuple[float, ...]:
    """Of each step, from -1.0 to 0.0.

    Raises:
        ValueError: the episode's run, and its limits, are not known.
    """
    if episode.limits is None:
        raise ValueError("it needs the token limit of a run, and this episode has no run")
    max_tokens = episode.limits.max_new_tokens
    return _punished(episode, max_tokens, max_tokens * CACHE_SHARE)


def within(max_tokens: int, cache: int) -> Reward:
    """Return the reward with custom limits, in tokens per turn.

    Raises:
        ValueError: the zone does not end at the limit, or has no room before it.
    """
    if not 0 < cache <= max_tokens:
        raise ValueError(f"the zone of {cache} tokens does not lie within the {max_tokens} that a turn may have")

    def punished(episode: Episode) -> tuple[float, ...]:
        return _punished(episode, max_tokens, cache)

    return punished


def _punished(episode: Episode, max_tokens: float, cache: float) -> tuple[float, ...]:
    return tuple(_of_turn(step, max_tokens, cache) for step in episode.steps)


def _of_turn(step: Step, max_tokens: float, cache: float) -> float:
    tokens = len(step.sampled_ids)
    if tokens > max_tokens or step.finish_reason == "length":
        return -1.0
    return min(0.0, (max_tokens - cache - tokens) / cache)
