"""Tool calls that the model did not make: what judges an episode is asked through the same rows (`tool_calls.kind`).

Of every call also what its sandbox saw, the processor time and how often it was sent; the sessions of tools that keep one.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from agentrl.migrations.alteration import alter_table

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
SEEN: dict[str, sa.types.TypeEngine[Any]] = {
    "cpu_seconds": sa.Float(precision=53),
    "sandbox": sa.String(length=16),
    "exit_status": sa.String(length=16),
    "exit_code": sa.Integer(),
}


def upgrade() -> None:
    """Adds them. A call that has run was sent once, as far as is known."""
    with alter_table("tool_calls") as calls:
        calls.add_column(sa.Column("kind", sa.String(length=8), server_default="call", nullable=False))
        calls.create_check_constraint(op.f("ck_tool_calls_kind"), "kind IN ('call', 'grade')")
        calls.add_column(sa.Column("sends", sa.Integer(), server_default="0", nullable=False))
        for name, kind in SEEN.items():
            calls.add_column(sa.Column(name, kind, nullable=True))
        calls.create_check_constraint(op.f("ck_tool_calls_sandbox_saw_exit"), "(sandbox IS NULL) = (exit_status IS NULL)")
    op.execute("UPDATE tool_calls SET sends = 1 WHERE started_at IS NOT NULL OR status = 'pending'")
    op.create_table(
        "tool_sessions",
        sa.Column("episode_id", ID, nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("tool", sa.String(length=128), nullable=False),
        sa.Column("owner", sa.Text(), server_default="", nullable=False),
        sa.Column("lease_until", sa.BigInteger(), nullable=True),
        sa.Column("builds", sa.Integer(), server_default="1", nullable=False),
        sa.Column("differs", sa.Text(), server_default="", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.ForeignKeyConstraint(["episode_id"], ["episodes.id"], name=op.f("fk_tool_sessions_episode_id")),
        sa.PrimaryKeyConstraint("episode_id", "attempt", "tool", name=op.f("pk_tool_sessions")),
    )
    op.create_index(op.f("ix_tool_sessions_owner"), "tool_sessions", ["owner"])


def downgrade() -> None:
    """Removes them, and the calls that the model did not make."""
    op.drop_table("tool_sessions")
    op.execute("DELETE FROM tool_calls WHERE kind <> 'call'")
    with alter_table("tool_calls") as calls:
        calls.drop_constraint(op.f("ck_tool_calls_sandbox_saw_exit"), type_="check")
        for name in ("sends", *SEEN):
            calls.drop_column(name)
        calls.drop_constraint(op.f("ck_tool_calls_kind"), type_="check")
        calls.drop_column("kind")
