"""Retention of checkpoints: which checkpoints are still needed by database rows, and which ones can be removed.

A policy whose files are removed is called collected. First its row is marked as collected, and the files are removed after the
commit. So the row of a removed checkpoint always says that it was removed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

from sqlalchemy import Connection, exists, select, update

from agentrl.workflow.checkpoints.checkpoint_gc import Needs
from agentrl.workflow.runtime.shown_text import format_count
from agentrl.workflow.store.connect import read_transaction, transaction
from agentrl.workflow.store.iterations import epoch_length, staleness_of
from agentrl.workflow.store.planning import log
from agentrl.workflow.store.run_names import find_best_version, find_run
from agentrl.workflow.tables import schema
from agentrl.workflow.trajectory import OPEN

ALIVE_STATUSES = ("planned", "running", "paused")
RESTART_CHECKPOINTS = 2
"""The number of newest checkpoints that a resumable run keeps: the newest, and the previous one, from which the newest can be
rebuilt. With max_staleness n, the run keeps n more, with which its rollouts sample.
"""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """A run's checkpoint folder, and the run's `key`. The name of each checkpoint of the run ends with the key."""

    run_id: int
    run: str
    output_dir: str
    key: str


@read_transaction
def list_checkpoint_folders(tx: Connection, runs: Sequence[str] = ()) -> list[Checkpoints]:
    """Return the checkpoint folders of these runs; of all runs if `runs` is empty. Raise NotFoundError for an unknown run."""
    if runs:
        rows: Sequence[Any] = [find_run(tx, run) for run in runs]
    else:
        rows = tx.execute(select(schema.runs).where(schema.runs.c.output_dir != "").order_by(schema.runs.c.id)).mappings().all()
    return [Checkpoints(row["id"], row["name"], row["output_dir"], row["manifest"].get("id", "")[:8]) for row in rows]


@read_transaction
def find_needs(tx: Connection, run_id: int, present: Collection[str], keep_last: int | None) -> Needs:
    """Return the needs that `collect` would return, without marking a policy as collected."""
    return _find_needs(tx, run_id, present, keep_last)[0]


@transaction
def collect(tx: Connection, run_id: int, present: Collection[str], keep_last: int | None) -> Needs:
    """Mark the run's unneeded policies as collected. Return which checkpoints are still needed, and why.

    Args:
        tx: the transaction.
        run_id: the id of the run.
        present: the names of the checkpoint folders on this disk. Only policies of these checkpoints are marked.
        keep_last: the number of newest adapters to keep if the run has ended; all older adapters are then marked, even those
            that sampled stored episodes. None: keep all adapters that sampled stored episodes.
    """
    needs, unneeded = _find_needs(tx, run_id, present, keep_last)
    if unneeded:
        now = datetime.now(UTC)
        tx.execute(update(schema.policies).where(schema.policies.c.path.in_(unneeded)).values(collected_at=now))
        log(tx, run_id, "collected", format_count(len(unneeded), "adapter"), ", ".join(sorted(map(_checkpoint_name, unneeded))))
    return needs


@transaction
def drop_unsaved(tx: Connection, run_id: int) -> list[str]:
    """Mark checkpoints as collected, and return their paths: all that are not needed any more, except those that
    `update.save_every` keeps.

    The caller may remove the files after the commit.
    """
    run = tx.execute(select(schema.runs).where(schema.runs.c.id == run_id)).mappings().one()
    key = run["manifest"].get("id", "")[:8]
    if _save_every(run) is None or not key:
        return []
    policies, iterations = schema.policies.c, schema.iterations.c
    mine = select(policies.path, policies.version).where(policies.run_id == run_id, policies.collected_at.is_(None))
    rows = tx.execute(mine.where(policies.path.endswith(key, autoescape=True)).order_by(policies.version.desc())).all()
    paths = list(dict.fromkeys(row.path for row in rows))
    needed = {*paths[: _min_checkpoints(run["status"], run["config"])], *_saved_paths(tx, run, rows)}
    unneeded = [path for path in paths if path not in needed]
    if unneeded:
        of_them = (
            select(policies.path).join(schema.runs, schema.runs.c.id == policies.run_id).where(policies.path.in_(unneeded))
        )
        waiting = select(iterations.policy_id).where(iterations.status.in_(OPEN))
        others = (policies.run_id != run_id) & schema.runs.c.status.in_((*ALIVE_STATUSES, "failed"))
        in_use = set(tx.execute(of_them.where(others | policies.id.in_(waiting))).scalars())
        unneeded = [path for path in unneeded if path not in in_use]
    if unneeded:
        tx.execute(update(schema.policies).where(policies.path.in_(unneeded)).values(collected_at=datetime.now(UTC)))
    return unneeded


def _save_every(run: Mapping[Any, Any]) -> int | None:
    every: int | None = run["config"].get("update", {}).get("save_every")  # a run of before there was such an option keeps all
    return every


def _saved_paths(tx: Connection, run: Mapping[Any, Any], rows: Sequence[Any]) -> set[str]:
    """Return the paths that stay: each `save_every`th version, the last of each epoch, the best, the final one."""
    every, of_an_epoch = _save_every(run) or 1, epoch_length(tx, run) or run["iterations"]
    ends = (find_best_version(tx, run["id"]), run["iterations"])
    return {row.path for row in rows if not row.version % every or not row.version % of_an_epoch or row.version in ends}


def _min_checkpoints(status: str, config: Mapping[str, Any]) -> int:
    """Return the number of newest checkpoints that a run must keep. A done run keeps some too, because it may be extended."""
    restartable = RESTART_CHECKPOINTS + staleness_of(config)
    return {"done": restartable - 1, "cancelled": 1}.get(status, restartable)


def _find_needs(tx: Connection, run_id: int, present: Collection[str], keep_last: int | None) -> tuple[Needs, list[str]]:
    """Return the needs that remain after collecting, and the paths to collect."""
    rows = _load_policies(tx, run_id)
    gone = {row.path for row in rows if row.collected_at is not None}
    paths = list(dict.fromkeys(row.path for row in rows if row.run_id == run_id and row.path not in gone))  # newest first
    mine = [path for path in paths if _checkpoint_name(path) in present]
    run = tx.execute(select(schema.runs).where(schema.runs.c.id == run_id)).mappings().one()
    restartable = RESTART_CHECKPOINTS + staleness_of(run["config"])
    saved = None if _save_every(run) is None else _saved_paths(tx, run, [row for row in rows if row.run_id == run_id])
    needed = _kept_paths(rows, run, mine, keep_last, saved)
    best = find_best_version(tx, run_id)  # which stays, whatever `keep_last` says: `RUN@best`
    needed |= {row.path for row in rows if row.run_id == run_id and row.version == best}
    unneeded = [path for path in mine if path not in needed]
    claims = select(schema.iterations.c.number, schema.iterations.c.train_token)
    open_ones = tx.execute(claims.where(schema.iterations.c.run_id == run_id, schema.iterations.c.status.in_(OPEN)))
    needs = Needs(
        referenced={_checkpoint_name(path) for path in paths if path not in unneeded},
        collected={_checkpoint_name(path) for path in (*gone, *unneeded)},
        resumable={_checkpoint_name(path) for path in mine[:restartable]},
        claims={(row.number, row.train_token) for row in open_ones},
    )
    return needs, unneeded


def _load_policies(tx: Connection, run_id: int) -> Sequence[Any]:
    """Return the rows of `policies`, of any run, whose path is that of one of the run's checkpoints; newest version first."""
    policies, runs, iterations = schema.policies, schema.runs, schema.iterations
    mine = select(policies.c.path).where(policies.c.run_id == run_id, policies.c.path != "")
    others = policies.alias()
    users = select(others.c.run_id).where(others.c.path.in_(mine))
    theirs = select(iterations.c.policy_id).where(iterations.c.run_id.in_(users))
    # The steps of an iteration name its policy and no other.
    sampled = theirs.where(
        exists().where(schema.episodes.c.iteration_id == iterations.c.id, schema.steps.c.episode_id == schema.episodes.c.id)
    )
    waiting = theirs.where(iterations.c.status.in_(OPEN))
    query = (
        select(policies.c.run_id, policies.c.version, policies.c.path, policies.c.collected_at, runs.c.status)
        .add_columns(policies.c.id.in_(sampled).label("sampled"), policies.c.id.in_(waiting).label("waiting"))
        .join(runs, runs.c.id == policies.c.run_id)
        .where(policies.c.path.in_(mine))
    )
    return tx.execute(query.order_by(policies.c.version.desc())).all()


def _kept_paths(
    rows: Sequence[Any], run: Mapping[Any, Any], mine: Sequence[str], keep_last: int | None, saved: set[str] | None
) -> set[str]:
    """Return the paths of the checkpoints that are kept. `mine` is the paths of the run's own checkpoints, newest first.
    `saved` is the paths that the run keeps permanently; None if it keeps all to which episodes refer.
    """
    by_name = {row.path for row in rows if row.sampled} if saved is None else saved
    if keep_last is not None and run["status"] not in ALIVE_STATUSES:
        by_name = set()
    in_use = {
        row.path for row in rows if row.waiting or (row.run_id != run["id"] and row.status in (*ALIVE_STATUSES, "failed"))
    }
    return {*mine[: max(_min_checkpoints(run["status"], run["config"]), keep_last or 0)], *by_name, *in_use} & set(mine)


def _checkpoint_name(path: str) -> str:
    return PurePosixPath(path).name
