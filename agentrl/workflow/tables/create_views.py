"""Creation of the views and functions, and of the triggers that protect final statuses. Every migration creates them again.

The triggers reject every update that changes the final status of an episode, group, iteration or run, no matter who sends it.
The only exceptions are the conditions in LENGTHENED.
"""

from typing import TYPE_CHECKING

from agentrl.workflow.tables.view_row import ViewRow
from agentrl.workflow.tables.views import VIEWS
from agentrl.workflow.trajectory import TERMINAL

if TYPE_CHECKING:
    from sqlalchemy import Connection

FUNCTIONS = {
    "rl_i4": "bits",
    "rl_f4": """
        CASE WHEN (bits >> 23) & 255 = 255 THEN NULL ELSE
          (CASE WHEN bits < 0 THEN -1.0::float8 ELSE 1.0::float8 END)
          * (CASE WHEN (bits >> 23) & 255 = 0 THEN (bits & 8388607) * power(2::float8, -149)
             ELSE ((bits & 8388607) + 8388608) * power(2::float8, ((bits >> 23) & 255) - 150) END) END""",
}
"""The SQL of each Postgres function that decodes packed little-endian values. The SQL computes one value from its 4 bytes,
which are in `bits`. `store.reads.user_sql` defines the same functions for SQLite.
"""

LENGTHENED = {"runs": "OLD.status = 'done' AND NEW.status = 'running' AND NEW.iterations > OLD.iterations"}
"""The SQL conditions, by table, under which a final status may change. The only case is a done run that is extended."""

FINAL_STATUSES = {
    "episodes": sorted(TERMINAL),
    "groups": ["cancelled", "done"],
    "iterations": ["cancelled", "done"],
    "runs": ["cancelled", "done"],
}
"""The final statuses of each table, by the table's name: no update may change them. A failed run may be resumed, so `failed` is
not final for runs.
"""


def create(tx: "Connection") -> None:
    """Create all views, functions and triggers."""
    from sqlalchemy import text

    for name, kind in VIEWS.items():
        tx.execute(text(f"CREATE VIEW {name} AS {_dialect(view_sql(kind), tx.dialect.name)}"))
    if tx.dialect.name == "postgresql":
        for name, value in FUNCTIONS.items():
            tx.execute(text(_unpack_function(name, value)))
    for table, statuses in FINAL_STATUSES.items():
        for statement in _guard_triggers(table, statuses, tx.dialect.name):
            tx.execute(text(statement))


def drop(tx: "Connection") -> None:
    """Drop all views, functions and triggers that exist. A migration runs without them."""
    from sqlalchemy import text

    for name in VIEWS:
        tx.execute(text(f"DROP VIEW IF EXISTS {name}"))
    if tx.dialect.name == "postgresql":
        for name in FUNCTIONS:
            tx.execute(text(f"DROP FUNCTION IF EXISTS {name}(bytea)"))
    for table in FINAL_STATUSES:
        if tx.dialect.name == "postgresql":
            tx.execute(text(f"DROP FUNCTION IF EXISTS guard_{table}() CASCADE"))
        else:
            tx.execute(text(f"DROP TRIGGER IF EXISTS guard_{table}"))


def view_sql(kind: type[ViewRow]) -> str:
    """Return the SELECT statement of a view."""
    columns = ", ".join(f"{column.sql} AS {name}" for name, column in kind.COLUMNS.items())
    return " UNION ALL ".join(f"SELECT {columns} FROM {source}" for source in kind.SOURCES)


def _dialect(query: str, dialect: str) -> str:
    head, *parts = query.split("{seconds:")
    pieces = [head]
    for part in parts:
        moments, rest = part.split("}", 1)
        start, end = moments.split(",")
        if dialect == "postgresql":
            pieces.append(f"extract(epoch FROM ({end} - {start}))::float8{rest}")
        else:
            pieces.append(f"((julianday({end}) - julianday({start})) * 86400.0){rest}")
    return "".join(pieces)


def _unpack_function(name: str, value: str) -> str:
    word = " | ".join(f"(get_byte(blob, 4 * i + {byte}) << {8 * byte})" for byte in range(4))
    return f"""
        CREATE FUNCTION {name}(blob bytea) RETURNS text LANGUAGE sql IMMUTABLE STRICT AS $$
          SELECT coalesce('[' || string_agg(coalesce(({value})::text, 'null'), ', ' ORDER BY i) || ']', '[]')
          FROM (SELECT i, {word} AS bits FROM generate_series(0, length(blob) / 4 - 1) AS i) AS words
        $$"""


def _guard_triggers(table: str, statuses: list[str], dialect: str) -> list[str]:
    listed = ", ".join(f"'{status}'" for status in statuses)
    condition = f"OLD.status IN ({listed}) AND NEW.status <> OLD.status"
    condition += f" AND NOT ({LENGTHENED[table]})" if table in LENGTHENED else ""
    message = f"a finished row of {table} keeps its status"
    if dialect == "postgresql":
        return [
            f"CREATE FUNCTION guard_{table}() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{message}' USING ERRCODE = 'check_violation'; END $$",
            f"CREATE TRIGGER guard_{table} BEFORE UPDATE OF status ON {table} FOR EACH ROW "
            f"WHEN ({condition}) EXECUTE FUNCTION guard_{table}()",
        ]
    return [
        f"CREATE TRIGGER guard_{table} BEFORE UPDATE OF status ON {table} FOR EACH ROW "
        f"WHEN {condition} BEGIN SELECT RAISE(ABORT, '{message}'); END"
    ]
