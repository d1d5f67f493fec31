"""Workers that the kernel killed for want of memory: told to the runs whose work they held, said when it is given up."""

from sqlalchemy import Connection, select, union

from workflow import db
from workflow.store.connect import transaction
from workflow.store.planning import log
from workflow.trajectory import OPEN

OOM_HINT = "Lower rollout.group_size or update.microbatch_tokens, or set model.load_in_4bit=true."
"""What to do about it."""


@transaction
def record_oom(tx: Connection, worker: str, role: str) -> None:
    """Tells every run of which the worker `host:pid` holds something that the kernel killed it, out of memory."""
    held = [
        select(table.c.run_id).where(table.c.worker.startswith(f"{worker}/", autoescape=True), table.c.status.in_(OPEN))
        for table in (db.groups, db.iterations)
    ]
    runs: set[int | None] = set(tx.execute(union(*held)).scalars())
    for run in runs or {None}:
        log(tx, run, "oom", worker, f"the worker {role} was killed, out of memory. {OOM_HINT}")


def memory_hint(tx: Connection, run: int, claim: str) -> str:
    """What to add to the loss of a claim's worker: the hint if it was killed for want of memory, else nothing."""
    events, worker = db.events.c, claim.partition("/")[0]
    query = select(events.id).where(events.run_id == run, events.kind == "oom", events.subject == worker)
    return f", the last time out of memory. {OOM_HINT}" if tx.execute(query.limit(1)).first() else ""
