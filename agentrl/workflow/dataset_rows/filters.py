"""SQL conditions on a dataset's rows: `level = 'easy' AND length(question) < 2000`.

SQLite evaluates a condition over the columns of one row, in memory and without access to anything else. Lists and objects are
JSON text (`extra_info->>'level' = 'easy'`). A column that a row lacks is NULL; a column that no row has is an error.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, compress
from typing import Any

from agentrl.workflow.dataset_rows.formats import SourceRow
from agentrl.workflow.errors import DatasetError, did_you_mean
from agentrl.workflow.sql.readonly import allow_reads

MAX_CONDITION = 4096
"""The maximum length of a condition, in characters."""
MAX_INSTRUCTIONS = 1_000_000
"""The maximum number of SQLite instructions for one row."""
MAX_VALUE_BYTES = 16_000_000
"""The maximum size of a value, in bytes: twice that of a row. The limit on instructions is not enough, because a function of
SQLite is one instruction, even for a very long argument.
"""
STEP = 100_000
BATCH_ROWS = 32
"""The number of rows that one query evaluates. Starting a query takes longer than evaluating a condition."""
MAX_QUERIES = 1000
"""The maximum number of cached queries. There is one for each set of columns, and every row of a JSON lines file may have
different columns.
"""
LACKS_COLUMN = "no such column: "
EXAMPLE = "Write a condition in SQL over the columns, with texts in single quotes: --filter \"level = 'easy'\""


class RowFilter:
    """A condition on rows. Call `check_columns` after the last row: it reports a column that no row had."""

    def __init__(self, condition: str, source: str) -> None:
        if len(condition) > MAX_CONDITION or "\0" in condition:
            raise DatasetError(f"--filter must be text of at most {MAX_CONDITION} characters.", EXAMPLE)
        self._condition, self._source = condition, source
        self._bound: dict[tuple[str, ...], list[str]] = {}
        self._missing: set[str] = set()
        self._seen: set[str] = set()
        self._left = 0
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1000)
        self._connection.create_function("len", 1, _length, deterministic=True)
        self._connection.create_function("instr", 2, _find, deterministic=True)
        self._connection.create_function("replace", 3, _replace, deterministic=True)
        self._connection.set_authorizer(allow_reads)
        self._connection.set_progress_handler(self._is_over, STEP)

    def select(self, rows: Iterable[SourceRow]) -> Iterator[SourceRow]:
        """Yield the rows for which the condition is true, and the rows that cannot be read. NULL is treated as false. Raise
        DatasetError if the condition is not SQL, or needs too much work; the message names the row.
        """
        batch: list[SourceRow] = []
        columns: tuple[str, ...] = ()
        for row in rows:
            names = () if row.values is None else tuple(row.values)
            if names != columns or len(batch) == BATCH_ROWS:
                yield from self._decide(columns, batch)
                batch, columns = [], names
            if row.values is None:
                yield row
            else:
                batch.append(row)
        yield from self._decide(columns, batch)

    def check_columns(self) -> None:
        """Raise DatasetError if the condition names a column that no row had."""
        if self._seen and (missing := sorted(self._missing - {name.lower() for name in self._seen} - self._seen)):
            hint = f"{did_you_mean(missing[0], self._seen)} Put texts in single quotes."
            raise DatasetError(f"--filter: no row of {self._source!r} has a column {missing[0]!r}.", hint)

    def close(self) -> None:
        self._connection.close()

    def _decide(self, columns: tuple[str, ...], batch: Sequence[SourceRow]) -> Sequence[SourceRow]:
        """Return the rows of the batch for which the condition is true. All rows of the batch have the same columns."""
        problem = ""
        try:
            return list(compress(batch, self._evaluate(columns, batch))) if batch else ()
        except UnicodeEncodeError:
            problem = "half a surrogate pair in a column that --filter reads"
        except OverflowError:
            problem = "a number in a column that --filter reads is too large for SQL"
        except (sqlite3.Error, sqlite3.Warning) as error:
            if str(error).startswith(LACKS_COLUMN):
                self._add_missing(str(error).removeprefix(LACKS_COLUMN))
                return self._decide(columns, batch)
            if len(batch) == 1:
                reason = "it takes too much work" if "interrupted" in str(error) else str(error)
                message = f"--filter {self._condition!r:.200} does not work ({batch[0].place}): {reason}."
                raise DatasetError(message, EXAMPLE) from error
        if len(batch) == 1:
            return [batch[0]._replace(values=None, problem=problem)]
        return [match for row in batch for match in self._decide(columns, [row])]  # one of them is at fault

    def _evaluate(self, columns: tuple[str, ...], batch: Sequence[SourceRow]) -> Iterator[Any]:
        bound = self._bound.get(columns)
        if bound is None:
            bound = self._bind(columns)
        values = [(row.values or {}).get(name) for row in batch for name in bound]
        if any(value.__class__ in (dict, list) for value in values):
            values = [json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value for value in values]
        self._left = len(batch) * MAX_INSTRUCTIONS // STEP
        results = self._connection.execute(_query(self._condition, tuple(bound), len(batch)), values).fetchall()
        return chain.from_iterable(results)

    def _add_missing(self, name: str) -> None:
        if name in self._missing:
            raise DatasetError(f"--filter uses the unknown name {name!r}.", EXAMPLE)
        self._missing.add(name)
        self._bound.clear()

    def _bind(self, columns: tuple[str, ...]) -> list[str]:
        """Return the columns of these rows that the condition may name, and the missing ones."""
        self._seen.update(columns)
        condition = self._condition.lower()
        bound = [name for name in columns if name.lower() in condition]
        present = {name.lower() for name in bound}
        bound += [name for name in sorted(self._missing) if name.lower() not in present]
        if len(self._bound) == MAX_QUERIES:
            self._bound.clear()
        self._bound[columns] = bound
        return bound

    def _is_over(self) -> bool:
        self._left -= 1
        return self._left < 0


@lru_cache(MAX_QUERIES)
def _query(condition: str, columns: tuple[str, ...], rows: int) -> str:
    """Return the query that evaluates the condition. It evaluates each row separately, so no SQL function sees two rows."""
    names = [f'"value {number}"' for number in range(len(columns))] or ['"no value"']
    aliases = ", ".join(f"{name} AS {_quoted(column)}" for name, column in zip(names, columns, strict=False)) or "1"
    table = ", ".join([f"({', '.join('?' * len(columns)) or '1'})"] * rows)
    return (
        f"WITH given({', '.join(names)}) AS (VALUES {table}) SELECT (SELECT ({condition}\n) FROM (SELECT {aliases})) FROM given"
    )


def _length(value: Any) -> int | None:
    return None if value is None else len(str(value))


def _find(text: Any, part: Any) -> int | None:
    """Replace SQLite's function `instr` by one in linear time."""
    return None if text is None or part is None else str(text).find(str(part)) + 1


def _replace(*arguments: Any) -> str | None:
    """Replace SQLite's function `replace` by one in linear time, with a limit on the size of the result."""
    if None in arguments:
        return None
    text, old, new = map(str, arguments)
    if not old:
        return text
    if len(text) + text.count(old) * len(new) > MAX_VALUE_BYTES:
        raise OverflowError("the text is too long")  # SQLite's own sentence
    return text.replace(old, new)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
