"""Writes the load of hosts: one row per host and time slot of `SLOT_SECONDS` seconds, for the last `KEPT_SLOTS` slots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, select

from agentrl.workflow.store.connect import insert, read_transaction, transaction
from agentrl.workflow.store.driver_reader import select_rows
from agentrl.workflow.store.planning import IS_AT_WORK
from agentrl.workflow.store.reads.load_rows import MAX_HOST_CHARS, SLOT_SECONDS
from agentrl.workflow.store.reads.open_work import count_queues
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import now_ms

KEPT_SLOTS = 720
"""The number of slots whose rows are kept: one hour."""


@dataclass(frozen=True, slots=True)
class HostLoad:
    """The load of a host, as the host itself measured it.

    Args:
        cpu_share: the share of the host's processors that were busy since the last measurement, 0 to 1; None if unknown.
        memory_used, memory_total: in bytes; None if unknown.
        gpus: for each GPU its `name`, `share` (the share of the time in which the GPU was busy, 0 to 1), `memory_used` and
            `memory_total` (in bytes); None if the host has no GPU.
    """

    cpu_share: float | None
    memory_used: int | None
    memory_total: int | None
    gpus: Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class WorkLoad:
    """The work of all hosts.

    Args:
        waiting: the number of groups, updates and tool calls that wait for a worker, by queue.
        last_step: the id of the newest turn.
        tokens: the number of tokens that were sampled in the turns after the turn `last_step` of the caller; None if the caller
            passed None.
    """

    waiting: Mapping[str, int]
    last_step: int
    tokens: int | None


@read_transaction
def is_some_run_at_work(tx: Connection) -> bool:
    """Return whether workers have a running run to execute (`serve` runs do not count)."""
    return tx.execute(select(schema.runs.c.id).where(*IS_AT_WORK).limit(1)).first() is not None


@read_transaction
def count_load(tx: Connection, last_step: int | None) -> WorkLoad:
    """Count the waiting work, and the sampled tokens of the turns with an id above `last_step`."""
    waiting = {row["queue"]: row["waiting"] for row in count_queues(tx)}
    newest = tx.execute(select(func.coalesce(func.max(schema.steps.c.id), 0))).scalar_one()
    if last_step is None:
        return WorkLoad(waiting, newest, None)
    query = """
        SELECT CAST(coalesce(sum(sampled_tokens), 0) AS BIGINT) AS tokens FROM steps
        WHERE id > :after AND id <= :newest AND NOT replayed"""
    return WorkLoad(waiting, newest, select_rows(tx, query, after=last_step, newest=newest)[0]["tokens"])


@transaction
def record_load(tx: Connection, host: str, load: HostLoad, work: WorkLoad | None, tokens_per_second: float | None) -> bool:
    """Write the host's row of the present time slot, and delete the rows that are too old. Return False if the host already has
    a row of this slot.

    Rows of later slots are deleted too: they exist only if the database's clock was set back. `work` is None if another process
    counts the work.
    """
    loads = schema.machine_loads
    slot = int(tx.execute(select(now_ms())).scalar_one()) // (1000 * SLOT_SECONDS)
    waiting = {} if work is None else {f"waiting_{name}": work.waiting.get(name, 0) for name in ("rollout", "train", "tools")}
    statement = insert(tx, loads).values(
        slot=slot,
        host=host[:MAX_HOST_CHARS],
        cpu_share=load.cpu_share,
        memory_used=load.memory_used,
        memory_total=load.memory_total,
        gpus=load.gpus and [dict(gpu) for gpu in load.gpus],
        tokens_per_second=tokens_per_second,
        **waiting,
    )
    statement = statement.on_conflict_do_nothing(index_elements=["slot", "host"])
    is_new = tx.execute(statement.returning(loads.c.slot)).first() is not None
    if is_new:
        tx.execute(delete(loads).where((loads.c.slot <= slot - KEPT_SLOTS) | (loads.c.slot > slot)))
    return is_new
