"""Runs have format 4: running runs, which follow older rules, are paused."""

from agentrl.migrations.alteration import pause_running_runs

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Pause the running runs."""
    pause_running_runs()


def downgrade() -> None:
    """Change nothing: a paused run of another format stays paused."""
