"""Database migrations. They run under a lock, so many workers may start at once. Views and triggers are recreated after each
migration.

Opening a SQLite database upgrades it. A Postgres database is upgraded only by the command `agentrl db upgrade`; until then,
workers refuse to start.
"""

import fcntl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from agentrl import migrations
from agentrl.workflow.errors import ServiceError
from agentrl.workflow.settings import Settings, settings
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.driver_reader import newest_revision
from agentrl.workflow.tables import create_views, schema
from agentrl.workflow.tables.views import VIEWS

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

log = getLogger("agentrl.migrate")
READER_ROLE, TOOLS_ROLE, AGENTS_ROLE = "agentrl_reader", "agentrl_tools", "agentrl_agents"
FIRST, FIRST_COMMIT = "0012", "18ff0d1"
"""The oldest migration in this code, and the commit of agentrl at which that migration was the newest. Only that commit has the
earlier migrations.
"""
LOCK_KEY = 7213094551
LOCK_SECONDS = 60.0
STRONG_PASSWORD_CHARACTERS = 12


def head() -> str:
    return newest_revision()


def current(database: Database) -> str | None:
    """Return the revision of the database; None for an empty database."""
    with database.read() as tx:
        return _current(tx)


def _current(tx: Connection) -> str | None:
    if not tx.dialect.has_table(tx, "alembic_version"):
        return None
    return tx.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()


def _is_foreign(tx: Connection) -> bool:
    """Return whether the database belongs to another program: it has tables, but not those of agentrl."""
    names = inspect(tx).get_table_names()
    return bool(names) and "alembic_version" not in names


def open_database(url: str) -> Database:
    """Open the database, ready to use. A SQLite database is upgraded at once. Raise ServiceError if the database does not
    answer, if a newer agentrl or another program wrote it, or if it is a Postgres database of another revision.
    """
    database = Database(url)
    with database.read() as tx:
        revision = _current(tx)
        is_foreign = revision is None and _is_foreign(tx)
    if is_foreign and database.is_sqlite:
        database.close()
        message = f"The database {str(database.url.database)!r} is not an agentrl database."
        raise ServiceError(message, "Use another file. This one was not changed.")
    if revision == head():
        return database
    is_known = revision is None or revision in {script.revision for script in _script().walk_revisions()}
    if database.is_sqlite and is_known:
        upgrade(database)
        return database
    database.close()
    check_revision(revision)
    if not is_known:
        raise ServiceError(
            f"A newer agentrl wrote this database (revision {revision}; known here: {head()}).", "Use that version."
        )
    raise ServiceError(
        f"The database is at revision {revision or 'none'}, this agentrl needs {head()}.", "Run `agentrl db upgrade` first."
    )


def check_revision(revision: str | None) -> None:
    """Raise ServiceError if this code cannot upgrade a database of this revision."""
    if revision is not None and revision < FIRST:
        raise ServiceError(
            f"The database is at revision {revision}, and this agentrl upgrades from {FIRST} on.",
            f"Upgrade it with agentrl at commit {FIRST_COMMIT} first (`agentrl db upgrade`), then with this one.",
        )


def upgrade(database: Database, revision: str = "head") -> None:
    """Upgrade to `revision`, and recreate views and triggers. Raise ServiceError if the database is too old."""
    from alembic import command

    check_revision(current(database))
    with _migration_lock(database):
        _migrate(database, lambda config: command.upgrade(config, revision))


def downgrade(database: Database, revision: str) -> None:
    """Downgrade the database to `revision`. Downgrading to the revision `base` deletes all tables."""
    from alembic import command

    with _migration_lock(database):
        _migrate(database, lambda config: command.downgrade(config, revision))


def _migrate(database: Database, run) -> None:  # type: ignore[no-untyped-def]
    with _connect_without_foreign_keys(database) as connection, connection.begin():
        create_views.drop(connection)
        run(_config(connection))
        if _current(connection) == head():
            create_views.create(connection)
            if not database.is_sqlite:
                _grant_reader(connection)
                if _grant_worker(connection, TOOLS_ROLE, "for tools workers", schema.RIGHTS_OF_TOOLS):
                    _set_password(connection, TOOLS_ROLE, settings().tools_password, "AGENTRL_TOOLS_PASSWORD")
                if _grant_worker(connection, AGENTS_ROLE, "for agents workers", schema.RIGHTS_OF_AGENTS):
                    _set_password(connection, AGENTS_ROLE, settings().agents_password, "AGENTRL_AGENTS_PASSWORD")


@contextmanager
def _connect_without_foreign_keys(database: Database) -> Iterator[Connection]:
    """Open a connection without foreign key checks on SQLite, which drops a table to alter it."""
    with database.engine.connect() as connection:
        if not database.is_sqlite:
            yield connection
            return
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.execute("PRAGMA foreign_keys=OFF")  # has no effect inside a transaction
        try:
            yield connection
        finally:
            driver.execute("PRAGMA foreign_keys=ON")


def _grant_reader(tx: Connection) -> None:
    """Grant the role of `agentrl sql` the right to SELECT from the named tables and views, and no other right."""
    if not _has_role(tx, READER_ROLE, "that `agentrl sql` reads as"):
        return
    names = ", ".join([*schema.TABLES_FOR_READERS, *VIEWS, "alembic_version"])
    tx.execute(text(f"GRANT USAGE ON SCHEMA public TO {READER_ROLE}"))
    tx.execute(text(f"GRANT SELECT ON {names} TO {READER_ROLE}"))
    for function in create_views.FUNCTIONS:
        tx.execute(text(f"GRANT EXECUTE ON FUNCTION {function}(bytea) TO {READER_ROLE}"))
    _set_password(tx, READER_ROLE, settings().reader_password, "AGENTRL_READER_PASSWORD")


def _grant_worker(tx: Connection, role: str, purpose: str, rights: Mapping[str, Sequence[str]]) -> bool:
    """Grant the rights of a worker to its login role. Return False if the role does not exist."""
    if not _has_role(tx, role, purpose):
        return False
    tx.execute(text(f"GRANT USAGE ON SCHEMA public TO {role}"))
    for table, granted in rights.items():
        tx.execute(text(f"GRANT {', '.join(granted)} ON {table} TO {role}"))
    return True


def _has_role(tx: Connection, role: str, purpose: str) -> bool:
    """Return whether the role exists. If it is missing, create it, if this login has the right to do so."""
    count = text("SELECT count(*) FROM pg_roles WHERE rolname = :role")
    if not tx.execute(count, {"role": role}).scalar_one():
        # A migration of another database on the same server may be making it too.
        passing = "duplicate_object OR unique_violation OR insufficient_privilege"
        tx.execute(text(f"DO $$ BEGIN CREATE ROLE {role} LOGIN; EXCEPTION WHEN {passing} THEN NULL; END $$"))
    there = bool(tx.execute(count, {"role": role}).scalar_one())
    if not there:
        log.warning(
            "This login may not create the role %s. Let a superuser type: CREATE ROLE %s LOGIN; then run `agentrl db upgrade` "
            "again.",
            purpose,
            role,
        )
    return there


def weak_passwords(database: Database, where: Settings) -> list[str]:
    """Return the names of passwords that are shorter than 12 characters or contain `agentrl`."""
    if database.is_sqlite:
        return []
    with database.engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        passwords = {
            "the database's owner (POSTGRES_PASSWORD of the compose stack)": driver.info.password,
            "AGENTRL_READER_PASSWORD": where.reader_password,
            "AGENTRL_TOOLS_PASSWORD": where.tools_password,
            "AGENTRL_AGENTS_PASSWORD": where.agents_password,
        }
    return [
        name
        for name, password in passwords.items()
        if password and (len(password) < STRONG_PASSWORD_CHARACTERS or "agentrl" in password.lower())
    ]


def _set_password(tx: Connection, role: str, password: str, variable: str) -> None:
    if not password:
        return
    from psycopg import sql
    from psycopg.errors import InsufficientPrivilege

    login = sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(role), password)  # which takes no parameter
    try:
        with tx.begin_nested():
            tx.connection.cursor().execute(login)
    except InsufficientPrivilege:
        log.warning(
            "This login may not set the password of %s: %s is ignored. Let a superuser type: ALTER ROLE %s PASSWORD '...';",
            role,
            variable,
            role,
        )


def _script() -> "ScriptDirectory":
    from alembic.script import ScriptDirectory

    return ScriptDirectory.from_config(_config())


def _config(connection: Connection | None = None) -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.attributes["connection"] = connection
    return config


@contextmanager
def _migration_lock(database: Database) -> Iterator[None]:
    if database.is_sqlite:
        with Path(f"{database.url.database}.lock").open("w") as file:
            _wait_for_lock(lambda: _try_flock(file.fileno()))
            yield
        return
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        query = text("SELECT pg_try_advisory_lock(:key)")
        _wait_for_lock(lambda: bool(connection.execute(query, {"key": LOCK_KEY}).scalar_one()))
        try:
            yield
        finally:
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": LOCK_KEY})


def _try_flock(fileno: int) -> bool:
    try:
        fcntl.flock(fileno, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_lock(attempt) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + LOCK_SECONDS
    while not attempt():
        if time.monotonic() > deadline:
            raise ServiceError(f"Another process has been migrating the database for {LOCK_SECONDS:.0f} s.", "Try again.")
        time.sleep(0.05)
