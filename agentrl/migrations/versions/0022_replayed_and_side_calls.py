"""For each step, whether it was copied from the record of a lost attempt, and whether it is a side call of an agent, which is
not trained on.
"""

import sqlalchemy as sa
from alembic import op

from agentrl.migrations.alteration import alter_table

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns."""
    for name in ("replayed", "side_call"):
        op.add_column("steps", sa.Column(name, sa.Boolean(), server_default="0", nullable=False))


def downgrade() -> None:
    """Remove the columns. Older code then trains on side calls too."""
    with alter_table("steps") as steps:
        for name in ("replayed", "side_call"):
            steps.drop_column(name)
