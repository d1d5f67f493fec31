"""A person's SELECT over a SQLite store, in a process that may be killed: `read_apart` asks, `main` answers."""

from pathlib import Path

from agentrl.workflow.runtime.warm_processes import Warm
from agentrl.workflow.sql.query_process import QueryProcess, limit_processor_time, serve
from agentrl.workflow.sql.readonly import Table
from agentrl.workflow.store.reads.user_sql import query_sqlite

MODULE = "agentrl.workflow.store.reads.user_sql_process"
MAX_CHARS = 32_000_000
"""The most characters and bytes of an answer."""
GRACE_SECONDS = 2.0
"""Past its time a query ends by itself, unless it is within one long instruction."""
readers = Warm(lambda: QueryProcess(MODULE))


def read_apart(file: Path, query: str, limit: int, seconds: float) -> Table:
    """The columns and at most `limit` rows. Raises as `user_sql.run_query` does."""
    asked = {"file": str(file.absolute()), "query": query, "limit": limit, "seconds": seconds}
    with readers.one() as reader:
        return reader.ask(asked, seconds + GRACE_SECONDS)


def main() -> None:
    """Answers queries."""
    serve(_read)


def _read(file: str, query: str, limit: int, seconds: float) -> Table:
    limit_processor_time(int(seconds) + 1)
    return query_sqlite(Path(file), query, limit, seconds, MAX_CHARS)


if __name__ == "__main__":
    main()
