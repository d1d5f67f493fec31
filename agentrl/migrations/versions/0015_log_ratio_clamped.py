"""For each optimizer step, the share of tokens whose log ratio was clamped."""

import sqlalchemy as sa
from alembic import op

from agentrl.migrations.alteration import alter_table

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("updates", sa.Column("log_ratio_clamped", sa.Float(precision=53), nullable=True))


def downgrade() -> None:
    """Remove it."""
    with alter_table("updates") as updates:
        updates.drop_column("log_ratio_clamped")
