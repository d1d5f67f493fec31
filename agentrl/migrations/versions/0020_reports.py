"""Reports: the trackers that runs are written to."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "reports",
        sa.Column("run_id", ID, nullable=False),
        sa.Column("tracker", sa.String(length=128), nullable=False),
        sa.Column("handle", sa.Text(), server_default="", nullable=False),
        sa.Column("url", sa.Text(), server_default="", nullable=False),
        sa.Column("samples", sa.Integer(), server_default="0", nullable=False),
        sa.Column("iteration", sa.Integer(), server_default="0", nullable=False),
        sa.Column("status", sa.String(length=16), server_default="", nullable=False),
        sa.Column("error", sa.Text(), server_default="", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_reports_run_id")),
        sa.PrimaryKeyConstraint("run_id", "tracker", name=op.f("pk_reports")),
    )


def downgrade() -> None:
    """Remove it."""
    op.drop_table("reports")
