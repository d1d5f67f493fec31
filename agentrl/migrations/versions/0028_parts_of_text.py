"""A turn's content and thought are stored as places in its text."""

import sqlalchemy as sa
from alembic import op

from agentrl.migrations.alteration import alter_table

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

PARTS = ("content", "thought")
PLACES = tuple(f"{part}_{place}" for part in PARTS for place in ("start", "length"))


def upgrade() -> None:
    """Add the columns. Steps that are stored already keep their parts."""
    for name in PLACES:
        op.add_column("steps", sa.Column(name, sa.Integer(), nullable=True))


def downgrade() -> None:
    """Copy the parts out of the texts, and remove the columns."""
    for part in PARTS:
        op.execute(f"UPDATE steps SET {part} = substr(text, {part}_start, {part}_length) WHERE {part}_start IS NOT NULL")
    with alter_table("steps") as steps:
        for name in PLACES:
            steps.drop_column(name)
