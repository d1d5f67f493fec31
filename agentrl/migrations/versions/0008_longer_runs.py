"""Views and triggers are made anew: iterations are counted from 1 there, and a run that is done may be made longer.

What was said of iterations, counted from 0 until now, says the same number as the views do.
"""

import re

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

TOLD = (
    ("events", "subject", r"^(iteration )(\d+)$", ("sampling_on", "update_failed")),
    ("events", "detail", r"^(iteration )(\d+)(?=: )", ("paused", "failed")),
    ("events", "detail", r"^(its lease on iteration )(\d+)(?= ran out)", ("worker_lost",)),
    ("runs", "reason", r"^(iteration )(\d+)(?=: )", ()),
)
"""Tables, their columns, what was written there of an iteration, and in which kinds of events."""


def upgrade() -> None:
    """Counts from 1."""
    _count(1)


def downgrade() -> None:
    """Counts from 0."""
    _count(-1)


def _count(more: int) -> None:
    tx = op.get_bind()
    for name, column, pattern, kinds in TOLD:
        table = sa.table(name, sa.column("id"), sa.column("kind"), sa.column(column))
        said = table.c[column]
        rows = sa.select(table.c.id, said).where(said.like("%iteration %"))
        for row in tx.execute(rows.where(table.c.kind.in_(kinds)) if kinds else rows).all():
            told = re.sub(pattern, lambda found: f"{found[1]}{int(found[2]) + more}", row[1])
            if told != row[1]:
                tx.execute(sa.update(table).where(table.c.id == row.id).values({column: told}))
