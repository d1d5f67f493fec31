"""The changes from one iteration of a run to the next, and the largest changes of the mean reward in a run.

Reward parts and errors are compared with the iteration before. Tasks are compared with the last time that the same task was
sampled. Example episodes are included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from agentrl.workflow.store.driver_reader import Row, among, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.eval_results import load_task_texts
from agentrl.workflow.store.reads.evidence_rows import count_error_classes, load_evidence
from agentrl.workflow.store.reads.iteration_rows import find_iteration
from agentrl.workflow.store.reads.run_rows import run_id_and_name
from agentrl.workflow.store.solved_rule import MEMBERS
from agentrl.workflow.tables.column_values import list_in_sql
from agentrl.workflow.trajectory import TRUNCATED

MAX_TASKS = 8
"""The most tasks that became worse, and that became better, in the result."""


@dataclass(frozen=True, slots=True)
class IterationChanges:
    """What changed in an iteration.

    Args:
        before: the number of the previous iteration, counted from 1; None for the first iteration.
        numbers: `name`, and the values `now` and `before`, of each mean or share over the episodes: reward, truncated and
            failed episodes, failed calls, tokens, turns.
        parts: `part`, and the means `now` and `before`, of each part of the reward.
        errors: `error_class`, `tool`, and the numbers of errors `now` and `before`, of each class and tool.
        tasks: the tasks whose mean reward changed most since their previous group, the greatest loss first: task_id, task,
            question, `now` and `before` (mean rewards), `previous` (the iteration of the previous group), `group_id` (the
            present group) and `worst` (the id of the present group's worst episode).
        again: the number of the iteration's tasks that were sampled before.
        shared: the number of the iteration's tasks that the previous iteration has too.
        worst_count: the number of the iteration's episodes with the lowest reward.
        examples: as evidence, the `best` and the `worst` episode of the iteration, and the worst episode of the task that
            changed most (`changed`). A value is None if there is no such episode.
    """

    before: int | None
    numbers: Sequence[Row]
    parts: Sequence[Row]
    errors: Sequence[Row]
    tasks: Sequence[Row]
    again: int
    shared: int
    worst_count: int
    examples: Mapping[str, Row | None]


@sql_read_transaction
def load_iteration_changes(tx: Any, run: str, number: int) -> IterationChanges:
    """Return the changes of an iteration. `number` is the iteration's number, counted from 1. Raise NotFoundError if there is
    no such run or iteration.
    """
    run_row = run_id_and_name(tx, run)
    numbers = {"now": find_iteration(tx, run_row, number)["id"]}
    if number > 1:
        numbers["before"] = find_iteration(tx, run_row, number - 1)["id"]
    sums = {when: _load_sums(tx, iteration) for when, iteration in numbers.items()}
    parts = {when: _load_parts(tx, iteration) for when, iteration in numbers.items()}
    errors = {
        when: {
            (row["error_class"], row["tool"]): row["errors"]
            for row in count_error_classes(tx, run_row["name"], number if when == "now" else number - 1)
        }
        for when in numbers
    }
    changes = [row for row in _compare_tasks(tx, run_row["id"], number) if row["previous"] is not None]
    tasks = _add_texts(tx, _select_largest(changes))
    names = dict.fromkeys(name for one in parts.values() for name in one)
    kinds = {kind for one in errors.values() for kind in one}
    counted = [{"error_class": kind[0], "tool": kind[1], **_both(errors, kind, 0)} for kind in sorted(kinds, key=str)]
    return IterationChanges(
        before=number - 1 if number > 1 else None,
        numbers=[{"name": name, **_both(sums, name)} for name in sums["now"]],
        parts=[{"part": part, **_both(parts, part)} for part in names],
        errors=sorted(counted, key=lambda row: (row["before"] or 0) - row["now"]),
        tasks=tasks,
        again=len(changes),
        shared=sum(row["previous"] == number - 1 for row in changes),
        worst_count=_count_worst(tx, numbers["now"]),
        examples=_load_examples(tx, run_row["name"], numbers["now"], tasks),
    )


def _both(by_time: Mapping[str, Mapping[Any, Any]], key: Any, missing: Any = None) -> dict[str, Any]:
    return {when: by_time[when].get(key, missing) if when in by_time else None for when in ("now", "before")}


_EPISODES = """
    (SELECT e.* FROM episodes e WHERE e.iteration_id = :iteration
     UNION ALL
     SELECT e.* FROM iteration_groups l JOIN episodes e ON e.group_id = l.group_id WHERE l.iteration_id = :iteration) e"""


def _load_sums(tx: Any, iteration: int) -> dict[str, float | None]:
    reasons = list_in_sql(TRUNCATED)
    query = f"""
        SELECT count(*) AS episodes, sum(CASE WHEN status = 'done' THEN reward END) AS reward,
               sum(CASE WHEN status = 'done' THEN 1 ELSE 0 END) AS done,
               sum(CASE WHEN stop_reason IN ({reasons}) THEN 1 ELSE 0 END) AS truncated,
               sum(CASE WHEN status IN ('failed', 'infra_error') THEN 1 ELSE 0 END) AS failed,
               sum(tool_calls) AS calls, sum(tool_errors) AS errors, sum(sampled_tokens) AS tokens, sum(steps) AS turns
        FROM {_EPISODES}"""
    (row,) = select_rows(tx, query, iteration=iteration)
    return {
        "reward": _share(row["reward"], row["done"]),
        "truncated episodes": _share(row["truncated"], row["episodes"]),
        "failed episodes": _share(row["failed"], row["episodes"]),
        "failed calls": _share(row["errors"], row["calls"]),
        "tokens of an episode": _share(row["tokens"], row["episodes"]),
        "turns of an episode": _share(row["turns"], row["episodes"]),
    }


def _share(part: Any, whole: Any) -> float | None:
    return None if part is None or not whole else float(part) / float(whole)


def _load_parts(tx: Any, iteration: int) -> dict[str, float]:
    query = f"""
        SELECT part, sum(value) / count(*) AS mean FROM
          (SELECT w.part, e.id, sum(w.value) AS value FROM {_EPISODES}
           JOIN reward_sets s ON s.run_id = e.run_id AND s.name = 'default'
           JOIN rewards w ON w.reward_set_id = s.id AND w.episode_id = e.id GROUP BY w.part, e.id) earned
        GROUP BY part ORDER BY part LIMIT 50"""
    return {row["part"]: row["mean"] for row in select_rows(tx, query, iteration=iteration)}


def _select_largest(changes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the changes of the tasks whose mean reward changed most, the greatest loss first."""
    ordered = sorted(changes, key=lambda row: (row["now"] - row["before"], row["task_id"]))
    worse = [row for row in ordered if row["now"] < row["before"]][:MAX_TASKS]
    better = [row for row in ordered if row["now"] > row["before"]][-MAX_TASKS:]
    return worse + better


def _compare_tasks(tx: Any, run_id: int, number: int) -> list[dict[str, Any]]:
    """Return the tasks of an iteration that have a mean reward there, each with its mean reward `now`, and with that of its
    previous group (`before`) and the iteration of this group (`previous`). Both are None if the task was not sampled before.
    """
    query = f"""
        SELECT m.id, m.task_id, m.iteration, m.mean_reward FROM ({MEMBERS}) m
        WHERE m.iteration <= :number AND m.mean_reward IS NOT NULL
          AND m.task_id IN (SELECT task_id FROM ({MEMBERS}) mine WHERE mine.iteration = :number) ORDER BY m.iteration, m.id"""
    last: dict[int, Row] = {}
    tasks: dict[int, dict[str, Any]] = {}
    for row in select_rows(tx, query, run_id=run_id, number=number):
        if row["iteration"] < number:
            last[row["task_id"]] = row
            continue
        before = last.get(row["task_id"], {"iteration": None, "mean_reward": None})
        tasks[row["task_id"]] = {
            "task_id": row["task_id"],
            "group_id": row["id"],
            "previous": before["iteration"],
            "now": row["mean_reward"],
            "before": before["mean_reward"],
        }
    return [*tasks.values()]


@dataclass(frozen=True, slots=True)
class RewardChange:
    """A change of the mean reward between two iterations.

    Args:
        iteration, previous: the number of the iteration, and of the iteration before that has a mean reward.
        now, before: the mean rewards of both.
        tasks: the number of tasks in the iteration.
        shared: the number of these tasks that the previous iteration has too.
        again: the number of these tasks that were sampled before, in any iteration.
        again_now, again_before: the mean reward of the tasks that were sampled before: now, and when each was last sampled
            before. None if there is no such task.
    """

    iteration: int
    previous: int
    now: float
    before: float
    tasks: int
    shared: int
    again: int
    again_now: float | None
    again_before: float | None


@dataclass(frozen=True, slots=True)
class RewardExtremes:
    """The largest drop and the largest gain of the mean reward from one iteration of a run to the next; None if there is
    none.
    """

    drop: RewardChange | None
    gain: RewardChange | None


@sql_read_transaction
def load_reward_extremes(tx: Any, run: str) -> RewardExtremes:
    """Return the largest changes of the mean reward in a run. Raise NotFoundError if there is no such run."""
    run_id = run_id_and_name(tx, run)["id"]
    query = """
        SELECT number + 1 AS iteration, mean_reward FROM iterations WHERE run_id = :id AND mean_reward IS NOT NULL
        ORDER BY number"""
    changes = [
        (row["mean_reward"] - before["mean_reward"], before, row) for before, row in pairwise(select_rows(tx, query, id=run_id))
    ]
    drop = min((change for change in changes if change[0] < 0), key=lambda change: change[0], default=None)
    gain = max((change for change in changes if change[0] > 0), key=lambda change: change[0], default=None)
    described = (None if change is None else _describe_change(tx, run_id, *change[1:]) for change in (drop, gain))
    return RewardExtremes(*described)


def _describe_change(tx: Any, run_id: int, before: Row, row: Row) -> RewardChange:
    tasks = _compare_tasks(tx, run_id, row["iteration"])
    again = [task for task in tasks if task["previous"] is not None]
    return RewardChange(
        iteration=row["iteration"],
        previous=before["iteration"],
        now=row["mean_reward"],
        before=before["mean_reward"],
        tasks=len(tasks),
        shared=sum(task["previous"] == before["iteration"] for task in again),
        again=len(again),
        again_now=_share(sum(task["now"] for task in again), len(again)),
        again_before=_share(sum(task["before"] for task in again), len(again)),
    )


def _add_texts(tx: Any, changes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the changes of tasks with each task's key, question and worst episode."""
    ids = [row["task_id"] for row in changes]
    texts = load_task_texts(tx, ids)
    query = f"""
        SELECT g.id, (SELECT e.id FROM episodes e WHERE e.group_id = g.id AND e.status = 'done'
                      ORDER BY e.reward, e.id LIMIT 1) AS worst
        FROM groups g WHERE g.id IN ({among(row["group_id"] for row in changes)})"""
    worst = {row["id"]: row["worst"] for row in select_rows(tx, query)}
    return [{**row, **texts[row["task_id"]], "worst": worst.get(row["group_id"])} for row in changes]


def _count_worst(tx: Any, iteration: int) -> int:
    done = f"FROM {_EPISODES} WHERE e.status = 'done'"
    query = f"SELECT count(*) AS n {done} AND e.reward = (SELECT min(e.reward) {done})"
    count: int = select_rows(tx, query, iteration=iteration)[0]["n"]
    return count


def _load_examples(tx: Any, run: str, iteration: int, changes: Sequence[Row]) -> dict[str, Row | None]:
    task = max(changes, key=lambda row: abs(row["now"] - row["before"]), default=None)
    ids: dict[str, int | None] = {"changed": task["worst"] if task else None}
    for name, way in (("best", "DESC"), ("worst", "ASC")):
        order = f"e.reward {way}, e.tool_errors {'ASC' if way == 'DESC' else 'DESC'}, e.id"
        query = f"SELECT e.id FROM {_EPISODES} WHERE e.status = 'done' ORDER BY {order} LIMIT 1"
        rows = select_rows(tx, query, iteration=iteration)
        ids[name] = rows[0]["id"] if rows else None
    evidence = load_evidence(tx, run, [id for id in ids.values() if id is not None])
    return {name: evidence.get(id) if id is not None else None for name, id in ids.items()}
