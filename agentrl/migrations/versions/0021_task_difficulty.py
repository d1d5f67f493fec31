"""A run may order its tasks by their difficulty."""

import sqlalchemy as sa
from alembic import op

from agentrl.migrations.alteration import alter_table

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("run_tasks", sa.Column("difficulty", sa.Float(precision=53), nullable=True))


def downgrade() -> None:
    """Remove the column. Runs then continue in the order of the seed."""
    with alter_table("run_tasks") as tasks:
        tasks.drop_column("difficulty")
