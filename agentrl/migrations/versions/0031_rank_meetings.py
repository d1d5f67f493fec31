"""The meetings of the hosts of an update: where a train worker waits for other hosts."""

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "rank_meetings",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("address", sa.Text(), server_default="", nullable=False),
        sa.Column("devices", sa.String(length=8), nullable=False),
        sa.Column("numerics", sa.String(length=8), nullable=False),
        sa.Column("token", sa.String(length=64), nullable=False),
        sa.Column("lease_until", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rank_meetings")),
    )


def downgrade() -> None:
    """Remove the table."""
    op.drop_table("rank_meetings")
