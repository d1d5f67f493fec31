"""The check that a run still has the tokens of its episodes. `agentrl gc --tokens` removes them, and marks the run.

The mark decides, not the rows of `step_tokens`: it is written before the first row is removed. So a run whose tokens are half
removed is refused as well.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, select

from agentrl.workflow.store.row_codecs import RemovedTokens
from agentrl.workflow.tables import schema


def check_run_tokens(run: str, removed_at: datetime | None) -> None:
    """Raise StateError if the run's tokens were removed. `removed_at` is the run's `tokens_removed_at`."""
    if removed_at is not None:
        raise RemovedTokens(run, removed_at).error()


def check_tokens(tx: Connection, condition: ColumnElement[bool]) -> None:
    """Raise StateError if the tokens of a run of these episodes were removed. `condition` is an SQL condition on `episodes`.

    Steps that the episodes inherit from a parent belong to the parent's run, which this function does not check.
    """
    runs = schema.runs.c
    of_runs = runs.id.in_(select(schema.episodes.c.run_id).where(condition))
    removed = select(runs.name, runs.tokens_removed_at).where(of_runs, runs.tokens_removed_at.is_not(None)).order_by(runs.id)
    if row := tx.execute(removed.limit(1)).first():
        check_run_tokens(*row)


def hold_tokens(tx: Connection, condition: ColumnElement[bool]) -> None:
    """Lock the runs of these episodes, and of the parents from which they inherit steps, so that `gc --tokens` waits for the
    end of the transaction. Raise StateError if tokens of them were removed. `condition` is an SQL condition on `episodes`.
    """
    episodes, runs = schema.episodes.c, schema.runs.c
    waiting: Any = condition
    while waiting is not None:
        # `token_removal.mark_removed` locks these rows too: the second transaction sees what the first has committed.
        sources = select(runs.id).where(runs.id.in_(select(episodes.run_id).where(waiting))).order_by(runs.id)
        tx.execute(sources.with_for_update(read=True, key_share=True)).all()
        check_tokens(tx, waiting)
        parents = set(tx.execute(select(episodes.parent_id).where(waiting, episodes.inherited_steps > 0)).scalars())
        waiting = episodes.id.in_(parents) if parents else None
