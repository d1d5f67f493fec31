"""Functions that several migrations use: change an existing table, pause the running runs."""

from contextlib import AbstractContextManager

import sqlalchemy as sa
from alembic import op
from alembic.operations import BatchOperations


def alter_table(name: str) -> AbstractContextManager[BatchOperations]:
    """Collect the changes of a table, and apply them together at the end, because SQLite rebuilds the table.

    Only the schema of this table is read first. Reading the tables that it refers to would double the time to create a new
    SQLite file.
    """
    return op.batch_alter_table(name, reflect_kwargs={"resolve_fks": False})


def pause_running_runs() -> None:
    """Pause the running runs, because they follow the rules of an older format. Runs of the kind serve do not depend on the
    format and continue.
    """
    running = sa.text("UPDATE runs SET status = 'paused', reason = :reason WHERE status = 'running' AND kind <> 'serve'")
    op.execute(running.bindparams(reason="begun by an older agentrl"))
