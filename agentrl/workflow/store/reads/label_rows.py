"""Tags and notes of runs."""

from collections.abc import Sequence
from typing import Any

from agentrl.workflow.store.driver_reader import Row, among, select_rows, sql_read_transaction
from agentrl.workflow.store.run_names import find_run

NOTES_SHOWN = 200
"""The maximum number of notes in a response. If there are more, the newest are returned."""


@sql_read_transaction
def load_tags(tx: Any, ids: Sequence[int]) -> dict[int, list[str]]:
    """Return the sorted tags of each run, by run id. Runs without tags are left out."""
    tags_by_run: dict[int, list[str]] = {}
    for row in select_rows(tx, f"SELECT run_id, tag FROM run_tags WHERE run_id IN ({among(ids)})"):
        tags_by_run.setdefault(row["run_id"], []).append(row["tag"])
    return {run: sorted(tags) for run, tags in tags_by_run.items()}


@sql_read_transaction
def list_tags(tx: Any, run: str) -> list[str]:
    """Return the tags of the run of that name or number. Raise NotFoundError if there is no such run."""
    number = find_run(tx, run, "id")["id"]
    return load_tags(tx, [number]).get(number, [])


@sql_read_transaction
def list_notes(tx: Any, run: str) -> Sequence[Row]:
    """Return the newest notes on the run of that name or number, newest first. Raise NotFoundError if there is no such run."""
    return notes_of(tx, find_run(tx, run, "id")["id"])


def notes_of(tx: Any, run_id: int) -> Sequence[Row]:
    """Return the newest notes on the run with this id, newest first. Call this inside a transaction."""
    query = "SELECT id, text, created_at FROM run_notes WHERE run_id = :id ORDER BY id DESC LIMIT :limit"
    return select_rows(tx, query, id=run_id, limit=NOTES_SHOWN)
