"""For each call, whether it was written as bare JSON, without the marks of the tool format."""

import sqlalchemy as sa
from alembic import op

from agentrl.migrations.alteration import alter_table

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("tool_calls", sa.Column("loose", sa.Boolean(), server_default="0", nullable=False))


def downgrade() -> None:
    """Remove it."""
    with alter_table("tool_calls") as calls:
        calls.drop_column("loose")
