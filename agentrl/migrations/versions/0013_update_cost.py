"""The cost of an update: the GPU's peak memory, its computing speed, and the share of the GPU's highest speed."""

import sqlalchemy as sa
from alembic import op

from agentrl.migrations.alteration import alter_table

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

COLUMNS = ("peak_memory_bytes", "tflops", "mfu")


def upgrade() -> None:
    """Add the columns."""
    for name in COLUMNS:
        op.add_column("iterations", sa.Column(name, sa.Float(precision=53), nullable=True))


def downgrade() -> None:
    """Remove them."""
    with alter_table("iterations") as iterations:
        for name in COLUMNS:
            iterations.drop_column(name)
