"""Runs have format 5: running runs, which follow older rules, are paused.

Updates record how much sampler and trainer differ.
"""

import sqlalchemy as sa
from alembic import op

from agentrl.migrations.alteration import alter_table, pause_running_runs

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

COLUMNS = ("importance_outside", "effective_sample_size")


def upgrade() -> None:
    """Add the columns and pause the running runs."""
    for name in COLUMNS:
        op.add_column("updates", sa.Column(name, sa.Float(precision=53), nullable=True))
    pause_running_runs()


def downgrade() -> None:
    """Remove the columns; a paused run of another format stays paused."""
    with alter_table("updates") as updates:
        for name in COLUMNS:
            updates.drop_column(name)
