"""How often tasks were solved, which of them a run then takes, and in which order."""

from dataclasses import replace

import pytest

from agentrl.workers.requests.curriculum import choose_by_difficulty
from agentrl.workflow.config import DatasetConfig, build
from agentrl.workflow.errors import ConfigError, DatasetError, NotFoundError
from agentrl.workflow.store import planning
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.iterations import task_order
from agentrl.workflow.store.reads.task_rows import (
    SampledGroups,
    SolvedCount,
    count_equal_groups,
    count_right_episodes,
    load_solved,
)
from tests.support.played_runs import play, start, submission, task, values


def test_load_solved_counts_right_episodes_of_all_runs(database: Database) -> None:
    assert load_solved(database) == {}
    for number, rewards in enumerate(((1.0, 0.0), (1.0, 1.0))):
        for group, reward in zip(start(database, submission(f"run{number}")), rewards, strict=True):
            play(database, group, reward)  # of two episodes the second has the reward
    order = [task(number) for number in task_order(0, 0, [task(number).key for number in range(2)])]
    counts = load_solved(database)
    assert [counts[each.content_hash] for each in order] == [SolvedCount(4, 2), SolvedCount(4, 1)]
    assert load_solved(database, "run0")[order[1].content_hash] == SolvedCount(2, 0)
    ids = [values(database, "SELECT id FROM tasks WHERE content_hash = :hash", hash=each.content_hash)[0] for each in order]
    assert count_right_episodes(database, "run0", [*ids, 99]) == {ids[0]: SolvedCount(2, 1), ids[1]: SolvedCount(2, 0)}
    assert count_equal_groups(database, "run0") == SampledGroups(2, 1)
    with pytest.raises(NotFoundError):
        load_solved(database, "absent")


def test_choose_by_difficulty_keeps_sometimes_solved_tasks(database: Database) -> None:
    tasks = [task(number) for number in range(3)]
    asked = DatasetConfig(keep_solved="0.1..0.9")
    with pytest.raises(DatasetError, match=r"None of the 3 tasks .* agentrl data check"):
        choose_by_difficulty(database, asked, tasks)
    for group, reward in zip(start(database, submission()), (1.0, 0.0), strict=True):
        play(database, group, reward)
    solved, never = (task(number) for number in task_order(0, 0, [task(number).key for number in range(2)]))
    chosen = choose_by_difficulty(database, asked, tasks)
    assert set(map(repr, chosen.tasks)) == {repr(solved), repr(tasks[2])}, "what was never sampled is kept"
    assert "it keeps 2 of 3 tasks, 1 of them without a stored episode; left out: 1 solved more rarely, 0" in chosen.remarks[0]
    with pytest.raises(DatasetError, match="solved in"):
        choose_by_difficulty(database, DatasetConfig(keep_solved="0.8..0.9"), tasks[:2])
    ordered = choose_by_difficulty(database, DatasetConfig(order="easy_first"), tasks)
    assert (len(ordered.tasks), ordered.difficulties) == (3, {solved.content_hash: 0.5, never.content_hash: 1.0})
    assert choose_by_difficulty(None, DatasetConfig(), tasks).tasks == tuple(tasks)


def test_keep_solved_takes_a_range_of_shares() -> None:
    for wrong in ("0.9..0.1", "0.5", "-1..1", "a..b", "nan..1"):
        with pytest.raises(ConfigError, match=r"write LOW\.\.HIGH"):
            build({"dataset.keep_solved": wrong})


def test_easy_first_orders_the_tasks_of_each_epoch(database: Database) -> None:
    tasks = [task(number) for number in range(6)]
    hard = {tasks[number].content_hash: level for number, level in ((4, 0.0), (1, 0.5), (3, 1.0))}
    asked = replace(submission(tasks=6, epochs=2, tasks_per_iteration=6), difficulties=hard)
    planning.submit(database, asked)
    keys = values(database, "SELECT t.key FROM groups g JOIN tasks t ON t.id = g.task_id ORDER BY g.slot")
    assert keys[:3] == ["train/4", "train/1", "train/3"]
    assert keys[3:] == [tasks[n].key for n in task_order(0, 0, [each.key for each in tasks]) if n in (0, 2, 5)], "by the seed"
    levels = [hard.get(each.content_hash) for each in tasks]
    again = task_order(0, 1, [each.key for each in tasks], levels)
    assert again[:3] == [4, 1, 3]
