"""Views and triggers are made anew: a run that is done may be made longer."""

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Changes no table."""


def downgrade() -> None:
    """Changes no table."""
