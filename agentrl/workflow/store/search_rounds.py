"""The rows of a search: tried candidates, planned groups, answers of the critic, and the final choice.

A search is one iteration. Each round adds groups to the iteration in one commit. The last round ends when the search has chosen
its texts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select, update

from agentrl.workflow.errors import Fenced
from agentrl.workflow.store.connect import insert, read_transaction, transaction
from agentrl.workflow.store.episode_loader import task_value
from agentrl.workflow.store.iterations import Slot, insert_groups
from agentrl.workflow.store.planning import log, set_run_status
from agentrl.workflow.store.run_resources import VersionOrigin, link_resources, resources_of_group, version_of
from agentrl.workflow.store.train_claims import IterationWork
from agentrl.workflow.store.train_commits import UpdateRecord, close_iteration
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import now_ms
from agentrl.workflow.trajectory import OPEN, Task, storable

_ITERATIONS, _GROUPS, _CRITIC = schema.iterations.c, schema.groups.c, schema.critic_calls.c


@dataclass(frozen=True)
class SearchTasks:
    """The tasks of a search run: for each role of tasks (`train`, `choose` or `held_out`), the tasks by id."""

    train: Mapping[int, Task]
    choose: Mapping[int, Task]
    held_out: Mapping[int, Task]


@dataclass(frozen=True)
class PlannedGroup:
    """A group to be rolled out: id of its task, texts by name, origin of these texts."""

    task: int
    candidate: Mapping[str, str]
    origin: VersionOrigin


@read_transaction
def load_search_tasks(tx: Connection, run_id: int) -> SearchTasks:
    roles = schema.run_tasks.c
    query = select(schema.tasks, roles.role).join(schema.run_tasks, roles.task_id == schema.tasks.c.id)
    tasks: dict[str, dict[int, Task]] = {"train": {}, "choose": {}, "held_out": {}}
    for row in tx.execute(query.where(roles.run_id == run_id).order_by(schema.tasks.c.content_hash)).mappings():
        tasks[row["role"]][row["id"]] = task_value(row)
    return SearchTasks(**tasks)


@read_transaction
def load_candidates(tx: Connection, iteration: int) -> dict[int, dict[str, str]]:
    """Return the texts of each group of the iteration, by slot."""
    rows = tx.execute(select(_GROUPS.slot, _GROUPS.id).where(_GROUPS.iteration_id == iteration)).all()
    return {row.slot: resources_of_group(tx, row.id) for row in rows}


@read_transaction
def load_parts(tx: Connection, iteration: int) -> dict[int, dict[str, float]]:
    """Return the reward parts of each episode of the iteration, by episode id."""
    rewards, episodes = schema.rewards.c, schema.episodes.c
    query = select(rewards.episode_id, rewards.part, func.sum(rewards.value).label("value"))
    query = query.join(schema.episodes, episodes.id == rewards.episode_id).where(episodes.iteration_id == iteration)
    query = query.join(schema.reward_sets, schema.reward_sets.c.id == rewards.reward_set_id)
    query = query.where(schema.reward_sets.c.name == "default").group_by(rewards.episode_id, rewards.part)
    parts: dict[int, dict[str, float]] = {}
    for row in tx.execute(query.order_by(rewards.episode_id, rewards.part)):
        parts.setdefault(row.episode_id, {})[row.part] = row.value
    return parts


@read_transaction
def load_answers(tx: Connection, run_id: int) -> dict[str, str]:
    """Return the answers of the run's critic, by the key of the critic's request."""
    return {row.key: row.answer for row in tx.execute(select(_CRITIC.key, _CRITIC.answer).where(_CRITIC.run_id == run_id))}


@transaction
def record_answer(
    tx: Connection, run_id: int, model: str, key: str, messages: Sequence[Mapping[str, Any]], answer: str, seconds: float
) -> str:
    """Store the critic's answer to a request, unless an answer is already stored. Return the stored answer."""
    cleaned = [{name: storable(str(text)) for name, text in message.items()} for message in messages]
    values = {"run_id": run_id, "key": key, "model": model, "messages": cleaned, "answer": storable(answer), "seconds": seconds}
    tx.execute(insert(tx, schema.critic_calls).values(values).on_conflict_do_nothing(index_elements=["run_id", "key"]))
    return str(tx.execute(select(_CRITIC.answer).where(_CRITIC.run_id == run_id, _CRITIC.key == key)).scalar_one())


@transaction
def add_round(tx: Connection, work: IterationWork, planned: Sequence[PlannedGroup]) -> None:
    """Add groups to the search's iteration, and release the claim on the iteration. Raise Fenced if another process holds the
    iteration, or the iteration has ended.
    """
    mine = (_ITERATIONS.id == work.id) & (_ITERATIONS.train_token == work.token) & _ITERATIONS.status.in_(OPEN)
    if tx.execute(select(_ITERATIONS.id).where(mine).with_for_update()).first() is None:
        raise Fenced(f"The search of {work.run} is no longer held by token {work.token}.")
    run = tx.execute(select(schema.runs).where(schema.runs.c.id == work.run_id).with_for_update()).mappings().one()
    before = Counter(tx.execute(select(_GROUPS.task_id).where(_GROUPS.iteration_id == work.id)).scalars())
    first, size = sum(before.values()), work.config["rollout"]["group_size"]
    slots = []
    for number, group in enumerate(planned, first):
        slots.append(Slot(number, group.task, before[group.task] * size))
        before[group.task] += 1
    ids = insert_groups(tx, run, work.id, slots)
    for slot, group in zip(slots, planned, strict=True):
        link_resources(tx, work.run_id, [ids[slot.number]], group.candidate, group.origin)
    again = {"train_token": _ITERATIONS.train_token + 1, "lease_until": now_ms() - 1, "worker": ""}
    sent = {"train_sent_ms": None, "train_sends": 0, "episodes": _ITERATIONS.episodes + len(planned) * size}
    tx.execute(update(schema.iterations).where(_ITERATIONS.id == work.id).values(**again, **sent))


@transaction
def finish_search(tx: Connection, work: IterationWork, chosen: Mapping[str, str] | None) -> None:
    """End the search and mark the chosen texts. Raise Fenced if another process holds the iteration, or the iteration has
    ended.
    """
    close_iteration(tx, work, UpdateRecord((), {}))
    ids = [
        version_of(tx, work.run_id, name, text, VersionOrigin("chosen without a trial"))
        for name, text in (chosen or {}).items()
    ]
    if ids:
        tx.execute(update(schema.resources).where(schema.resources.c.id.in_(ids)).values(chosen=True))
        versions = select(schema.resources.c.name, schema.resources.c.version).where(schema.resources.c.id.in_(ids))
        names = ", ".join(f"{row.name}@{row.version}" for row in tx.execute(versions.order_by(schema.resources.c.name)))
        log(tx, work.run_id, "chosen", detail=names)
    set_run_status(tx, work.run_id, "done", "")
