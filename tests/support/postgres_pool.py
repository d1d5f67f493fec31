"""Migrated Postgres databases that tests use in turn: emptied after each test, dropped if the test changed more than rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from sqlalchemy import Connection, Engine, create_engine, text

_numbers = count()

SMALL_TABLE_BYTES = 10 * 8192
"""Postgres plans a table that was never vacuumed as if it had at least 10 pages, so dead rows in fewer change no plan."""

CATALOGS = (
    "pg_attribute", "pg_constraint", "pg_default_acl", "pg_depend", "pg_index", "pg_namespace", "pg_proc", "pg_rewrite",
    "pg_sequence", "pg_statistic", "pg_trigger",
)  # fmt: skip
"""Tables that change with the schema, rights or statistics, besides pg_class. Every new object is in pg_depend."""

LASTING_COLUMNS = (
    "oid, relname, relowner, relkind, relacl, reloptions, relrowsecurity, relpersistence, relhastriggers, relhasrules"
)
"""Those of pg_class that TRUNCATE leaves alone."""

END_OTHER_SESSIONS = """
    SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
RESET_SEQUENCES = """
    SELECT setval(format('%I.%I', schemaname, sequencename)::regclass, start_value, false) FROM pg_sequences
    WHERE last_value IS NOT NULL
"""


@dataclass(frozen=True)
class PooledDatabase:
    """A database and the session that empties it: a session that has looked at the tables before needs half the time."""

    name: str
    session: Connection


class PostgresPool:
    """Copies of one migrated database. To empty one takes a third of the time that making and dropping one takes."""

    def __init__(self, server: Engine, template: str) -> None:
        """Read the template.

        Args:
            server: an engine in autocommit mode whose login may create databases.
            template: the name of the database to copy. Nothing may change it from now on.
        """
        self._server, self._template = server, template
        self._free: list[PooledDatabase] = []
        template_session = self._connect(template)
        self._tables = _empty_tables(template_session)
        self._fingerprint = _fingerprint(template_session)
        _close(template_session)

    @contextmanager
    def lend(self) -> Iterator[str]:
        """Give the URL of a database that equals the template."""
        database = self._free.pop() if self._free else self._create()
        try:
            yield self._url(database.name)
        finally:
            if self._restore(database.session):
                self._free.append(database)
            else:
                self._drop(database)

    def close(self) -> None:
        """Drop the databases that are not in use."""
        while self._free:
            self._drop(self._free.pop())

    def _create(self) -> PooledDatabase:
        name = f"pooled_{next(_numbers)}"
        self._execute(f"CREATE DATABASE {name} TEMPLATE {self._template}")
        return PooledDatabase(name, self._connect(name))

    def _drop(self, database: PooledDatabase) -> None:
        _close(database.session)
        self._execute(f"DROP DATABASE {database.name} WITH (FORCE)")

    def _restore(self, session: Connection) -> bool:
        """Return True once the database equals the template again; False if it has changed in more than rows."""
        session.execute(text(END_OTHER_SESSIONS))
        if _fingerprint(session) != self._fingerprint:
            return False
        sizes = _sizes_of_filled_tables(session, self._tables)
        if max(sizes.values(), default=0) > SMALL_TABLE_BYTES:
            session.execute(text(f"TRUNCATE {', '.join(self._tables)}"))
        else:
            for table in sizes:
                session.execute(text(f"DELETE FROM {table}"))
        session.execute(text(RESET_SEQUENCES))
        return True

    def _connect(self, name: str) -> Connection:
        """Open a session without triggers and checks of foreign keys, so that tables can be emptied in any order."""
        engine = create_engine(self._url(name), isolation_level="AUTOCOMMIT")
        session = engine.connect()
        session.execute(text("SET session_replication_role = replica"))
        return session

    def _url(self, name: str) -> str:
        return self._server.url.set(database=name).render_as_string(hide_password=False)

    def _execute(self, statement: str) -> None:
        with self._server.connect() as connection:
            connection.execute(text(statement))


def _close(session: Connection) -> None:
    session.close()
    session.engine.dispose()


def _empty_tables(session: Connection) -> list[str]:
    """Return the tables without rows. Those with rows are compared instead of emptied."""
    names = session.execute(text("SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY tablename")).scalars()
    return [name for name in names if not session.execute(text(f"SELECT EXISTS (SELECT FROM {name})")).scalar_one()]


def _sizes_of_filled_tables(session: Connection, tables: list[str]) -> dict[str, int]:
    """Return the bytes of each table that has rows."""
    parts = [
        f"SELECT '{table}' AS name, pg_relation_size('{table}') AS size WHERE EXISTS (SELECT FROM {table})" for table in tables
    ]
    return {row.name: row.size for row in session.execute(text(" UNION ALL ".join(parts)))}


def _fingerprint(session: Connection) -> list[tuple[str, ...]]:
    """Return values of which one changes if anything besides the rows of the emptied tables does.

    A catalog's number of rows or newest transaction changes with it. The rows of pg_class are compared, because TRUNCATE writes
    to it.
    """
    parts = [
        f"SELECT '{name}', count(*)::text, max(xmin::text::bigint)::text FROM {name}" for name in (*CATALOGS, "alembic_version")
    ]
    parts.append(
        f"SELECT 'pg_class', count(*)::text, md5(string_agg(({LASTING_COLUMNS})::text, ' ' ORDER BY oid)) FROM pg_class "
        "WHERE relnamespace = 'public'::regnamespace"
    )
    parts.append(
        "SELECT 'pg_database', concat(datconnlimit, datacl), count(setdatabase)::text FROM pg_database "
        "LEFT JOIN pg_db_role_setting ON setdatabase = oid WHERE datname = current_database() GROUP BY datconnlimit, datacl"
    )
    return [tuple(row) for row in session.execute(text(" UNION ALL ".join(parts)))]
