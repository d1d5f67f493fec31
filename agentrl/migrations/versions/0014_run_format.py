"""The format of a run: `runs.key_scheme` becomes `runs.format`, and running runs, which follow older rules, are paused."""

import sqlalchemy as sa

from agentrl.migrations.alteration import alter_table, pause_running_runs

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Rename the column. Each new run names its format, so the column has no default."""
    with alter_table("runs") as runs:
        runs.alter_column("key_scheme", new_column_name="format", existing_type=sa.Integer(), server_default=None)
    pause_running_runs()


def downgrade() -> None:
    """Rename the column back. Older code then treats runs of a newer format as its own."""
    with alter_table("runs") as runs:
        runs.alter_column("format", new_column_name="key_scheme", existing_type=sa.Integer(), server_default="1")
