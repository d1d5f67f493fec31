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
    op.execute("""
        UPDATE groups SET best_reward = ends.best, worst_reward = ends.worst FROM (
          SELECT group_id, max(reward) AS best, min(reward) AS worst FROM episodes WHERE status = 'done' GROUP BY group_id
        ) ends WHERE ends.group_id = groups.id AND groups.mean_reward IS NOT NULL""")


def downgrade() -> None:
    """Remove the columns."""
    with alter_table("groups") as groups:
        for name in ("best_reward", "worst_reward", "solved"):
            groups.drop_column(name)
