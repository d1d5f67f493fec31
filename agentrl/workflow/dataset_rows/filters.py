"""Conditions on a dataset's rows, in SQL: `level = 'easy' AND length(question) < 2000`.

SQLite evaluates a condition over the columns of one row, in memory and without access to anything else. Lists and objects are
JSON text (`extra_info->>'level' = 'easy'`). A column that a row lacks is NULL; one that no row has is an error.
"""

import json
import sqlite3
from collections.abc import Mapping
from typing import Any

from agentrl.workflow.errors import DatasetError, did_you_mean
from agentrl.workflow.sql.readonly import allow_reads

MAX_CONDITION = 4096
"""Characters."""
MAX_INSTRUCTIONS = 1_000_000
"""SQLite's instructions for one row."""
STEP = 100_000
LACKS_COLUMN = "no such column: "
EXAMPLE = "Write a condition in SQL over the columns, with texts in single quotes: --filter \"level = 'easy'\""


class RowFilter:
    """A condition; `keeps` decides on a row, `check_columns` at the end reports a column that no row had."""

    def __init__(self, condition: str, source: str) -> None:
        if len(condition) > MAX_CONDITION or "\0" in condition:
            raise DatasetError(f"--filter must be text of at most {MAX_CONDITION} characters.", EXAMPLE)
        self._condition, self._source = condition, source
        self._queries: dict[tuple[str, ...], tuple[str, list[str]]] = {}
        self._missing: set[str] = set()
        self._seen: set[str] = set()
        self._left = 0
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 64_000_000)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1000)
        self._connection.create_function("len", 1, lambda value: None if value is None else len(str(value)), deterministic=True)
        self._connection.set_authorizer(allow_reads)
        self._connection.set_progress_handler(self._is_over, STEP)

    def keeps(self, values: Mapping[str, Any]) -> bool:
        """Return whether the row fulfils the condition; NULL does not.

        Raises:
            DatasetError: the condition is not SQL, or takes too much work.
        """
        columns = tuple(values)
        while True:
            query, bound = self._queries.get(columns) or self._prepare(columns)
            self._left = MAX_INSTRUCTIONS // STEP
            try:
                (kept,) = self._connection.execute(query, [_as_sql(values.get(name)) for name in bound]).fetchone()
                return bool(kept)
            except (sqlite3.Error, sqlite3.Warning, OverflowError) as error:
                message = str(error)
                if not message.startswith(LACKS_COLUMN):
                    reason = "it takes too much work" if "interrupted" in message else message
                    raise DatasetError(f"Invalid --filter {self._condition!r:.200}: {reason}.", EXAMPLE) from error
                name = message.removeprefix(LACKS_COLUMN)
                if name in self._missing:
                    raise DatasetError(f"--filter does not know {name!r}.", EXAMPLE) from error
                self._missing.add(name)
                self._queries.clear()

    def check_columns(self) -> None:
        """Raises DatasetError where the condition names a column that no row had."""
        if self._seen and (missing := sorted(self._missing - {name.lower() for name in self._seen} - self._seen)):
            hint = f"{did_you_mean(missing[0], self._seen)} Put texts in single quotes."
            raise DatasetError(f"--filter: no row of {self._source!r} has a column {missing[0]!r}.", hint)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _prepare(self, columns: tuple[str, ...]) -> tuple[str, list[str]]:
        """The query for rows of these columns, and the columns that the condition may name: no other is bound."""
        self._seen.update(columns)
        asked = self._condition.lower()
        bound = [name for name in columns if name.lower() in asked]
        known = {name.lower() for name in bound}
        bound += [name for name in sorted(self._missing) if name.lower() not in known]
        given = ", ".join(f"? AS {_quoted(name)}" for name in bound) or "1"
        self._queries[columns] = (f"SELECT ({self._condition}\n) FROM (SELECT {given})", bound)
        return self._queries[columns]

    def _is_over(self) -> bool:
        self._left -= 1
        return self._left < 0


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _as_sql(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
