"""Whose interval an evaluation has: Wilson's or Student's (`evals.interval_by`). Of older ones nothing tells."""

import sqlalchemy as sa

from agentrl.migrations.alteration import alter_table

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds it."""
    with alter_table("evals") as evals:
        evals.add_column(sa.Column("interval_by", sa.String(length=16), nullable=True))


def downgrade() -> None:
    """Removes it."""
    with alter_table("evals") as evals:
        evals.drop_column("interval_by")
