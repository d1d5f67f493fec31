"""sql_match: 1.0 where the query in the final answer gives the same rows as the reference, else 0.0 (execution match).

The query is the last ```sql block of the answer, else what follows its last `####`, else all of it. It runs as the tool sql
runs it: one SELECT that can only read, limited in its work. Rows count as often as they come; their order counts only where
the reference has an ORDER BY of its own, names of columns never. Numbers are the same where they agree to nine digits.

The task's metadata names the `database`: a file of `workflow/datasets`, a path, or a postgresql:// URL.
"""

import re
from collections import Counter
from decimal import Decimal
from typing import Any

from agentrl.workflow.datasets.text_to_sql import FOLDER
from agentrl.workflow.errors import AccessDenied, ConfigError
from agentrl.workflow.settings import is_url
from agentrl.workflow.sql.query_process import MAX_ROWS, read
from agentrl.workflow.trajectory import Episode

BLOCK = re.compile(r"```(?:sql)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
QUOTED = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|--[^\n]*")
INSIDE = re.compile(r"\([^()]*\)")
ORDERED = re.compile(r"\border\s+by\b", re.IGNORECASE)


def sql_match(episode: Episode) -> float:
    """1.0 or 0.0.

    Raises:
        ValueError: the reference does not run, or gives no row.
        ServiceError: the database does not answer.
    """
    database = str(episode.task.metadata["database"])
    where = database if is_url(database) else str(FOLDER / database)
    wanted = _rows(where, episode.task.reference, MAX_ROWS)
    if not wanted:
        raise ValueError(f"the reference of task {episode.task.key!r} does not run, or gives no row")
    if episode.stop_reason != "answered":
        return 0.0
    rows = _rows(where, read_query(episode.final_answer), len(wanted) + 1)
    return float(rows == wanted if ordered(episode.task.reference) else Counter(rows) == Counter(wanted))


sql_match.reference_form = "{}"  # type: ignore[attr-defined]


def read_query(text: str) -> str:
    """Return the query that a text gives as its answer."""
    blocks = BLOCK.findall(text)
    return str(blocks[-1]).strip() if blocks else text.rpartition("####")[2].strip()


def ordered(query: str) -> bool:
    """Return whether the query itself, and not only one inside of it, orders its rows."""
    bare = QUOTED.sub("''", query)
    while INSIDE.search(bare):
        bare = INSIDE.sub("", bare)
    return ORDERED.search(bare) is not None


def _rows(database: str, query: str, limit: int) -> list[tuple[Any, ...]] | None:
    """None where it is no query that may run or does."""
    if not query:
        return None
    try:
        return [tuple(map(_comparable, row)) for row in read(database, query, limit)[1]]
    except (AccessDenied, ConfigError):
        return None


def _comparable(value: Any) -> Any:
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, int | float):
        return float(f"{value:.9g}")
    return value if value is None or isinstance(value, str | bytes) else str(value)  # a list, a JSON: nothing that hashes
