"""Claims of a worker whose GPU failed are handed back. A run fails after five such losses without progress, counted from its
event log.
"""

from sqlalchemy import Connection, func, select, union, update

from agentrl.workflow.store.connect import transaction
from agentrl.workflow.store.lost_workers import describe_held_work, is_held_by
from agentrl.workflow.store.planning import IS_AT_WORK, log
from agentrl.workflow.store.train_claims import set_run_status
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import now_ms

EXIT_MS = 3000
"""How long a process may take to end. Until then its claims stay leased: while its connection to the broker is open, the broker
could deliver the retry message to the dying process."""
MAX_DEVICE_LOSSES = 5
"""A run fails once its workers have lost their devices this often since a group or an iteration of it ended."""


@transaction
def hand_back_claims(tx: Connection, worker: str, role: str, reason: str) -> None:
    """Hand back all claims of the worker `host:pid`, whose device failed for `reason`; no loss and no attempt is counted.

    Others may claim them after `EXIT_MS`.

    A device that fails again and again without any progress of a run fails that run: else it would go on for ever.
    """
    holds = union(*(select(table.c.run_id).where(*is_held_by(table, worker)) for table in (schema.groups, schema.iterations)))
    for run in tx.execute(select(schema.runs.c.id).where(*IS_AT_WORK, schema.runs.c.id.in_(holds))).scalars().all():
        held = describe_held_work(tx, run, worker, role)
        log(tx, run, "device_lost", worker, f"the worker {role} ended because its device failed ({reason}); it held {held}")
        if _count_losses(tx, run) >= MAX_DEVICE_LOSSES:
            failed = f"The device failed {MAX_DEVICE_LOSSES} times without any progress, at last at {worker}: {reason}."
            set_run_status(tx, run, "failed", f"{failed} Check it there: agentrl doctor")
    for table in (schema.groups, schema.iterations):
        tx.execute(update(table).where(*is_held_by(table, worker)).values(lease_until=now_ms() + EXIT_MS, worker=""))


def _count_losses(tx: Connection, run: int) -> int:
    """Return how many devices the run has lost since a group or an iteration of it ended, and since it was resumed."""
    events, count = schema.events.c, select(func.count()).select_from(schema.events)
    count = count.where(events.run_id == run, events.kind == "device_lost")
    resumed = select(func.max(events.id)).where(events.run_id == run, events.kind == "resumed").scalar_subquery()
    count = count.where(events.id > func.coalesce(resumed, 0))
    for table in (schema.groups, schema.iterations):
        ended = select(func.max(table.c.finished_at)).where(table.c.run_id == run).scalar_subquery()
        count = count.where(events.created_at >= func.coalesce(ended, events.created_at))
    return int(tx.execute(count).scalar_one())
