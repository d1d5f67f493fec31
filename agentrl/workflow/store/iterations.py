"""The groups of an iteration. They are new groups for the next tasks in the run's order, or stored groups that the iteration
trains on.

With dynamic sampling, an iteration may get more groups, which have other tasks. The order of the tasks in a run depends only on
its seed, the epoch and the tasks.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, select, update

from agentrl.workflow.store.run_resources import link_resources
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import now_ms


class Slot(NamedTuple):
    """A group's place in an iteration: slot number, task id, sample number of its first episode."""

    number: int
    task: int
    sample: int


def task_order(seed: int, epoch: int | str, keys: Sequence[str], difficulties: Sequence[float | None] = ()) -> list[int]:
    """Return the indices of the tasks in the order of one epoch. The order is the same on every machine.

    The tasks are sorted by difficulty, if difficulties are given, and then by hash(seed, epoch, task). `keys` are the keys of
    the tasks. `difficulties` are the difficulties of the tasks. The lowest comes first, None comes last.
    """
    digests = [hashlib.sha256(f"{seed}|{epoch}|{key}".encode()).digest() for key in keys]
    order = sorted(range(len(keys)), key=digests.__getitem__)
    levels = [math.inf if difficulty is None else difficulty for difficulty in difficulties]
    return sorted(order, key=levels.__getitem__) if levels else order


def iterations_per_epoch(tasks: int, tasks_per_iteration: int) -> int:
    """Return the number of iterations in an epoch, in which each task is used once."""
    return -(-tasks // tasks_per_iteration)


def epoch_length(tx: Connection, run: Mapping[Any, Any]) -> int:
    """Return the number of iterations in an epoch of a run; 0 if the run trains on stored groups. `run` is the run's row."""
    tasks = tx.execute(select(func.count()).where(schema.run_tasks.c.run_id == run["id"])).scalar_one()
    return iterations_per_epoch(tasks, run["config"]["rollout"]["tasks_per_iteration"])


def epochs_of(iterations: int, of_an_epoch: int) -> int:
    """Return how many epochs begin within this many iterations. `of_an_epoch` is the number of iterations in an epoch."""
    return -(-iterations // of_an_epoch)


def staleness_of(config: Mapping[str, Any]) -> int:
    """Return the run's maximum staleness S, in versions. Iteration i, counted from 0, samples with version max(0, i - S)."""
    return int(config["rollout"].get("max_staleness", 0))  # runs older than this option lack it


def dynamic_sampling_of(config: Mapping[str, Any]) -> int:
    """Return the factor by which dynamic sampling may multiply the groups of an iteration; 1 if dynamic sampling is off."""
    return int(config["rollout"].get("dynamic_sampling", 1))


def wanted_groups(tx: Connection, iteration: int, config: Mapping[str, Any]) -> int:
    """Return the number of groups on which the iteration may train at most. With dynamic sampling, this is the number of groups
    that were planned at first. It is 0 if dynamic sampling is off: then all groups are trained on.
    """
    if dynamic_sampling_of(config) == 1:
        return 0
    planned = select(func.count()).where(schema.groups.c.iteration_id == iteration).scalar_subquery()
    return int(
        tx.execute(select(planned - schema.iterations.c.more_groups).where(schema.iterations.c.id == iteration)).scalar_one()
    )


def insert_iteration(tx: Connection, run_id: int, number: int, policy_id: int) -> int:
    """Plan an iteration with its groups and episodes; return the iteration's id. The episodes sample with exactly the policy
    `policy_id`.

    In a run that trains on stored groups, the iteration gets the next of these groups, and no episodes are planned.
    """
    run = tx.execute(select(schema.runs).where(schema.runs.c.id == run_id)).mappings().one()
    stored = tx.execute(select(schema.run_groups.c.group_id).where(schema.run_groups.c.run_id == run_id)).scalars().all()
    epoch, chosen = _pick_stored_groups(run, number, stored) if stored else _pick_tasks(tx, run, number)
    size = run["config"]["rollout"]["group_size"]
    planned = _count_episodes(tx, chosen) if stored else len(chosen) * size
    iteration_id: int = tx.execute(
        schema.iterations.insert()
        .values(run_id=run_id, number=number, epoch=epoch, policy_id=policy_id, episodes=planned)
        .returning(schema.iterations.c.id)
    ).scalar_one()
    if stored:
        lent = [{"iteration_id": iteration_id, "slot": slot, "group_id": group} for slot, group in enumerate(chosen)]
        tx.execute(schema.iteration_groups.insert(), lent)
    else:
        slots = [Slot(number, task, 0) for number, task in enumerate(chosen)]
        insert_groups(tx, run, iteration_id, slots)
    return iteration_id


def insert_more_groups(tx: Connection, run: Mapping[Any, Any], iteration: Mapping[str, Any], planned: int, count: int) -> None:
    """Add `count` groups to an iteration that has `planned` groups, and invalidate the claims on the iteration.

    The tasks of the new groups depend only on the seed, the iteration and the slot. Tasks that the iteration does not have yet
    come first. After that all tasks are used again, with new sample numbers and therefore other random draws.
    """
    _, first = _pick_tasks(tx, run, iteration["number"])
    ids, keys, _ = _load_all_tasks(tx, run)
    order = [ids[index] for index in task_order(run["seed"], f"more {iteration['number']}", keys)]
    order = list(dict.fromkeys([*first, *order]))
    size = run["config"]["rollout"]["group_size"]
    numbers = range(planned, planned + count)
    slots = [Slot(slot, order[slot % len(order)], slot // len(order) * size) for slot in numbers]
    insert_groups(tx, run, iteration["id"], slots)
    iterations = schema.iterations.c
    tx.execute(
        update(schema.iterations)
        .where(iterations.id == iteration["id"])
        .values(
            episodes=iterations.episodes + count * size,
            more_groups=iterations.more_groups + count,
            train_token=iterations.train_token + 1,
            lease_until=now_ms() - 1,
            worker="",
            train_sent_ms=None,
            train_sends=0,
        )
    )


def _pick_stored_groups(run: Mapping[Any, Any], number: int, groups: Sequence[int]) -> tuple[int, list[int]]:
    return _pick_in_turn(run, number, sorted(groups), [str(group) for group in sorted(groups)])


def _pick_tasks(tx: Connection, run: Mapping[Any, Any], number: int) -> tuple[int, list[int]]:
    return _pick_in_turn(run, number, *_load_all_tasks(tx, run))


def _load_all_tasks(tx: Connection, run: Mapping[Any, Any]) -> tuple[list[int], list[str], list[float | None]]:
    columns = (schema.tasks.c.id, schema.tasks.c.key, schema.run_tasks.c.difficulty)
    mine = select(*columns).join(schema.run_tasks).where(schema.run_tasks.c.run_id == run["id"])
    tasks = tx.execute(mine.order_by(schema.tasks.c.id)).all()
    return [task.id for task in tasks], [task.key for task in tasks], [task.difficulty for task in tasks]


def _pick_in_turn(
    run: Mapping[Any, Any], number: int, ids: Sequence[int], keys: Sequence[str], difficulties: Sequence[float | None] = ()
) -> tuple[int, list[int]]:
    """Return the epoch of an iteration, and the ids that the iteration uses."""
    size = run["config"]["rollout"]["tasks_per_iteration"]
    epoch, position = divmod(number, iterations_per_epoch(len(ids), size))
    order = task_order(run["seed"], epoch, keys, difficulties)
    return epoch, [ids[index] for index in order[position * size : (position + 1) * size]]


def _count_episodes(tx: Connection, groups: Sequence[int]) -> int:
    return tx.execute(select(func.count()).where(schema.episodes.c.group_id.in_(groups))).scalar_one()


def insert_groups(tx: Connection, run: Mapping[Any, Any], iteration_id: int, slots: Sequence[Slot]) -> dict[int, int]:
    """Plan a group with its episodes for each slot; return the groups' ids by slot number.

    The episodes use the texts in the run's config. A search run is an exception: the search chooses the texts.
    """
    of_iteration = {"run_id": run["id"], "iteration_id": iteration_id}
    tx.execute(
        schema.groups.insert(),
        [{**of_iteration, "task_id": slot.task, "slot": slot.number, "kind": run["kind"]} for slot in slots],
    )
    groups = schema.groups.c
    inserted = select(groups.slot, groups.id).where(groups.iteration_id == iteration_id, groups.slot >= slots[0].number)
    ids = {row.slot: row.id for row in tx.execute(inserted)}
    tx.execute(
        schema.episodes.insert(),
        [
            {**of_iteration, "group_id": ids[slot.number], "task_id": slot.task, "sample": slot.sample + sample}
            for slot in slots
            for sample in range(run["config"]["rollout"]["group_size"])
        ],
    )
    texts = run["config"].get("resources")  # runs older than this option lack it
    if texts and run["kind"] != "search":
        link_resources(tx, run["id"], list(ids.values()), texts)
    return ids
