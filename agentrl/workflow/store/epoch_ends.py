"""The policy version at the end of each epoch of a run, for references such as `RUN@epoch3` and for the links to
checkpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from agentrl.workflow.checkpoints.epoch_links import EpochEnds
from agentrl.workflow.errors import NotFoundError
from agentrl.workflow.store.driver_reader import select_rows, sql_read_transaction

MAX_ITERATIONS = 2**31 - 2
"""The largest number of an iteration, and so of an epoch."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """A reference to the policy version at the end of an epoch. `number` is the number of the epoch, counted from 1."""

    number: int


def version_after(tx: Any, run: Mapping[str, Any], epoch: int) -> int:
    """Return the policy version at the end of an epoch. `epoch` is counted from 1. Raise NotFoundError if the epoch has not
    ended.
    """
    versions = _epoch_end_versions(tx, run, min(epoch, MAX_ITERATIONS) - 1)
    newest = select_rows(tx, "SELECT max(version) AS version FROM policies WHERE run_id = :run", run=run["id"])
    if not versions or versions[epoch] > newest[0]["version"]:
        message = f"Epoch {epoch} of {run['name']!r} has not ended, or does not exist."
        raise NotFoundError(message, f"Use a version, {run['name']}@3, or follow the run: agentrl watch {run['name']}")
    return versions[epoch]


@sql_read_transaction
def may_end_epoch(tx: Any, run_id: int, version: int) -> bool:
    """Return whether the policy version may be the last one of an epoch. Only the iterations that are planned so far are known,
    so the answer may be True although the epoch continues.
    """
    query = "SELECT epoch FROM iterations WHERE run_id = :run AND number IN (:last, :next)"
    epochs = [row["epoch"] for row in select_rows(tx, query, run=run_id, last=version - 1, next=version)]
    return len(epochs) == 1 or len(set(epochs)) == 2


@sql_read_transaction
def load_epoch_ends(tx: Any, run_id: int) -> EpochEnds:
    """Return the checkpoints in the run's folder that are the last ones of an epoch."""
    query = "SELECT id, name, iterations, output_dir, config, manifest FROM runs WHERE id = :id"
    (run,) = select_rows(tx, query, id=run_id)
    not_collected = "SELECT version, path FROM policies WHERE run_id = :id AND collected_at IS NULL AND path <> ''"
    paths = {row["version"]: PurePosixPath(row["path"]) for row in select_rows(tx, not_collected, id=run_id)}
    own = PurePosixPath(run["output_dir"])
    versions = _epoch_end_versions(tx, run)
    names = {
        epoch: paths[version].name for epoch, version in versions.items() if version in paths and paths[version].parent == own
    }
    return EpochEnds(
        run["output_dir"], run["manifest"].get("id", "")[:8], names, find_run_of_folder(tx, run["output_dir"]) == run["name"]
    )


@sql_read_transaction
def find_run_of_folder(tx: Any, folder: str) -> str:
    """Return the name of the newest training run that writes its checkpoints to the folder; empty if there is none."""
    query = "SELECT name FROM runs WHERE output_dir = :folder AND kind = 'train' ORDER BY id DESC LIMIT 1"
    rows = select_rows(tx, query, folder=folder)
    return str(rows[0]["name"]) if rows else ""


def _epoch_end_versions(tx: Any, run: Mapping[str, Any], only: int | None = None) -> dict[int, int]:
    """Return, by epoch from 1, the version after each completely planned epoch. `only` selects one, from 0."""
    query = "SELECT epoch, max(number) AS last, count(*) AS planned FROM iterations WHERE run_id = :run"
    args = {"run": run["id"]}
    if only is not None:
        query, args = f"{query} AND epoch IN (:only, :after)", args | {"only": only, "after": only + 1}
    rows = select_rows(tx, f"{query} GROUP BY epoch ORDER BY epoch", **args)
    planned = {row["epoch"] for row in rows}
    whole = [
        row["epoch"]
        for row in rows
        if row["epoch"] + 1 in planned
        or (row["last"] + 1 == run["iterations"] and row["planned"] >= _iterations_per_epoch(tx, run))
    ]
    last = {row["epoch"]: row["last"] for row in rows}
    return {epoch + 1: last[epoch] + 1 for epoch in whole if only in (None, epoch)}


def _iterations_per_epoch(tx: Any, run: Mapping[str, Any]) -> int:
    tables = ("run_groups", "run_tasks")
    counts = (select_rows(tx, f"SELECT count(*) AS found FROM {table} WHERE run_id = :run", run=run["id"]) for table in tables)
    stored, tasks = (int(rows[0]["found"]) for rows in counts)
    return -(-(stored or tasks) // int(run["config"]["rollout"]["tasks_per_iteration"]))
