"""Which version ended an epoch of a run: `RUN@epoch3`, and where the links to these checkpoints lead."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from sqlalchemy import Connection, func, select

from workflow import db
from workflow.epochs import Ends
from workflow.errors import NotFoundError
from workflow.store.connect import reading

MOST = 2**31 - 2
"""No run has more epochs."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """The version that ended the epoch of that number, counted from 1."""

    number: int


def version_after(tx: Connection, run: Mapping[Any, Any], epoch: int) -> int:
    """The version that ended that epoch of the run (its row).

    Raises:
        NotFoundError: it is not over, or the run has no such epoch.
    """
    found = _versions(tx, run, min(epoch, MOST) - 1)
    newest = select(func.max(db.policies.c.version)).where(db.policies.c.run_id == run["id"])
    if not found or found[epoch] > tx.execute(newest).scalar_one():
        said = f"Epoch {epoch} of {run['name']!r} is not over, or it has none of that number."
        raise NotFoundError(said, f"Name a version, {run['name']}@3, or follow it: agentrl watch {run['name']}")
    return found[epoch]


@reading
def is_end(tx: Connection, run_id: int, version: int) -> bool:
    """Whether an epoch may end with that version, as far as the iterations planned by now tell."""
    iterations = db.iterations.c
    query = select(iterations.epoch).where(iterations.run_id == run_id, iterations.number.in_((version - 1, version)))
    found = tx.execute(query).scalars().all()
    return len(found) == 1 or len(set(found)) == 2


@reading
def ends(tx: Connection, run_id: int) -> Ends:
    """The checkpoints that ended an epoch of the run and stand in its own folder."""
    run = tx.execute(select(db.runs).where(db.runs.c.id == run_id)).mappings().one()
    policies = db.policies.c
    kept = select(policies.version, policies.path).where(policies.run_id == run_id, policies.collected_at.is_(None))
    paths = {row.version: PurePosixPath(row.path) for row in tx.execute(kept.where(policies.path != ""))}
    own = PurePosixPath(run["output_dir"])
    versions = _versions(tx, run)
    names = {
        epoch: paths[version].name for epoch, version in versions.items() if version in paths and paths[version].parent == own
    }
    return Ends(run["output_dir"], run["manifest"].get("id", "")[:8], names)


@reading
def run_in(tx: Connection, folder: str) -> str:
    """The run that was first to keep its checkpoints in the folder; empty where none does."""
    runs = db.runs.c
    found = select(runs.name).where(runs.output_dir == folder, runs.kind == "train").order_by(runs.id).limit(1)
    return str(tx.execute(found).scalar_one_or_none() or "")


def _versions(tx: Connection, run: Mapping[Any, Any], only: int | None = None) -> dict[int, int]:
    """Of each epoch whose every iteration is planned the version after its last, by its number from 1."""
    iterations = db.iterations.c
    query = select(iterations.epoch, func.max(iterations.number).label("last"), func.count().label("planned"))
    query = query.where(iterations.run_id == run["id"]).group_by(iterations.epoch).order_by(iterations.epoch)
    rows = tx.execute(query if only is None else query.where(iterations.epoch.in_((only, only + 1)))).all()
    planned = {row.epoch for row in rows}
    whole = [
        row for row in rows if row.epoch + 1 in planned or (row.last + 1 == run["iterations"] and row.planned >= _size(tx, run))
    ]
    return {row.epoch + 1: row.last + 1 for row in whole if only in (None, row.epoch)}


def _size(tx: Connection, run: Mapping[Any, Any]) -> int:
    """Iterations of an epoch."""
    counts = (select(func.count()).where(table.c.run_id == run["id"]) for table in (db.run_groups, db.run_tasks))
    stored, tasks = (int(tx.execute(count).scalar_one()) for count in counts)
    return -(-(stored or tasks) // int(run["config"]["rollout"]["tasks_per_iteration"]))
