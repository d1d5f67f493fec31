"""Which stored episodes are learned from: pure rules, and the queries behind them on both databases."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agentrl.workflow.stats.best_episodes import Candidate, select_best, select_pairs
from agentrl.workflow.store import reward_sets, steps, training_groups
from agentrl.workflow.store.connect import Database
from tests.support.played_runs import claim, fail, finish, sampled, start, submission

SOME = [
    Candidate(1, group=1, task=7, reward=0.0),
    Candidate(2, group=1, task=7, reward=1.0),
    Candidate(3, group=2, task=8, reward=0.5),
    Candidate(4, group=2, task=8, reward=0.5),
    Candidate(5, group=3, task=7, reward=1.0),
    Candidate(6, group=3, task=7, reward=0.25),
]
candidates_of_any_kind = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from([0.0, 0.5, 1.0])), max_size=30
).map(lambda rows: [Candidate(number, group, group % 2, reward) for number, (group, reward) in enumerate(rows)])  # fmt: skip


def numbers(some: list[Candidate]) -> list[int]:
    return [one.id for one in some]


def test_select_best_takes_best_of_all_groups_of_task() -> None:
    assert numbers(select_best(SOME)) == [1, 2, 3, 4, 5, 6]
    assert numbers(select_best(SOME, min_reward=0.5)) == [2, 3, 4, 5]
    assert numbers(select_best(SOME, limit=1)) == [2, 3]
    assert numbers(select_best(SOME, min_reward=1.0, limit=1)) == [2]
    assert select_best(SOME, min_reward=2.0) == []


def test_select_pairs_joins_best_and_worst_of_group() -> None:
    assert [(a.id, b.id) for a, b in select_pairs(SOME)] == [(2, 1), (5, 6)]
    four = [replace(one, group=1) for one in SOME[:4]]
    assert [(a.id, b.id) for a, b in select_pairs(four, limit=5)] == [(2, 1)]  # the two in the middle are equal
    apart = [*four[:3], replace(four[3], reward=0.25)]
    assert [(a.id, b.id) for a, b in select_pairs(apart, limit=5)] == [(2, 1), (3, 4)]


@given(candidates_of_any_kind, st.integers(1, 5))
def test_select_pairs_uses_each_episode_once_in_order(some: list[Candidate], most: int) -> None:
    found = select_pairs(some, most)
    assert all(a.group == b.group and a.reward > b.reward for a, b in found)
    assert len({one.id for pair in found for one in pair}) == 2 * len(found)
    assert all(sum(a.group == group for a, _ in found) <= most for group in range(1, 5))
    mixed = {one.group for one in some if one.reward != next(other.reward for other in some if other.group == one.group)}
    assert {a.group for a, _ in found} == mixed


@given(candidates_of_any_kind, st.integers(1, 5))
def test_select_best_omits_nothing_better(some: list[Candidate], most: int) -> None:
    taken = select_best(some, limit=most)
    for task in {one.task for one in some}:
        inside = [one.reward for one in taken if one.task == task]
        outside = [one.reward for one in some if one.task == task and one not in taken]
        assert len(inside) == min(most, len(inside) + len(outside))
        assert min(inside) >= max(outside, default=-1.0)


def test_load_candidates_returns_complete_finished_episodes(database: Database) -> None:
    groups = start(database, submission())
    for number, group in enumerate(groups):
        work = claim(database, group)
        steps.commit_sampled(database, work.fence, [sampled(work, position) for position in range(2)])
        finish(database, work, 0, reward=float(number))
        if number:
            fail(database, work, 1)
        else:
            finish(database, work, 1, reward=0.5)
    found = training_groups.load_candidates(database, 1, groups, "default")
    assert [(one.group, one.reward) for one in found] == [(groups[0], 0.0), (groups[0], 0.5), (groups[1], 1.0)]
    assert len({one.task for one in found}) == 2
    assert numbers(training_groups.load_candidates(database, 1, groups[1:], "default")) == [found[2].id]
    back = training_groups.load_chosen_episodes(database, [found[2].id, found[0].id, found[2].id])
    assert [each.id for each in back] == [found[2].id, found[0].id, found[2].id]
    assert back[0].steps[0].sampled_ids == (3, 4)
    assert back[0].reward == 1.0


def test_load_candidates_uses_rewards_of_other_set(database: Database) -> None:
    (group,) = start(database, submission(tasks=1))
    work = claim(database, group)
    steps.commit_sampled(database, work.fence, [sampled(work, position) for position in range(2)])
    ids = [one.id for one in work.episodes]
    finish(database, work, 0, reward=0.0)
    finish(database, work, 1, reward=1.0)
    reward_sets.add_reward_set(database, 1, "short", "code", {"a": 2.0, "b": 1.0}, {ids[0]: {"a": 1.0, "b": 0.5}})
    found = {name: training_groups.load_candidates(database, 1, [group], name) for name in ("short", "default")}
    assert [(one.id, one.reward) for one in found["short"]] == [(ids[0], 2.5)]
    assert [(one.id, one.reward) for one in found["default"]] == [(ids[0], 0.0), (ids[1], 1.0)]
