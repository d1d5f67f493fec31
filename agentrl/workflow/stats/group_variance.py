"""Dynamic sampling: an iteration samples until enough of its groups have unequal rewards, and trains only on these groups.

If all rewards of a group are equal, its advantages are 0, so a group-relative algorithm learns nothing from it. With
`rollout.dynamic_sampling` N, an iteration gets a further group, of another task, for each group without variance. This is
repeated until as many groups have variance as were planned at first, or until N times as many groups were planned. The
functions here are pure functions of rewards. `store.train_claims` plans further groups when all earlier groups have ended.

Source: DAPO, arXiv 2503.14476, section 3.2 (dynamic sampling).
"""

from collections.abc import Collection, Sequence

from agentrl.workflow.trajectory import Group

NO_VARIANCE = "no variance: all of its rewards are equal"
NO_GROUP_VARIES, NO_ADVANTAGE = "no group has variance", "no advantage differs from 0"
TOO_FEW_EPISODES = "no group has enough finished episodes"
"""Reasons for skipping an update, as the iteration's row records them."""
SURPLUS = "enough other groups have variance"
"""The reason for dropping a group that has variance, as the group's row and the ledger record it."""
DIFFERENT = "sampler and trainer differ"
CUT_OFF = "cut off at a limit"
"""The reason why episodes of a group did not train. The group's row has it as `2 of 8 episodes: REASON`."""


def varies(rewards: Collection[float]) -> bool:
    """Return True if at least two rewards differ. The rewards are compared exactly, because a standard deviation would be
    rounded.
    """
    return len(set(rewards)) > 1


def mean_and_deviation(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean and the sample standard deviation of a group's rewards, as the group's row stores them.

    If there are no rewards, the mean is None. If there are fewer than two rewards, the deviation is None.
    """
    mean = sum(rewards) / len(rewards) if rewards else None
    if mean is None or len(rewards) < 2:
        return mean, None
    return mean, float((sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)) ** 0.5)


def groups_to_plan(varied: int, max_groups: int, planned: int, limit: int) -> int:
    """Return the number of further groups to plan, if `varied` of the `planned` groups have variance. `max_groups` groups were
    planned at first; this is also the maximum number of groups to train on. At most `limit` x `max_groups` groups are planned
    in total.
    """
    return max(0, min(max_groups - varied, limit * max_groups - planned))


def choose_groups(groups: Sequence[Group], max_groups: int) -> tuple[list[Group], dict[int, str]]:
    """Return at most `max_groups` groups with variance, in the order of their slots (their numbers in the iteration). Also
    return a mapping from the slot of each other group to the reason why it was dropped.
    """
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
