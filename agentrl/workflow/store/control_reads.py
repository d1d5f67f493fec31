"""Queries of the control loop and the services: snapshots, running runs, leases."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, func, select

from agentrl.workflow.control.snapshot import Claim, GroupState, IterationState, RunSnapshot, Snapshot
from agentrl.workflow.store.blocked_runs import awaits_maker
from agentrl.workflow.store.connect import Database, read_transaction
from agentrl.workflow.store.iterations import staleness_of
from agentrl.workflow.store.planning import IS_AT_WORK, is_broken, newest_version
from agentrl.workflow.store.run_names import find_run
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import CLOCK_JUMP_LEASES, now_ms
from agentrl.workflow.trajectory import OPEN

Row = Mapping[str, Any]


@read_transaction
def snapshot(tx: Connection, lease_seconds: float) -> Snapshot:
    """Return the unfinished work of running runs, except those that wait for another run's rebuild."""
    now = int(tx.execute(select(now_ms())).scalar_one())
    running = tx.execute(
        select(schema.runs.c.id, schema.runs.c.name, is_broken(schema.runs.c.id))
        .where(*IS_AT_WORK, ~awaits_maker())
        .order_by(schema.runs.c.id)
    )
    return Snapshot(
        tuple(
            RunSnapshot(run_id, name, _open_iterations(tx, run_id, now, lease_seconds), _group_seconds(tx, run_id), broken)
            for run_id, name, broken in running
        ),
        lease_seconds,
    )


def _open_iterations(tx: Connection, run_id: int, now: int, lease: float) -> tuple[IterationState, ...]:
    iterations, groups = schema.iterations, schema.groups
    mine = select(iterations, newest_version(run_id).label("newest")).where(iterations.c.run_id == run_id)
    rows = tx.execute(mine.where(iterations.c.status.in_(OPEN)).order_by(iterations.c.number)).all()
    states = []
    for row in rows:
        members = tx.execute(
            select(groups.c.id, groups.c.worker, groups.c.lease_until, groups.c.sent_ms, groups.c.sends)
            .where(groups.c.iteration_id == row.id, groups.c.status.in_(OPEN))
            .order_by(groups.c.slot)
        )
        states.append(
            IterationState(
                id=row.id,
                number=row.number,
                groups=tuple(GroupState(m.id, _claim_state(now, lease, m.lease_until, m.sent_ms, m.sends)) for m in members),
                train=_claim_state(now, lease, row.lease_until, row.train_sent_ms, row.train_sends),
                published=row.number <= row.newest,
            )
        )
    return tuple(states)


def _claim_state(now: int, lease: float, lease_until: int | None, sent_ms: int | None, sends: int) -> Claim:
    held = lease_until is not None and now <= lease_until <= now + CLOCK_JUMP_LEASES * lease * 1000
    expired_ago = None if lease_until is None or lease_until >= now else (now - lease_until) / 1000
    return Claim(held, expired_ago, None if sent_ms is None else (now - sent_ms) / 1000, sends)


def _group_seconds(tx: Connection, run_id: int) -> float:
    groups = schema.groups.c
    recent = tx.execute(
        select(groups.started_at, groups.finished_at)
        .where(groups.run_id == run_id, groups.status == "done", groups.finished_at.is_not(None))
        .order_by(groups.id.desc())
        .limit(32)
    ).all()
    seconds = sorted((row.finished_at - row.started_at).total_seconds() for row in recent)
    return seconds[len(seconds) // 2] if seconds else 0.0


def count_running_runs(database: Database) -> int:
    """Return the number of running runs. The embedded stack stops some time after this number becomes 0. Raise ServiceError if
    the database is unreachable; do not retry, because the caller also has to supervise workers.
    """
    with database.read() as tx:
        return int(tx.execute(select(func.count()).where(*IS_AT_WORK)).scalar_one())


@read_transaction
def load_run_to_serve(tx: Connection, run: str) -> Row:
    """Return the run's row with two additional values: `weights`, the weights of the run's rewards, and `stored`, True if the
    run trains on stored groups. Raise NotFoundError if there is no such run.
    """
    row = find_run(tx, run)
    sets, groups = schema.reward_sets.c, schema.run_groups.c
    weights = tx.execute(select(sets.weights).where(sets.run_id == row["id"], sets.name == "default")).scalar_one()
    stored = tx.execute(select(groups.group_id).where(groups.run_id == row["id"]).limit(1)).first() is not None
    return {**row, "weights": weights, "stored": stored}


@read_transaction
def list_runs_beside(tx: Connection, run: str) -> list[str]:
    """Return the names of all running runs except this run and its evaluations."""
    mine = select(schema.runs.c.id).where(schema.runs.c.name == run)
    others = select(schema.runs.c.name).where(*IS_AT_WORK, schema.runs.c.name != run)
    others = others.where(func.coalesce(schema.runs.c.measures_id, 0).not_in(mine))
    return list(tx.execute(others.order_by(schema.runs.c.id)).scalars())


def some_run_overlaps(database: Database) -> bool:
    """Return whether a running run samples during its updates. Raise ServiceError at once if the database is unreachable."""
    with database.read() as tx:
        configs = tx.execute(select(schema.runs.c.config).where(*IS_AT_WORK)).scalars()
        return any(staleness_of(config) for config in configs)
