"""What several migrations do: change a table that exists, pause the running runs."""

from contextlib import AbstractContextManager

import sqlalchemy as sa
from alembic import op
from alembic.operations import BatchOperations


def alter_table(name: str) -> AbstractContextManager[BatchOperations]:
    """Collect changes of a table and apply them at the end: SQLite rebuilds the table.

    Only this table is read before. Reading those that it refers to would double the time in which a new SQLite file is made.
    """
    return op.batch_alter_table(name, reflect_kwargs={"resolve_fks": False})


def pause_running_runs() -> None:
    """Pause the running runs, which follow the rules of an older format; served ones follow none and go on."""
    running = sa.text("UPDATE runs SET status = 'paused', reason = :reason WHERE status = 'running' AND kind <> 'serve'")
    op.execute(running.bindparams(reason="begun by an older agentrl"))
