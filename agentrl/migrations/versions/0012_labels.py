"""Tags and notes: what people say of a run."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Adds them."""
    op.create_table(
        "run_tags",
        sa.Column("run_id", ID, nullable=False),
        sa.Column("tag", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_tags_run_id")),
        sa.PrimaryKeyConstraint("run_id", "tag", name=op.f("pk_run_tags")),
    )
    op.create_index(op.f("ix_run_tags_tag"), "run_tags", ["tag"])
    op.create_table(
        "run_notes",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_notes_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run_notes")),
    )
    op.create_index(op.f("ix_run_notes_run_id"), "run_notes", ["run_id"])


def downgrade() -> None:
    """Removes them."""
    op.drop_table("run_notes")
    op.drop_table("run_tags")
