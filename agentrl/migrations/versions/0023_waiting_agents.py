"""An index to find the agents that wait for a worker or program to run them."""

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the index."""
    op.create_index("ix_agent_attempts_status", "agent_attempts", ["status", "id"])


def downgrade() -> None:
    """Remove the index."""
    op.drop_index("ix_agent_attempts_status", "agent_attempts")
