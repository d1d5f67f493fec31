"""Updates on episodes that an older policy sampled say how they were corrected."""

import sqlalchemy as sa
from alembic import op

from agentrl.migrations.alteration import alter_table

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

COLUMNS = ("importance_weight", "importance_truncated")


def upgrade() -> None:
    """Adds the mean weight and the share of tokens that the cap cut."""
    for name in COLUMNS:
        op.add_column("updates", sa.Column(name, sa.Float(precision=53), nullable=True))


def downgrade() -> None:
    """Removes them."""
    with alter_table("updates") as updates:
        for name in COLUMNS:
            updates.drop_column(name)
