"""What an iteration consists of: the groups of the tasks whose turn it is, or the stored groups that it trains on.

Every run passes over its tasks in an order that follows from its seed, the epoch and the tasks alone.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, func, select

from workflow import db


def task_order(seed: int, epoch: int, keys: Sequence[str]) -> list[int]:
    """Positions of the tasks in the order of hash(seed, epoch, task): the same on every machine."""
    digests = [hashlib.sha256(f"{seed}|{epoch}|{key}".encode()).digest() for key in keys]
    return sorted(range(len(keys)), key=digests.__getitem__)


def staleness_of(config: Mapping[str, Any]) -> int:
    """How many versions a run's episodes may lag behind its trainer: iteration i samples with version max(0, i - that)."""
    return int(config["rollout"].get("max_staleness", 0))  # a run of before there was such an option has none


def insert_iteration(tx: Connection, run_id: int, number: int, policy_id: int) -> int:
    """One iteration with its groups and episodes, planned; episodes sample with exactly that policy. Returns its id.

    A run that trains on stored groups gets the next of those instead, and nothing to roll out.
    """
    run = tx.execute(select(db.runs).where(db.runs.c.id == run_id)).mappings().one()
    stored = tx.execute(select(db.run_groups.c.group_id).where(db.run_groups.c.run_id == run_id)).scalars().all()
    epoch, chosen = _stored(run, number, stored) if stored else _tasks(tx, run, number)
    size = run["config"]["rollout"]["group_size"]
    planned = _size_of(tx, chosen) if stored else len(chosen) * size
    iteration_id: int = tx.execute(
        db.iterations.insert()
        .values(run_id=run_id, number=number, epoch=epoch, policy_id=policy_id, episodes=planned)
        .returning(db.iterations.c.id)
    ).scalar_one()
    if stored:
        lent = [{"iteration_id": iteration_id, "slot": slot, "group_id": group} for slot, group in enumerate(chosen)]
        tx.execute(db.iteration_groups.insert(), lent)
    else:
        _insert_groups(tx, run_id, iteration_id, run["kind"], chosen, size)
    return iteration_id


def _stored(run: Mapping[Any, Any], number: int, groups: Sequence[int]) -> tuple[int, list[int]]:
    return _chosen(run, number, sorted(groups), [str(group) for group in sorted(groups)])


def _tasks(tx: Connection, run: Mapping[Any, Any], number: int) -> tuple[int, list[int]]:
    mine = select(db.tasks.c.id, db.tasks.c.key).join(db.run_tasks).where(db.run_tasks.c.run_id == run["id"])
    tasks = tx.execute(mine.order_by(db.tasks.c.id)).all()
    return _chosen(run, number, [task.id for task in tasks], [task.key for task in tasks])


def _chosen(run: Mapping[Any, Any], number: int, ids: Sequence[int], keys: Sequence[str]) -> tuple[int, list[int]]:
    """The epoch of the iteration of that number, and those of the ids whose turn it is."""
    epoch, position = divmod(number, run["iterations"] // run["epochs"])
    order, size = task_order(run["seed"], epoch, keys), run["config"]["rollout"]["tasks_per_iteration"]
    return epoch, [ids[index] for index in order[position * size : (position + 1) * size]]


def _size_of(tx: Connection, groups: Sequence[int]) -> int:
    return tx.execute(select(func.count()).where(db.episodes.c.group_id.in_(groups))).scalar_one()


def _insert_groups(tx: Connection, run_id: int, iteration_id: int, kind: str, tasks: Sequence[int], size: int) -> None:
    tx.execute(
        db.groups.insert(),
        [
            {"run_id": run_id, "iteration_id": iteration_id, "task_id": task_id, "slot": slot, "kind": kind}
            for slot, task_id in enumerate(tasks)
        ],
    )
    rows = tx.execute(select(db.groups.c.id, db.groups.c.task_id).where(db.groups.c.iteration_id == iteration_id)).all()
    tx.execute(
        db.episodes.insert(),
        [
            {"run_id": run_id, "iteration_id": iteration_id, "group_id": row.id, "task_id": row.task_id, "sample": sample}
            for row in rows
            for sample in range(size)
        ],
    )
