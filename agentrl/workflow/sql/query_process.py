"""Runs untrusted queries in a separate process that may be killed.

Some functions of SQLite take time quadratic in their input, within one instruction that cannot be interrupted. A value of
Postgres may exceed the memory. This module has the code of both processes: `QueryProcess` sends queries, and `serve` runs them.
`read` and `main` are for databases that a model may read.
"""

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.workflow import errors
from agentrl.workflow.errors import AccessDenied, AgentRLError, ServiceError
from agentrl.workflow.runtime import limited_process
from agentrl.workflow.runtime.limited_process import LimitedProcess, LimitError, limit_processor_time
from agentrl.workflow.runtime.warm_processes import Warm
from agentrl.workflow.settings import is_url
from agentrl.workflow.sql.readonly import Table, check_text

MAX_ROWS = 10_000
CPU_SECONDS = 5
MEMORY_BYTES = 1 << 30
WALL_SECONDS = 20.0 * CPU_SECONDS
"""The time limit of a query, in seconds, which stops queries that mostly wait. `CPU_SECONDS` limits the processor time of a
query, and `MEMORY_BYTES` limits the memory of the process.
"""


def read(database: str, query: str, limit: int = MAX_ROWS) -> Table:
    """Run one SELECT in the query process, and return its columns and at most `limit` rows. If `query` is empty, return the
    tables. Raise AccessDenied if the query does more than read, or exceeds the limits. Raise ConfigError if the query is
    invalid. Raise ServiceError if the database does not respond, or its login may do more than read.
    """
    check_text(query)
    if not is_url(database):
        file = Path(database).expanduser().absolute()
        if not (database and file.is_file()):
            from agentrl.workflow.sql.databases import HINT

            raise ServiceError(f"There is no database {database!r}.", HINT)
        database = str(file)
    with readers.one() as reader:
        return reader.ask({"database": database, "query": query, "limit": limit, "seconds": CPU_SECONDS})


class QueryProcess:
    """A child process that runs queries."""

    def __init__(self, module: str = "agentrl.workflow.sql.query_process") -> None:
        """Start a process that runs the module named `module` as a program. The program must call `serve`."""
        self._process = LimitedProcess(module, "reads the database")

    @property
    def alive(self) -> bool:
        return self._process.alive

    def ask(self, request: Mapping[str, Any], seconds: float | None = None) -> Table:
        """Send a query to the process and return its result. Raise the same errors as `read`. After `seconds` (None:
        `WALL_SECONDS`) the process is killed, and AccessDenied is raised.
        """
        try:
            reply = self._process.ask(request, WALL_SECONDS if seconds is None else seconds, _untag_value)
        except LimitError as error:
            raise AccessDenied("The query takes too much work and was stopped.", "Read fewer rows.") from error
        if "error" in reply:
            raise getattr(errors, reply["error"])(reply["message"], reply["hint"])
        return reply["columns"], [tuple(row) for row in reply["rows"]]


readers = Warm(QueryProcess)


# the other end


def main() -> None:
    """Run queries on databases that a model may read."""
    serve(_read_prepared)


def _read_prepared(database: str, query: str, limit: int, seconds: int) -> Table:
    from agentrl.workflow.sql.databases import prepare, read_here

    limit_processor_time(None)
    prepare(database)
    limit_processor_time(seconds)
    return read_here(database, query, limit)


def serve(read: Callable[..., Table]) -> None:
    """Read queries from stdin, and write the results to stdout. Each query is a line with the arguments of `read` as JSON."""
    limited_process.serve(partial(_answer_text, read), MEMORY_BYTES)


def _answer_text(read: Callable[..., Table], request: Mapping[str, Any]) -> str:
    try:
        columns, rows = read(**request)
        return json.dumps({"columns": columns, "rows": rows}, default=_tag_value)
    except MemoryError:
        return _refusal(AccessDenied("The query takes too much memory and was stopped.", "Ask for less at a time."))
    except AgentRLError as error:
        return _refusal(error)


def _refusal(error: AgentRLError) -> str:
    return json.dumps({"error": type(error).__name__, "message": error.message, "hint": error.hint})


def _tag_value(value: bytes | Decimal) -> dict[str, str]:
    return {"bytes": value.hex()} if isinstance(value, bytes) else {"number": str(value)}


def _untag_value(value: dict[str, Any]) -> Any:
    """Decode a value that `_tag_value` encoded."""
    if value.keys() == {"bytes"}:
        return bytes.fromhex(value["bytes"])
    return Decimal(value["number"]) if value.keys() == {"number"} else value


if __name__ == "__main__":
    main()
