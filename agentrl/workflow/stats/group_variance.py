"""Dynamic sampling: an iteration samples until enough of its groups have different rewards, and trains only on those.

A group with equal rewards has advantages of 0, so a group-relative algorithm learns nothing from it. With
`rollout.dynamic_sampling` N, an iteration gets a further group, of another task, for each group without variance. This is
repeated until as many groups have variance as were planned at first, or until N times as many groups were planned. The
functions here are pure functions of rewards; `store.train_claims` plans the groups when all earlier ones have ended.

Source: DAPO, arXiv 2503.14476, section 3.2 (dynamic sampling).
"""

from collections.abc import Collection, Sequence

from agentrl.workflow.trajectory import Group

NO_VARIANCE = "no variance: all of its rewards are equal"
SURPLUS = "enough other groups have variance"
"""The reason for a dropped group that has variance, as its row and the ledger record it."""
DIFFERENT = "sampler and trainer differ"
CUT_OFF = "cut off at a limit"
"""The reason for episodes of a group that did not train: `2 of 8 episodes: REASON`."""


def varies(rewards: Collection[float]) -> bool:
    """Return whether there are at least two different rewards. They are compared exactly, because a standard deviation is
    rounded.
    """
    return len(set(rewards)) > 1


def mean_and_deviation(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean and the sample standard deviation of a group's rewards, as in its row. The mean is None without a reward,
    the deviation with fewer than two.
    """
    mean = sum(rewards) / len(rewards) if rewards else None
    if mean is None or len(rewards) < 2:
        return mean, None
    return mean, float((sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)) ** 0.5)


def groups_to_plan(varied: int, max_groups: int, planned: int, limit: int) -> int:
    """Return the number of further groups to plan.

    Args:
        varied: the groups with variance so far.
        max_groups: the groups planned at first, which is also the most that train.
        planned: the groups planned so far in total.
        limit: the most groups to plan in total, as a multiple of `max_groups`.
    """
    return max(0, min(max_groups - varied, limit * max_groups - planned))


def choose_groups(groups: Sequence[Group], max_groups: int) -> tuple[list[Group], dict[int, str]]:
    """Return the first `max_groups` groups with variance, in the order of their slots, and for each dropped slot the reason."""
    chosen_groups: list[Group] = []
    dropped = {}
    for group in sorted(groups, key=lambda group: group.slot):
        rewards = [episode.reward for episode in group.episodes if episode.trainable and episode.reward is not None]
        if len(rewards) < 2:
            dropped[group.slot] = f"{len(rewards)} of {len(group.episodes)} episodes can train"
        elif not varies(rewards):
            dropped[group.slot] = NO_VARIANCE
        elif len(chosen_groups) == max_groups:
            dropped[group.slot] = SURPLUS
        else:
            chosen_groups.append(group)
    return chosen_groups, dropped
