"""The load of each host: processors, memory, GPUs, waiting work, tokens per second."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "machine_loads",
        sa.Column("slot", NUMBER, autoincrement=False, nullable=False),
        sa.Column("host", sa.String(length=64), nullable=False),
        sa.Column("cpu_share", sa.Float(53), nullable=True),
        sa.Column("memory_used", NUMBER, nullable=True),
        sa.Column("memory_total", NUMBER, nullable=True),
        sa.Column("gpus", sa.JSON(), nullable=True),
        sa.Column("waiting_rollout", NUMBER, nullable=True),
        sa.Column("waiting_train", NUMBER, nullable=True),
        sa.Column("waiting_tools", NUMBER, nullable=True),
        sa.Column("tokens_per_second", sa.Float(53), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.PrimaryKeyConstraint("slot", "host", name=op.f("pk_machine_loads")),
    )


def downgrade() -> None:
    """Remove the table."""
    op.drop_table("machine_loads")
