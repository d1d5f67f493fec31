"""The removal of the tokens of chosen runs: the rows of `step_tokens`, which take most of a database's bytes.

First the run is marked, then its rows are deleted in short transactions. A process that was killed in between is started again
with the same command, and deletes the rest.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, delete, func, select, update

from agentrl.workflow.errors import StateError
from agentrl.workflow.runtime.shown_text import format_count
from agentrl.workflow.store.connect import Database, read_transaction, transaction
from agentrl.workflow.store.planning import log
from agentrl.workflow.store.run_names import find_run
from agentrl.workflow.tables import schema

ENDED = ("done", "cancelled")
"""The statuses of runs whose tokens may be removed. After that, such a run cannot be extended."""
STEPS_AT_ONCE = 200
"""The maximum number of steps whose tokens one transaction deletes."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The stored tokens of a run: the number of `episodes` and `steps` that have some, and the bytes of token ids and logprobs.

    `removed_at` is the time at which a removal began; None if none has.
    """

    run_id: int
    run: str
    episodes: int
    steps: int
    bytes: int
    removed_at: datetime | None


@read_transaction
def count_tokens(tx: Connection, runs: Sequence[str]) -> list[TokenCounts]:
    """Return the stored tokens of these runs, which are given by name or number. Raise NotFoundError for an unknown run. Raise
    StateError if a run, or a run that uses its episodes, has not ended.
    """
    rows = {row["id"]: row for row in (find_run(tx, run) for run in runs)}
    for row in rows.values():
        _check_ended(tx, row)
    return [_count(tx, row) for row in rows.values()]


def _count(tx: Connection, row: Any) -> TokenCounts:
    steps, tokens = schema.steps.c, schema.step_tokens.c
    sizes = (func.length(blob) for blob in (tokens.prompt_ids, tokens.sampled_ids, tokens.behavior_logprobs))
    total = func.coalesce(func.sum(sum(sizes, start=0)), 0)
    query = select(func.count(steps.episode_id.distinct()), func.count(), total).where(steps.run == row["name"])
    counts = tx.execute(query.join(schema.step_tokens, tokens.step_id == steps.id).select_from(schema.steps)).one()
    episode_count, step_count, size = map(int, counts)
    return TokenCounts(row["id"], row["name"], episode_count, step_count, size, row["tokens_removed_at"])


def remove_tokens(db: Database, counts: TokenCounts) -> None:
    """Mark the run, and delete its tokens. Raise StateError if the run, or a run that uses its episodes, has not ended."""
    mark_removed(
        db,
        counts.run_id,
        f"{format_count(counts.steps, 'step')} of {format_count(counts.episodes, 'episode')}, {counts.bytes} bytes",
    )
    last = 0
    while True:
        began = time.monotonic()
        steps = remove_some(db, counts.run, last)
        if not steps:
            return
        last = steps[-1]
        time.sleep(time.monotonic() - began)  # SQLite's lock for writing has no queue: the pause lets workers write


@transaction
def mark_removed(tx: Connection, run_id: int, detail: str) -> None:
    """Mark the run: from now on, what needs its tokens is refused. A second call does not change the time."""
    runs = schema.runs.c
    row = tx.execute(select(schema.runs).where(runs.id == run_id).with_for_update()).mappings().one()
    _check_ended(tx, row)
    if row["tokens_removed_at"] is None:
        tx.execute(update(schema.runs).where(runs.id == run_id).values(tokens_removed_at=datetime.now(UTC)))
        log(tx, run_id, "tokens_removed", detail=detail)


@transaction
def remove_some(tx: Connection, run: str, after: int) -> list[int]:
    """Delete the tokens of at most STEPS_AT_ONCE steps of the run, those with the lowest ids above `after`. Return the ids."""
    steps, tokens = schema.steps.c, schema.step_tokens.c
    query = select(steps.id).join(schema.step_tokens, tokens.step_id == steps.id).where(steps.run == run, steps.id > after)
    ids = list(tx.execute(query.order_by(steps.id).limit(STEPS_AT_ONCE)).scalars())
    if ids:
        tx.execute(delete(schema.step_tokens).where(tokens.step_id.in_(ids)))
    return ids


def _check_ended(tx: Connection, row: Any) -> None:
    """Check that nothing will need the run's tokens. `row` is the run's row. Raise StateError otherwise."""
    if row["status"] not in ENDED:
        raise StateError(
            f"Run {row['name']!r} is {row['status']} and needs its tokens.",
            f"End it for good first: agentrl cancel {row['name']}",
        )
    for dependent in _list_dependent_runs(tx, row["id"]):
        if dependent.status not in ENDED:
            raise StateError(
                f"Run {dependent.name!r} is {dependent.status} and needs the tokens of {row['name']!r}.",
                f"Wait for its end, or end it for good: agentrl cancel {dependent.name}",
            )


def _list_dependent_runs(tx: Connection, run_id: int) -> list[Any]:
    """Return the id, name and status of each run that trains on the run's episodes or inherits their steps, also indirectly."""
    runs, groups, episodes = schema.runs.c, schema.groups.c, schema.episodes.c
    parents = schema.episodes.alias()
    dependents: dict[int, Any] = {}
    waiting = {run_id}
    while waiting:
        forks = select(episodes.run_id).join(parents, parents.c.id == episodes.parent_id).where(episodes.inherited_steps > 0)
        readers = select(schema.run_groups.c.run_id).join(schema.groups, groups.id == schema.run_groups.c.group_id)
        both = runs.id.in_(forks.where(parents.c.run_id.in_(waiting))) | runs.id.in_(readers.where(groups.run_id.in_(waiting)))
        rows = {row.id: row for row in tx.execute(select(runs.id, runs.name, runs.status).where(both).order_by(runs.id))}
        waiting = rows.keys() - dependents.keys()
        dependents |= rows
    return list(dependents.values())
