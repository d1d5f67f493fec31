"""Dynamic sampling: an iteration samples on until enough of its groups have variance, and trains on those alone.

A group whose episodes all earn the same has no advantage, and teaches a group-relative algorithm nothing. With
`rollout.dynamic_sampling` N an iteration that lacks groups with unequal rewards gets as many more, of other tasks, until there
are as many with variance as were planned at first, or N times as many groups in all. Pure functions of rewards;
`store.train_claims` plans the groups, when all that were planned before are over.

Source: DAPO, arXiv 2503.14476, section 3.2 (dynamic sampling).
"""

from collections.abc import Collection, Sequence

from agentrl.workflow.trajectory import Group

NO_VARIANCE = "no variance: all of its rewards are equal"
SURPLUS = "enough other groups have variance"
"""Why a group was dropped, as its row and the ledger have it."""


def varies(rewards: Collection[float]) -> bool:
    """Whether there are at least two rewards, and not all of them the same: exactly, for a standard deviation is rounded."""
    return len(set(rewards)) > 1


def groups_to_plan(varied: int, wanted: int, planned: int, limit: int) -> int:
    """How many more groups to plan.

    Args:
        varied: groups with variance so far.
        wanted: groups that were planned at first, and that train at most.
        planned: groups in all so far.
        limit: how many times `wanted` groups may be planned.
    """
    return max(0, min(wanted - varied, limit * wanted - planned))


def choose_groups(groups: Sequence[Group], wanted: int) -> tuple[list[Group], dict[int, str]]:
    """The first `wanted` groups with variance in the order of their slots, and why the others are dropped, by slot."""
    kept: list[Group] = []
    dropped = {}
    for group in sorted(groups, key=lambda group: group.slot):
        rewards = [episode.reward for episode in group.episodes if episode.trainable and episode.reward is not None]
        if len(rewards) < 2:
            dropped[group.slot] = f"{len(rewards)} of {len(group.episodes)} episodes can train"
        elif not varies(rewards):
            dropped[group.slot] = NO_VARIANCE
        elif len(kept) == wanted:
            dropped[group.slot] = SURPLUS
        else:
            kept.append(group)
    return kept, dropped
