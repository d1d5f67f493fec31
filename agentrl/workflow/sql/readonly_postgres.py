"""Runs untrusted SQL on Postgres: one statement over the extended protocol, in a read-only transaction.

A statement could end the read-only transaction, so the caller must connect with a login that cannot write.
"""

import threading
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from typing import Any

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import Loader

from agentrl.workflow.errors import AccessDenied, AgentRLError, ConfigError, ServiceError
from agentrl.workflow.sql.readonly import MAX_ANSWER, Table, collect_rows, no_rows_error, several_statements_error, write_error

NUMBERS = {"bool", "bytea", "int2", "int4", "int8", "oid", "float4", "float8", "numeric"}
"""The Postgres types whose values are converted to Python types. Values of other types are loaded as text."""


class AnyText(Loader):
    """Loads a value of any type as the text that the server sends. Bytes that are not UTF-8 are escaped."""

    def load(self, data: Buffer) -> str:
        return bytes(data).decode(errors="backslashreplace")


def read_postgres(
    connection: "psycopg.Connection[tuple[Any, ...]]",
    sql: str,
    limit: int,
    seconds: float,
    stopped: AgentRLError,
    hint: str,
    size: int = MAX_ANSWER,
) -> Table:
    """Run one SELECT, and return its columns and at most `limit` rows.

    The server stops the query after `seconds`. If the server does not, this process cancels the query. Values other than
    numbers, bytes and booleans are returned as text, because Postgres has dates, nesting depths and digits that Python's types
    cannot hold.

    Args:
        connection: a connection of a read-only login, with `statement_timeout` and `default_transaction_read_only` set, in
            UTF-8 (or SQL_ASCII).
        sql: the query.
        limit: the most rows.
        seconds: the time limit, in seconds.
        stopped: the error to raise after the time limit.
        hint: the hint for an invalid query.
        size: the most characters and bytes of the result.
    """
    timer = threading.Timer(seconds + 0.5, connection.cancel)
    timer.start()
    try:
        cursor = connection.cursor()
        for kind in (0, *_texts(connection)):  # 0: any other
            cursor.adapters.register_loader(kind, AnyText)
        with closing(_stream_rows(cursor, sql)) as streamed:  # an open stream would block the connection's rollback
            rows = collect_rows(streamed, limit, size)
        if cursor.description is None:  # an empty stream does not name its columns
            cursor.execute(sql.encode(), prepare=True)
    except UnicodeDecodeError as error:  # a column's name, in SQL_ASCII
        raise ConfigError("A result column's name is not ASCII.", hint) from error
    except psycopg.Error as error:
        raise (stopped if isinstance(error, psycopg.errors.QueryCanceled) else _postgres_refusal(error, hint)) from error
    finally:
        timer.cancel()
        with suppress(psycopg.OperationalError):  # the connection is lost, and its transaction with it
            connection.rollback()
    if cursor.description is None:
        raise no_rows_error()
    return [column.name for column in cursor.description], rows


def _stream_rows(cursor: "psycopg.Cursor[tuple[Any, ...]]", sql: str) -> Generator[tuple[Any, ...], None, None]:
    """Run the statement and yield its rows. The extended protocol accepts only one statement."""
    yield from cursor.stream(sql.encode())


def _texts(connection: "psycopg.Connection[tuple[Any, ...]]") -> Iterator[int]:
    """Yield the ids of the Postgres types whose values are loaded as text. All array types are among them."""
    for kind in connection.adapters.types:
        yield from [kind.array_oid] + [kind.oid] * (kind.name not in NUMBERS)


def _postgres_refusal(error: psycopg.Error, hint: str) -> AgentRLError:
    message = " ".join((error.diag.message_primary or str(error)).split())
    state = error.sqlstate or ""
    if not state and "memory" in message:
        return AccessDenied(f"The query asks for too much: {message}.", "Ask for less at a time.")
    if "multiple commands" in message:
        return several_statements_error()
    if state in ("42501", "25006") or state == "" or state.startswith(("0A", "2D")):
        return write_error(message)
    if state.startswith(("08", "53", "57")):
        return ServiceError(f"The database stopped answering: {message}.", "Try again; `agentrl doctor`.")
    return ConfigError(f"Invalid query: {message}.", hint)
