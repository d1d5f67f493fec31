"""Annotations: what agents, tools and hooks say of their episodes. A call's row holds its tool's until its step is observed."""

import sqlalchemy as sa
from alembic import op

from agentrl.migrations.alteration import alter_table

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
KINDS = "'reward', 'message', 'object', 'annotation', 'exception', 'operation', 'span'"


def upgrade() -> None:
    """Adds them."""
    op.create_table(
        "annotations",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("episode_id", ID, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("emission", sa.String(length=64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("source", sa.String(length=8), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("seconds", sa.Float(precision=53), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.Column("run", sa.String(length=64), nullable=False),
        sa.CheckConstraint("source IN ('agent', 'tool', 'hook')", name=op.f("ck_annotations_source")),
        sa.CheckConstraint(f"kind IN ({KINDS})", name=op.f("ck_annotations_kind")),
        sa.ForeignKeyConstraint(["episode_id"], ["episodes.id"], name=op.f("fk_annotations_episode_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_annotations")),
        sa.UniqueConstraint("episode_id", "attempt", "emission", name=op.f("uq_annotations_episode_id_attempt_emission")),
    )
    op.create_index(op.f("ix_annotations_run"), "annotations", ["run", "id"])
    op.add_column("tool_calls", sa.Column("annotations", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Removes them."""
    with alter_table("tool_calls") as calls:
        calls.drop_column("annotations")
    op.drop_table("annotations")
