"""Alembic's entrance: runs the migrations on the connection that `store.migrate` hands in."""

from typing import Any, Literal

from alembic import context

from agentrl.workflow.tables.columns import Utc
from agentrl.workflow.tables.schema import metadata


def render_item(kind: str, item: Any, autogen_context: Any) -> str | Literal[False]:
    """Return a migration stands alone: our column type is written as what it is in the database."""
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
