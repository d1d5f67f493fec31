"""Texts that a run works with, in versions; which a group worked with; what a search asked its critic, and its tasks' roles.

And runs of the kind `import`, whose episodes were sampled elsewhere.
"""

import sqlalchemy as sa
from alembic import op

from agentrl.migrations.alteration import alter_table

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
KINDS = "'train', 'eval', 'fork', 'serve'"


def upgrade() -> None:
    """Adds them."""
    op.create_table(
        "resources",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("content_hash", sa.String(length=64), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("parent_version", sa.Integer(), nullable=True),
        sa.Column("note", sa.Text(), server_default="", nullable=False),
        sa.Column("chosen", sa.Boolean(), server_default="0", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_resources_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_resources")),
        sa.UniqueConstraint("run_id", "name", "version", name=op.f("uq_resources_run_id_name_version")),
        sa.UniqueConstraint("run_id", "name", "content_hash", name=op.f("uq_resources_run_id_name_content_hash")),
    )
    op.create_table(
        "group_resources",
        sa.Column("group_id", ID, nullable=False),
        sa.Column("resource_id", ID, nullable=False),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name=op.f("fk_group_resources_group_id")),
        sa.ForeignKeyConstraint(["resource_id"], ["resources.id"], name=op.f("fk_group_resources_resource_id")),
        sa.PrimaryKeyConstraint("group_id", "resource_id", name=op.f("pk_group_resources")),
    )
    op.create_index(op.f("ix_group_resources_resource_id"), "group_resources", ["resource_id"])
    op.create_table(
        "critic_calls",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("model", sa.Text(), server_default="", nullable=False),
        sa.Column("messages", sa.JSON(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Float(precision=53), server_default="0", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_critic_calls_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_critic_calls")),
        sa.UniqueConstraint("run_id", "key", name=op.f("uq_critic_calls_run_id_key")),
    )
    for table in ("runs", "groups"):
        with alter_table(table) as altered:
            altered.drop_constraint(op.f(f"ck_{table}_kind"), type_="check")
            altered.create_check_constraint(op.f(f"ck_{table}_kind"), f"kind IN ({KINDS}, 'search', 'import')")
    with alter_table("run_tasks") as tasks:
        tasks.add_column(sa.Column("role", sa.String(length=8), server_default="train", nullable=False))
        tasks.create_check_constraint(op.f("ck_run_tasks_role"), "role IN ('train', 'choose', 'held_out')")


def downgrade() -> None:
    """Removes them. What searched is an evaluation, cancelled if it was not over; so is what was imported."""
    for table in ("episodes", "groups", "iterations"):
        of_searches = "run_id IN (SELECT id FROM runs WHERE kind = 'search')"
        op.execute(f"UPDATE {table} SET status = 'cancelled' WHERE status IN ('planned', 'running') AND {of_searches}")
    op.execute("UPDATE runs SET status = 'cancelled' WHERE status NOT IN ('done', 'failed', 'cancelled') AND kind = 'search'")
    for table in ("groups", "runs"):
        op.execute(f"UPDATE {table} SET kind = 'eval' WHERE kind IN ('search', 'import')")
        with alter_table(table) as altered:
            altered.drop_constraint(op.f(f"ck_{table}_kind"), type_="check")
            altered.create_check_constraint(op.f(f"ck_{table}_kind"), f"kind IN ({KINDS})")
    with alter_table("run_tasks") as tasks:
        tasks.drop_constraint(op.f("ck_run_tasks_role"), type_="check")
        tasks.drop_column("role")
    for table in ("critic_calls", "group_resources", "resources"):
        op.drop_table(table)
