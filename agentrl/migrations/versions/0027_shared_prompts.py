"""The prompt that the first steps of a group's episodes have in common is stored once."""

import sqlalchemy as sa
from alembic import op

from agentrl.migrations.alteration import alter_table

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the columns. Steps that are stored already keep their prompts."""
    op.add_column("groups", sa.Column("prompt_step_id", ID, nullable=True))
    op.add_column("groups", sa.Column("prompt_hash", sa.String(length=32), nullable=True))
    op.add_column("steps", sa.Column("prompt_step_id", ID, nullable=True))


def downgrade() -> None:
    """Copy the shared prompts into the steps that name them, and remove the columns."""
    op.execute("""
        UPDATE step_tokens SET prompt_ids = owner.prompt_ids FROM steps, step_tokens owner
        WHERE steps.id = step_tokens.step_id AND owner.step_id = steps.prompt_step_id""")
    op.execute("UPDATE steps SET prompt = owner.prompt FROM steps owner WHERE owner.id = steps.prompt_step_id")
    with alter_table("steps") as steps:
        steps.drop_column("prompt_step_id")
    with alter_table("groups") as groups:
        for name in ("prompt_step_id", "prompt_hash"):
            groups.drop_column(name)
