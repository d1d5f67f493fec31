"""Leases of services, groups and iterations, and the handling of lost workers.

A holder renews its lease. If the lease of a claim expires, another worker may claim the same group or iteration
(`rollout_claims`, `train_claims`). The previous worker is then recorded as lost. A supervisor that sees a worker end records
the loss and ends the worker's leases at once. A worker whose GPU failed hands its claims back, which does not count as a loss.
A run fails after `MAX_DEVICE_LOSSES` failed devices without progress.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, select, union, update

from agentrl.workflow.store.connect import insert, read_transaction, transaction
from agentrl.workflow.store.planning import IS_AT_WORK, log, set_run_status
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.column_values import LOSS_EVENTS
from agentrl.workflow.tables.columns import is_lease_free, now_ms
from agentrl.workflow.trajectory import OPEN

OOM_HINT = "Lower rollout.group_size or update.microbatch_tokens, or set model.load_in_4bit=true."
"""Advice for a worker that ran out of memory."""

EXIT_MS = 3000
"""The time that a process may take to exit, in ms. Its claims stay leased for this time. The broker could otherwise deliver the
retry message to the exiting process, whose connection is still open.
"""
MAX_DEVICE_LOSSES = 5
"""The number of device failures after which a run fails. The count starts again when a group or an iteration of the run ends.
"""


@transaction
def take_service_lease(tx: Connection, name: str, holder: str, seconds: float) -> bool:
    """Acquire or renew the lease of a service with one process. Return False if another process holds it."""
    leases = schema.service_leases
    until = now_ms() + int(seconds * 1000)
    acquired = tx.execute(
        insert(tx, leases)
        .values(name=name, holder=holder, lease_until=until)
        .on_conflict_do_nothing(index_elements=["name"])
        .returning(leases.c.name)
    ).scalar_one_or_none()
    if acquired:
        return True
    renewed = tx.execute(
        update(leases)
        .where(leases.c.name == name, (leases.c.holder == holder) | is_lease_free(leases.c.lease_until, seconds))
        .values(holder=holder, lease_until=until)
    )
    return bool(renewed.rowcount)


@transaction
def release_service_lease(tx: Connection, name: str, holder: str) -> None:
    """Delete the lease of a service that has ended, if `holder` still holds the lease."""
    leases = schema.service_leases
    tx.execute(delete(leases).where(leases.c.name == name, leases.c.holder == holder))


@transaction
def publish_service(tx: Connection, name: str, holder: str, seconds: float) -> None:
    """Store the address of a service of which several processes may run. The newest address replaces an older one."""
    values = {"holder": holder, "lease_until": now_ms() + int(seconds * 1000)}
    statement = insert(tx, schema.service_leases).values(name=name, **values)
    tx.execute(statement.on_conflict_do_update(index_elements=["name"], set_=values))


@read_transaction
def service_holder(tx: Connection, name: str) -> str | None:
    """Return the holder of the service's live lease; None if no lease is live."""
    leases = schema.service_leases
    return tx.execute(
        select(leases.c.holder).where(leases.c.name == name, leases.c.lease_until >= now_ms())
    ).scalar_one_or_none()


@transaction
def record_oom(tx: Connection, worker: str, role: str) -> None:
    """Record that the kernel killed the worker `host:pid` for lack of memory, and end the worker's leases.

    An event is written to every run of which the worker held a claim. If the worker held no claim, one event without a run is
    written.
    """
    held = (select(table.c.run_id).where(*is_held_by(table, worker)) for table in (schema.groups, schema.iterations))
    runs: set[int | None] = set(tx.execute(union(*held)).scalars())
    for run in runs or {None}:
        log(tx, run, "oom", worker, f"the worker {role} was killed, out of memory. {OOM_HINT}")
    _end_leases(tx, worker)


@transaction
def record_loss(tx: Connection, worker: str, role: str, how: str) -> None:
    """Record that the worker `host:pid` ended, and end the worker's leases.

    An event is written to every running run, with the work that the worker held. If a worker dies repeatedly at its start,
    equal consecutive events are written once. `how` says how the worker ended, as a verb phrase.
    """
    for run in tx.execute(select(schema.runs.c.id).where(*IS_AT_WORK)).scalars().all():
        detail = f"the worker {role} {how}, and is started again; it held {describe_held_work(tx, run, worker, role)}"
        newest = (
            select(schema.events.c.detail).where(schema.events.c.run_id == run).order_by(schema.events.c.id.desc()).limit(1)
        )
        if tx.execute(newest).scalar() != detail:
            log(tx, run, "worker_lost", worker, detail)
    _end_leases(tx, worker)


def _end_leases(tx: Connection, worker: str) -> None:
    """End the leases of an ended worker: others can claim its work at once, which then counts as lost."""
    for table in (schema.groups, schema.iterations):
        now = now_ms()
        tx.execute(update(table).where(*is_held_by(table, worker), table.c.lease_until > now).values(lease_until=now - 1))


def note_takeover(tx: Connection, run: int, claim: str, what: str, heir: str, seen_ms: int) -> None:
    """Write the event that a worker is lost: the lease of its claim `claim` has expired, and the claim `heir` continues the
    work.

    Nothing is written if the loss has already been recorded.

    Args:
        claim: the name of the lost claim, which starts with the lost worker's `host:pid`.
        what: the claimed work, in words.
        heir: the name of the new claim.
        seen_ms: the time at which the lost worker last renewed its lease, in ms since 1970. Events before that time are
            ignored: they are about an earlier process with the same host and pid (a restarted container keeps both).
    """
    worker, events = claim.partition("/")[0], schema.events.c
    seen = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=seen_ms - 1000)  # SQLite's events have whole seconds
    loss_event = select(events.id).where(events.run_id == run, events.kind.in_(LOSS_EVENTS), events.subject == worker)
    loss_event = loss_event.where(events.created_at >= seen)
    if tx.execute(loss_event.limit(1)).first() is None:
        successor = heir.partition("/")[0]
        if successor == worker:  # in a container, which keeps its name, every process has the same pid
            successor = "the same worker"
        detail = f"its lease on {what} expired; {successor} continues from the last commit"
        log(tx, run, "worker_lost", worker, detail)


def memory_hint(tx: Connection, run: int, claim: str) -> str:
    """Return advice on memory if the claim's worker was killed for lack of memory; else an empty string."""
    events, worker = schema.events.c, claim.partition("/")[0]
    query = select(events.id).where(events.run_id == run, events.kind == "oom", events.subject == worker)
    return f", the last time out of memory. {OOM_HINT}" if tx.execute(query.limit(1)).first() else ""


def is_held_by(table: Any, worker: str) -> tuple[ColumnElement[bool], ...]:
    """Return the SQL conditions for the open rows of `table` that the worker `host:pid` holds."""
    return table.c.worker.startswith(f"{worker}/", autoescape=True), table.c.status.in_(OPEN)


def describe_held_work(tx: Connection, run: int, worker: str, role: str) -> str:
    """Return a phrase that names how many claims of the run the worker held.

    The rows do not say which worker holds a tool call. So for a tools worker, the phrase counts all open calls of the run.
    """
    counts = [
        (tx.execute(select(func.count()).select_from(table).where(table.c.run_id == run, *is_held_by(table, worker))), word)
        for table, word in ((schema.groups, "group"), (schema.iterations, "update"))
    ]
    if role == "tools":
        counts.append((tx.execute(_count_open_calls(run)), "tool call"))
    phrases = [f"{count} {word}{'s' * (count > 1)}" for result, word in counts if (count := result.scalar_one())]
    return " and ".join(phrases) or "nothing"


def _count_open_calls(run: int) -> Any:
    calls, episodes = schema.tool_calls.c, schema.episodes.c
    mine = select(episodes.id).join(schema.iterations, schema.iterations.c.id == episodes.iteration_id)
    mine = mine.where(episodes.run_id == run, episodes.status == "running", schema.iterations.c.status == "running")
    waiting = select(func.count()).select_from(schema.tool_calls).where(calls.episode_id.in_(mine), calls.result.is_(None))
    return waiting.where(calls.kind != "agent")


@transaction
def hand_back_claims(tx: Connection, worker: str, role: str, reason: str) -> None:
    """Release all claims of the worker `host:pid` because its device failed. The release counts neither as a loss nor as an
    attempt.

    Other workers may claim the work after `EXIT_MS`. A run fails if devices of its workers fail `MAX_DEVICE_LOSSES` times
    without progress; otherwise the same work would fail forever. `reason` is the device's error.
    """
    holds = union(*(select(table.c.run_id).where(*is_held_by(table, worker)) for table in (schema.groups, schema.iterations)))
    for run in tx.execute(select(schema.runs.c.id).where(*IS_AT_WORK, schema.runs.c.id.in_(holds))).scalars().all():
        held = describe_held_work(tx, run, worker, role)
        log(tx, run, "device_lost", worker, f"the worker {role} ended because its device failed ({reason}); it held {held}")
        if _count_losses(tx, run) >= MAX_DEVICE_LOSSES:
            failed = f"The device failed {MAX_DEVICE_LOSSES} times without any progress, the last time at {worker}: {reason}."
            set_run_status(tx, run, "failed", f"{failed} Check it there: agentrl doctor")
    for table in (schema.groups, schema.iterations):
        tx.execute(update(table).where(*is_held_by(table, worker)).values(lease_until=now_ms() + EXIT_MS, worker=""))


@transaction
def record_cpu_after_loss(tx: Connection, run: int, worker: str) -> str:
    """If a device failed in this run, write an event that the worker uses the CPU. Return the event's text, else ""."""
    events = schema.events.c
    losses = select(func.count()).select_from(schema.events).where(events.run_id == run, events.kind == "device_lost")
    if not tx.execute(losses).scalar_one():
        return ""
    sentence = "the worker uses the CPU because its GPU failed; with AGENTRL_DEVICE=cuda it would stop instead"
    log(tx, run, "on_cpu", worker, sentence)
    return sentence


def _count_losses(tx: Connection, run: int) -> int:
    """Return the run's device failures since it was resumed, or a group or iteration ended."""
    events, count = schema.events.c, select(func.count()).select_from(schema.events)
    count = count.where(events.run_id == run, events.kind == "device_lost")
    resumed = select(func.max(events.id)).where(events.run_id == run, events.kind == "resumed").scalar_subquery()
    count = count.where(events.id > func.coalesce(resumed, 0))
    for table in (schema.groups, schema.iterations):
        ended = select(func.max(table.c.finished_at)).where(table.c.run_id == run).scalar_subquery()
        count = count.where(events.created_at >= func.coalesce(ended, events.created_at))
    return int(tx.execute(count).scalar_one())
