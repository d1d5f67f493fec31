"""sql_match: 1.0 if the query in the final answer returns the same rows as the reference, else 0.0 (execution match).

The query is the last ```sql block of the answer, else the text after the last `####`, else the whole text. It runs as in the
tool sql: one read-only SELECT with limited work. Duplicate rows matter. The order of rows matters only if the reference has an
ORDER BY. Column names never matter. Numbers are equal if they agree to nine digits.

The task's metadata has the `database`: a file in `workflow/datasets`, a path, or a postgresql:// URL.
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
    """Return 1.0 if the query returns the rows of the reference, else 0.0. Raise ValueError if the reference does not run, or
    returns no rows. Raise ServiceError if the database does not respond.
    """
    database = str(episode.task.metadata["database"])
    where = database if is_url(database) else str(FOLDER / database)
    reference_rows = _rows(where, episode.task.reference, MAX_ROWS)
    if not reference_rows:
        raise ValueError(f"the reference of task {episode.task.key!r} does not run, or returns no row")
    if episode.stop_reason != "answered":
        return 0.0
    rows = _rows(where, read_query(episode.final_answer), len(reference_rows) + 1)
    return float(rows == reference_rows if ordered(episode.task.reference) else Counter(rows) == Counter(reference_rows))


sql_match.reference_form = "{}"  # type: ignore[attr-defined]


def read_query(text: str) -> str:
    """Return the query that the text gives as its answer."""
    blocks = BLOCK.findall(text)
    return str(blocks[-1]).strip() if blocks else text.rpartition("####")[2].strip()


def ordered(query: str) -> bool:
    """Return True if the query has an ORDER BY outside of its subqueries."""
    bare = QUOTED.sub("''", query)
    while INSIDE.search(bare):
        bare = INSIDE.sub("", bare)
    return ORDERED.search(bare) is not None


def _rows(database: str, query: str, limit: int) -> list[tuple[Any, ...]] | None:
    """Return the rows of the query; None if the query is invalid or not allowed."""
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
