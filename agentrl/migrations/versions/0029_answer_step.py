"""A long final answer that is the content of a step is stored once."""

import sqlalchemy as sa
from alembic import op

from agentrl.migrations.alteration import alter_table

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column. Episodes that are stored already keep their answers."""
    op.add_column("episodes", sa.Column("answer_step", sa.Integer(), nullable=True))


def downgrade() -> None:
    """Copy the answers out of the steps, and remove the column."""
    op.execute("""
        UPDATE episodes SET final_answer = coalesce(substr(s.text, s.content_start, s.content_length), s.content) FROM steps s
        WHERE s.episode_id = episodes.id AND s.attempt = episodes.attempt AND s.number = episodes.answer_step""")
    with alter_table("episodes") as episodes:
        episodes.drop_column("answer_step")
