"""For each ended group, its best and its worst reward, and whether it is solved."""

import sqlalchemy as sa
from alembic import op

from agentrl.migrations.alteration import alter_table

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns, and fill the rewards. `solved` stays NULL: groups that ended before are judged when they are read."""
    for name in ("best_reward", "worst_reward"):
        op.add_column("groups", sa.Column(name, sa.Float(precision=53), nullable=True))
    op.add_column("groups", sa.Column("solved", sa.Integer(), nullable=True))
    done = "(SELECT {}(e.reward) FROM episodes e WHERE e.group_id = groups.id AND e.status = 'done')"
    rewards = f"best_reward = {done.format('max')}, worst_reward = {done.format('min')}"
    op.execute(f"UPDATE groups SET {rewards} WHERE mean_reward IS NOT NULL")


def downgrade() -> None:
    """Remove the columns."""
    with alter_table("groups") as groups:
        for name in ("best_reward", "worst_reward", "solved"):
            groups.drop_column(name)
