"""The index of episodes by their parents has only forks."""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

NAME = "ix_episodes_parent_id"


def upgrade() -> None:
    """Replace the index by one without the episodes that have no parent."""
    condition = sa.text("parent_id IS NOT NULL")
    op.drop_index(NAME, "episodes")
    op.create_index(NAME, "episodes", ["parent_id"], sqlite_where=condition, postgresql_where=condition)


def downgrade() -> None:
    """Create the index of all episodes again."""
    op.drop_index(NAME, "episodes")
    op.create_index(NAME, "episodes", ["parent_id"])
