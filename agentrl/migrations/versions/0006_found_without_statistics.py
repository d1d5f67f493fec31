"""What was found by reading a table whole has an index; the views are made anew, each with one plan that is right."""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

INDEXES = {"consumptions": ["iteration_id"], "policies": ["path"]}


def upgrade() -> None:
    """Adds the indexes, and forgets what `agentrl vacuum` told SQLite's planner, which it does no longer."""
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP TABLE IF EXISTS sqlite_stat1")
        op.execute("DROP TABLE IF EXISTS sqlite_stat4")
    for table, columns in INDEXES.items():
        op.create_index(op.f(f"ix_{table}_{'_'.join(columns)}"), table, columns)


def downgrade() -> None:
    """Removes them."""
    for table, columns in INDEXES.items():
        op.drop_index(op.f(f"ix_{table}_{'_'.join(columns)}"), table_name=table)
