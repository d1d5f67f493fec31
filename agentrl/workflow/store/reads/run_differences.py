"""How two runs differ: in their configs, in their numbers, and on the tasks that both sampled."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.config import NO_AGENT, RunConfig, flatten
from agentrl.workflow.store.driver_reader import Row, among, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.eval_results import load_task_texts
from agentrl.workflow.store.reads.run_details import LEARNING_KINDS, RunSummary, find_config, load_summaries
from agentrl.workflow.store.reads.run_rows import describe_run
from agentrl.workflow.store.reads.run_seconds import load_run_seconds
from agentrl.workflow.store.solved_rule import ID_RANGE, MEMBERS
from agentrl.workflow.tables.views import RunRow

MAX_TASKS = 50
"""The most tasks in the result."""
PROGRESS = {
    "status": "status",
    "seed": "seed",
    "iterations": "iterations planned",
    "iterations_done": "iterations done",
    "episodes_done": "episodes done",
    "last_reward": "reward of the last iteration",
}
HELD_OUT = {
    "eval_reward": "held-out reward, newest",
    "best_reward": "held-out reward, best",
    "best_version": "version with the best held-out reward",
}
"""The columns of `RunRow` among the numbers, each with its name in the result."""
BY_HAND = "reward of the newest `agentrl eval`"
EVALUATIONS = (*HELD_OUT.values(), BY_HAND)
"""The names of the numbers from evaluations. A run that was never evaluated has none of them."""


@dataclass(frozen=True, slots=True)
class RunDifferences:
    """The differences between two runs. Their values are called `one` and `other`.

    Args:
        runs: the `id` and the name (`run`) of both runs.
        config: `key`, `one` and `other` of each value that differs. If an old run does not have a key, the key's default value
            is used.
        numbers: `name`, `one` and `other`: the status, the seed, the lengths, the final and the best rewards, tokens, and the
            seconds that each part of the run took.
        tasks: the tasks whose last groups in the two runs have different mean rewards, those that differ most first: task_id,
            task, question, `one` and `other` (mean rewards), `one_iteration` and `other_iteration` (the iterations of these
            groups, counted from 1), `one_episode` and `other_episode` (the worst episode in the run
            with the lower reward, the best episode in the other run).
        shared: the number of tasks that both runs sampled.
    """

    runs: Sequence[Row]
    config: Sequence[Row]
    numbers: Sequence[Row]
    tasks: Sequence[Row]
    shared: int


@sql_read_transaction
def load_run_differences(tx: Any, one: str, other: str) -> RunDifferences:
    """Return the differences between two runs, given by name or number. Raise NotFoundError if one of the runs does not
    exist.
    """
    rows = [describe_run(tx, run) for run in (one, other)]
    configs = [flat_config(find_config(tx, row.id).values) for row in rows]
    keys = dict.fromkeys(key for config in configs for key in config)
    values = ((key, *(config.get(key) for config in configs)) for key in keys if key != "name")
    summaries = load_summaries(tx, rows)
    numbers = [_load_numbers(tx, row, summaries[row.id]) for row in rows]
    learns = any(row.kind in LEARNING_KINDS for row in rows)
    names = [
        name
        for name in dict.fromkeys(name for its in numbers for name in its)
        if any(its.get(name) is not None for its in numbers) or (learns and name == EVALUATIONS[0])
    ]
    tasks, shared = _load_tasks(tx, rows[0].id, rows[1].id)
    return RunDifferences(
        runs=[{"id": row.id, "run": row.run} for row in rows],
        config=[{"key": key, "one": mine, "other": theirs} for key, mine, theirs in values if mine != theirs],
        numbers=[{"name": name, "one": numbers[0].get(name), "other": numbers[1].get(name)} for name in names],
        tasks=tasks,
        shared=shared,
    )


def _load_numbers(tx: Any, row: RunRow, summary: RunSummary) -> dict[str, Any]:
    query = """
        SELECT number + 1 AS iteration, mean_reward FROM iterations WHERE run_id = :id AND mean_reward IS NOT NULL
        ORDER BY mean_reward DESC, number LIMIT 1"""
    (best,) = select_rows(tx, query, id=row.id) or [{"iteration": None, "mean_reward": None}]
    return {
        **{name: row[column] for column, name in PROGRESS.items()},
        "reward of the best iteration": best["mean_reward"],
        "iteration with the best reward": best["iteration"],
        **{name: row[column] for column, name in HELD_OUT.items()},
        BY_HAND: (summary.measured or {}).get("reward"),
        "tokens read and sampled": summary.tokens,
        "total seconds": row.seconds,
        **{f"{part['part']} seconds": part["seconds"] for part in load_run_seconds(tx, row.run, episodes=False)},
    }


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a stored config by dotted key. Keys that an older run does not have get their default values."""
    tree = config if config.get("agent") else {**config, "agent": NO_AGENT}
    return {**RunConfig().flat(), **dict(flatten(tree))}


SEED_KEYS = ("seed", "name")
"""The config keys in which runs may differ that are alike."""


def load_config_columns(tx: Any, ids: Sequence[int], keys: Sequence[str]) -> dict[int, dict[str, Any]]:
    """Return two values for each run, by run id: `config` has the run's values of `keys` (None for an unknown key). `alike` is
    a text that is equal for two runs if their configs differ only in SEED_KEYS. Call this inside a transaction.
    """
    columns = {}
    for row in select_rows(tx, f"SELECT id, config FROM runs WHERE id IN ({among(ids)})"):
        config = flat_config(row["config"])
        rest = json.dumps({key: value for key, value in config.items() if key not in SEED_KEYS}, sort_keys=True)
        alike = hashlib.sha256(rest.encode()).hexdigest()[:16]
        columns[row["id"]] = {"config": {key: config.get(key) for key in keys}, "alike": alike}
    return columns


def _load_tasks(tx: Any, one: int, other: int) -> tuple[list[dict[str, Any]], int]:
    """Return the tasks that differ most, and the number of tasks that both runs sampled."""
    sides = [_load_last_groups(tx, run) for run in (one, other)]
    shared = sides[0].keys() & sides[1].keys()
    changes = {id: sides[1][id]["mean_reward"] - sides[0][id]["mean_reward"] for id in shared}
    ids = sorted((id for id in shared if changes[id]), key=lambda id: (-abs(changes[id]), id))[:MAX_TASKS]
    texts = load_task_texts(tx, ids)
    episodes = _load_extremes(tx, [side[id]["id"] for id in ids for side in sides])
    return [
        {
            "task_id": id,
            **texts[id],
            **{name: side[id]["mean_reward"] for name, side in zip(("one", "other"), sides, strict=True)},
            **{name: side[id]["iteration"] for name, side in zip(("one_iteration", "other_iteration"), sides, strict=True)},
            "one_episode": episodes.get(sides[0][id]["id"], (None, None))[changes[id] > 0],
            "other_episode": episodes.get(sides[1][id]["id"], (None, None))[changes[id] < 0],
        }
        for id in ids
    ], len(shared)


def _load_last_groups(tx: Any, run: int) -> dict[int, Row]:
    """Return the last group with rewards of each task of a run and its iteration, by task."""
    query = f"""
        SELECT g.id, g.task_id, g.mean_reward, m.newest / {ID_RANGE} AS iteration FROM
          (SELECT max(place) AS newest FROM ({MEMBERS}) members WHERE mean_reward IS NOT NULL GROUP BY task_id) m
        JOIN groups g ON g.id = m.newest % {ID_RANGE}"""
    return {row["task_id"]: row for row in select_rows(tx, query, run_id=run)}


def _load_extremes(tx: Any, groups: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return the best and the worst episode of each group."""
    query = f"""
        SELECT id, group_id FROM episodes WHERE group_id IN ({among(groups)}) AND status = 'done' AND reward IS NOT NULL
        ORDER BY reward, id"""
    ordered: dict[int, list[int]] = {}
    for row in select_rows(tx, query):
        ordered.setdefault(row["group_id"], []).append(row["id"])
    return {group: (ids[-1], ids[0]) for group, ids in ordered.items()}
