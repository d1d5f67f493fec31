"""Forks, training on stored groups, why an episode did not train, collected checkpoints."""

import sqlalchemy as sa
from alembic import op

from agentrl.migrations.alteration import alter_table

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Adds them."""
    with alter_table("runs") as runs:
        runs.drop_constraint(op.f("ck_runs_kind"), type_="check")
        runs.create_check_constraint(op.f("ck_runs_kind"), "kind IN ('train', 'eval', 'fork')")
        runs.add_column(sa.Column("reward_set", sa.String(length=64), server_default="default", nullable=False))
    with alter_table("groups") as groups:
        groups.add_column(sa.Column("opening", sa.JSON(), nullable=True))
    with alter_table("episodes") as episodes:
        episodes.add_column(sa.Column("inherited_steps", sa.Integer(), server_default="0", nullable=False))
        episodes.create_index(op.f("ix_episodes_parent_id"), ["parent_id"])
    with alter_table("policies") as policies:
        policies.add_column(sa.Column("collected_at", sa.DateTime(timezone=True), nullable=True))
        policies.add_column(sa.Column("broken", sa.Text(), server_default="", nullable=False))
    op.create_table(
        "run_groups",
        sa.Column("run_id", ID, nullable=False),
        sa.Column("group_id", ID, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_groups_run_id")),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name=op.f("fk_run_groups_group_id")),
        sa.PrimaryKeyConstraint("run_id", "group_id", name=op.f("pk_run_groups")),
    )
    op.create_table(
        "iteration_groups",
        sa.Column("iteration_id", ID, nullable=False),
        sa.Column("slot", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("group_id", ID, nullable=False),
        sa.Column("dropped", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(["iteration_id"], ["iterations.id"], name=op.f("fk_iteration_groups_iteration_id")),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name=op.f("fk_iteration_groups_group_id")),
        sa.PrimaryKeyConstraint("iteration_id", "slot", name=op.f("pk_iteration_groups")),
    )
    op.create_index(op.f("ix_iteration_groups_group_id"), "iteration_groups", ["group_id"])
    op.create_index("ix_episodes_run", "episodes", ["run_id", "id"])
    for name in ("steps", "tool_calls", "rewards"):
        _add_run_name(name)


def _add_run_name(name: str) -> None:
    with alter_table(name) as table:
        table.add_column(sa.Column("run", sa.String(length=64), nullable=True))
    mine = "SELECT r.name FROM episodes e JOIN runs r ON r.id = e.run_id WHERE e.id = episode_id"
    op.execute(f"UPDATE {name} SET run = ({mine})")
    with alter_table(name) as table:
        table.alter_column("run", existing_type=sa.String(length=64), nullable=False)
    op.create_index(f"ix_{name}_run", name, ["run", "id"])


def downgrade() -> None:
    """Removes them; a fork run becomes what comes nearest to it there, an evaluation."""
    for name in ("steps", "tool_calls", "rewards"):
        op.drop_index(f"ix_{name}_run", name)
        with alter_table(name) as table:
            table.drop_column("run")
    op.drop_index("ix_episodes_run", "episodes")
    op.drop_table("iteration_groups")
    op.drop_table("run_groups")
    with alter_table("policies") as policies:
        policies.drop_column("broken")
        policies.drop_column("collected_at")
    with alter_table("episodes") as episodes:
        episodes.drop_index(op.f("ix_episodes_parent_id"))
        episodes.drop_column("inherited_steps")
    with alter_table("groups") as groups:
        groups.drop_column("opening")
    op.execute("UPDATE runs SET kind = 'eval' WHERE kind = 'fork'")
    with alter_table("runs") as runs:
        runs.drop_column("reward_set")
        runs.drop_constraint(op.f("ck_runs_kind"), type_="check")
        runs.create_check_constraint(op.f("ck_runs_kind"), "kind IN ('train', 'eval')")
