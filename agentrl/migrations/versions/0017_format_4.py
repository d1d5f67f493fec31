"""Runs have format 4: running runs, which follow older rules, are paused."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

REASON = "begun by an older agentrl"


def upgrade() -> None:
    """Pause the running runs."""
    running = sa.text("UPDATE runs SET status = 'paused', reason = :reason WHERE status = 'running' AND kind <> 'serve'")
    op.execute(running.bindparams(reason=REASON))


def downgrade() -> None:
    """Change nothing: a paused run of another format stays paused."""
