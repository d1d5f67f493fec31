"""The tasks of two evaluations, with an episode of each side to look at."""

from collections.abc import Iterable, Mapping
from typing import Any

from agentrl.workflow.store.driver_reader import among, select_rows, sql_read_transaction

KEY_CHARS = 200
"""The most characters of a task's key, and of its question."""


@sql_read_transaction
def list_first_episodes(tx: Any, first: int, second: int) -> list[Mapping[str, Any]]:
    """Return each task of both evaluations, by their runs' numbers: its key, and the first episode of each that tried it."""
    query = f"""
        SELECT t.id AS task_id, substr(t.key, 1, {KEY_CHARS}) AS task, a.episode AS a_episode, b.episode AS b_episode
        FROM (SELECT task_id, min(id) AS episode FROM episodes WHERE run_id = :first GROUP BY task_id) a
        JOIN (SELECT task_id, min(id) AS episode FROM episodes WHERE run_id = :second GROUP BY task_id) b
          ON b.task_id = a.task_id
        JOIN tasks t ON t.id = a.task_id ORDER BY t.id"""
    return list(select_rows(tx, query, first=first, second=second))


@sql_read_transaction
def load_questions(tx: Any, tasks: Iterable[int]) -> dict[int, str]:
    """Return the beginning of what each of these tasks asks: its last message."""
    query = f"SELECT id, messages FROM tasks WHERE id IN ({among(tasks)})"
    return {row["id"]: _question(row["messages"]) for row in select_rows(tx, query)}


def _question(messages: Any) -> str:
    last = messages[-1] if isinstance(messages, list) and messages else {}
    said = last.get("content") if isinstance(last, dict) else ""
    return said[:KEY_CHARS] if isinstance(said, str) else ""
