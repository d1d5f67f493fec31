"""What the algorithms need of the rows: rewards of steps, groups added, runs that measure another, a critic's metrics."""

import sqlalchemy as sa
from alembic import op

from agentrl.migrations.alteration import alter_table

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

METRICS = ("policy_kl", "kl_coef", "value_loss", "explained_variance")
REWARD_KEY = ("reward_set_id", "episode_id", "part")


def upgrade() -> None:
    """Adds them."""
    with alter_table("rewards") as rewards:
        rewards.add_column(sa.Column("step", sa.Integer(), server_default="-1", nullable=False))
        rewards.drop_constraint(op.f("uq_rewards_reward_set_id_episode_id_part"), type_="unique")
        rewards.create_unique_constraint(op.f("uq_rewards_reward_set_id_episode_id_part_step"), [*REWARD_KEY, "step"])
    with alter_table("iterations") as iterations:
        iterations.add_column(sa.Column("more_groups", ID, server_default="0", nullable=False))
    with alter_table("runs") as runs:
        runs.add_column(sa.Column("measures_id", ID, nullable=True))
        runs.add_column(sa.Column("measures_version", sa.Integer(), nullable=True))
        runs.create_foreign_key(op.f("fk_runs_measures_id"), "runs", ["measures_id"], ["id"])
        runs.create_unique_constraint(op.f("uq_runs_measures_id_measures_version"), ["measures_id", "measures_version"])
    with alter_table("evals") as evals:
        evals.add_column(sa.Column("tasks", ID, server_default="0", nullable=False))
        evals.add_column(sa.Column("accuracy", sa.Float(precision=53), nullable=True))
        evals.add_column(sa.Column("pass_at", sa.JSON(), nullable=True))
    with alter_table("updates") as updates:
        for name in METRICS:
            updates.add_column(sa.Column(name, sa.Float(precision=53), nullable=True))


def downgrade() -> None:
    """Removes them. What steps earned becomes their episode's, in one row again."""
    same = " AND ".join(f"other.{name} = rewards.{name}" for name in REWARD_KEY)
    op.execute(f"UPDATE rewards SET value = (SELECT sum(other.value) FROM rewards other WHERE {same}) WHERE step = 0")
    op.execute("DELETE FROM rewards WHERE step > 0")
    with alter_table("rewards") as rewards:
        rewards.drop_constraint(op.f("uq_rewards_reward_set_id_episode_id_part_step"), type_="unique")
        rewards.create_unique_constraint(op.f("uq_rewards_reward_set_id_episode_id_part"), [*REWARD_KEY])
        rewards.drop_column("step")
    with alter_table("evals") as evals:
        for name in ("pass_at", "accuracy", "tasks"):
            evals.drop_column(name)
    with alter_table("runs") as runs:
        runs.drop_constraint(op.f("uq_runs_measures_id_measures_version"), type_="unique")
        runs.drop_constraint(op.f("fk_runs_measures_id"), type_="foreignkey")
        runs.drop_column("measures_version")
        runs.drop_column("measures_id")
    with alter_table("iterations") as iterations:
        iterations.drop_column("more_groups")
    with alter_table("updates") as updates:
        for name in reversed(METRICS):
            updates.drop_column(name)
