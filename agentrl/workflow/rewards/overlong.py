"""overlong: DAPO's soft penalty for a turn that comes near the limit on its tokens (arXiv 2503.14476, equation 13).

Let `most` be the limit and `cache` the size of the zone below it in which a turn is penalised. A turn of n tokens earns

    0                               if n <= most - cache
    ((most - cache) - n) / cache    from there to the limit
    -1                              beyond the limit, and if the limit cut the turn off

The limit is the run's `rollout.max_new_tokens`, and the zone is its last fifth, as in DAPO (4,096 of 20,480). In DAPO the
response is one turn; here each turn has its own limit and penalty. To set other limits, write in a file `mine.py`:

    from agentrl.workflow.rewards.overlong import within

    brief = within(max_tokens=400, cache=100)

Then pass `--reward mine:brief=0.5`; with the run's limits, pass `--reward overlong=0.5`.
"""

from agentrl.workflow.rewards import Reward
from agentrl.workflow.trajectory import Episode, Step

CACHE_SHARE = 0.2


def overlong(episode: Episode) -> tuple[float, ...]:
    """Return the penalty of each step, from -1.0 to 0.0. Raise ValueError if the episode has no limits."""
    if episode.limits is None:
        raise ValueError("it needs the token limit of a run, and this episode has no run")
    max_tokens = episode.limits.max_new_tokens
    return _punished(episode, max_tokens, max_tokens * CACHE_SHARE)


def within(max_tokens: int, cache: int) -> Reward:
    """Return the reward with your own limits instead of the run's. `max_tokens` is the most tokens of a turn. `cache` is the
    number of tokens below that limit in which a turn is penalised. Raise ValueError if `cache` is not between 1 and
    `max_tokens`.
    """
    if not 0 < cache <= max_tokens:
        raise ValueError(f"cache must be from 1 to the limit of a turn, {max_tokens} tokens, not {cache}")

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
