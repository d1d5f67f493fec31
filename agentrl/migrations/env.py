"""The module that Alembic runs: it applies the migrations over the connection that `store.migrate` passes."""

from typing import Any, Literal

from alembic import context

from agentrl.workflow.tables.columns import Utc
from agentrl.workflow.tables.schema import metadata


def render_item(kind: str, item: Any, autogen_context: Any) -> str | Literal[False]:
    """Return the source of a column type for a new migration. `Utc` is written as the SQLAlchemy type that it is in the
    database, because a migration must not import agentrl's column types.
    """
    return "sa.DateTime(timezone=True)" if kind == "type" and isinstance(item, Utc) else False


connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=metadata,
    render_as_batch=connection.dialect.name == "sqlite",
    compare_type=True,
    transactional_ddl=True,
    render_item=render_item,
)
context.run_migrations()
