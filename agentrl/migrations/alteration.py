"""How migrations change a table that exists."""

from contextlib import AbstractContextManager

from alembic import op
from alembic.operations import BatchOperations


def alter_table(name: str) -> AbstractContextManager[BatchOperations]:
    """Collect changes of a table and apply them at the end: SQLite rebuilds the table.

    Only this table is read before. Reading those that it refers to would double the time in which a new SQLite file is made.
    """
    return op.batch_alter_table(name, reflect_kwargs={"resolve_fks": False})
