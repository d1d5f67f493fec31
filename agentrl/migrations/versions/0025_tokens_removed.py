"""When `agentrl gc --tokens` removed the tokens of a run."""

import sqlalchemy as sa
from alembic import op

from agentrl.migrations.alteration import alter_table

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("runs", sa.Column("tokens_removed_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    """Remove the column. Older code then shows episodes without tokens as episodes without steps."""
    with alter_table("runs") as runs:
        runs.drop_column("tokens_removed_at")
