"""Evidence: a list of episodes with the facts that show what happened in each: the question, the answer, the parts of the
reward, the error of the failed call, and the episode's outcome. The web page and the terminal show the same columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentrl.workflow.store.driver_reader import Row, among, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.episode_rows import EpisodeFilter, check_names, count_episodes, list_episodes
from agentrl.workflow.store.reads.eval_results import load_questions
from agentrl.workflow.store.reads.group_rows import load_sibling_fates, load_sibling_parts
from agentrl.workflow.store.reads.iteration_rows import find_iteration
from agentrl.workflow.store.reads.paging import Paging, select_values
from agentrl.workflow.store.reads.run_rows import run_id_and_name
from agentrl.workflow.store.reads.turn_rows import cut_column
from agentrl.workflow.tables.views import EpisodeRow

ERROR_CHARS = 400
"""The most characters of a failed call's result in the list."""


class EvidenceColumn(NamedTuple):
    """A column of the list: its title, its meaning, and the name of the order by this column (see
    `episode_rows.EPISODE_ORDERS`).
    """

    title: str
    meaning: str
    sort: str


COLUMNS: Mapping[str, EvidenceColumn] = {
    "id": EvidenceColumn("episode", "the episode's number", "id"),
    "iteration": EvidenceColumn("iteration", "the iteration's number, from 1", "iteration"),
    "question": EvidenceColumn("question", "the last message of the task", "question"),
    "answer": EvidenceColumn("answer", "the final answer", "answer"),
    "reference": EvidenceColumn("reference", "the task's reference", "reference"),
    "reward": EvidenceColumn("reward", "the reward and its parts", "reward"),
    "advantage": EvidenceColumn("advantage", "how much better the episode is than its group", "advantage"),
    "failed_call": EvidenceColumn(
        "error", "the episode's error, or that of its first failed call; (+2): it has two more", "errors"
    ),
    "fate": EvidenceColumn("fate", "the episode's status, and whether an update trained on it", "status"),
    "steps": EvidenceColumn("turns", "turns of the policy", "steps"),
    "calls": EvidenceColumn("calls", "tool calls", "calls"),
    "tokens": EvidenceColumn("tokens", "tokens sampled", "tokens"),
    "seconds": EvidenceColumn("took", "seconds from its start to its end", "seconds"),
}
"""The columns of the list, in their order."""


EVIDENCE_FIELDS = (*EpisodeRow.COLUMNS, "task_id", "question", "parts", "failed_call", "more_errors", "fate")
"""The fields of an episode in the list."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A page of a list of episodes with their evidence.

    Args:
        rows: the columns of `EpisodeRow`, with `task_id`, `question`, `parts` (part, value and weight of each part of the
            reward), `failed_call` (tool, error_class and the beginning of the first failed call's result; None if no call
            failed), `more_errors` (the number of errors besides the episode's own error or, if it has none, besides that of
            its first failed call) and `fate` (the episode's status, and whether an update trained on it).
        next: the cursor of the following page; empty on the last page.
        searched: the number of episodes that were checked for this page; None if the filter needs no search.
        total: the number of episodes that the complete search checks; None if the filter needs no search.
    """

    rows: Sequence[Mapping[str, Any]]
    next: str
    searched: int | None
    total: int | None


@sql_read_transaction
def list_evidence(tx: Any, chosen: EpisodeFilter, paging: Paging | None = None) -> Evidence:
    """Return a page of `list_episodes` as evidence. Raise NotFoundError if no episode matches because the run does not have the
    iteration, the task or the group that the filter names.
    """
    page = list_episodes(tx, chosen, paging)
    if not (page.rows or page.next):
        check_names(tx, chosen)
    is_whole = not (page.next or (paging and (paging.cursor or paging.offset)))
    total = page.searched if is_whole or page.searched is None else count_episodes(tx, chosen)
    return Evidence(add_evidence(tx, run_id_and_name(tx, chosen.run)["name"], page.rows), page.next, page.searched, total)


def add_evidence(tx: Any, run: str, rows: Sequence[EpisodeRow]) -> list[dict[str, Any]]:
    """Return the episodes of a run with the fields of `Evidence.rows`. Call this inside a transaction."""
    ids = [row.id for row in rows]
    query = f"SELECT id, task_id FROM episodes WHERE id IN ({among(ids)})"
    tasks = {row["id"]: row["task_id"] for row in select_rows(tx, query)}
    questions, calls = (
        load_questions(tx, {*tasks.values()}),
        _load_failed_calls(tx, [row.id for row in rows if row.tool_errors]),
    )
    parts, fates = load_sibling_parts(tx, ids), load_sibling_fates(tx, run, ids)
    return [
        {
            **row,
            "task_id": tasks[row.id],
            "question": questions.get(tasks[row.id], ""),
            "parts": [part for part in parts.get(row.id, ()) if part["reward_set"] == "default"],
            "failed_call": calls.get(row.id),
            "more_errors": max(0, row.tool_errors - (not row.error)),
            "fate": fates.get(row.id),
        }
        for row in rows
    ]


def _load_failed_calls(tx: Any, episodes: Sequence[int]) -> dict[int, Row]:
    query = f"""
        SELECT c.episode_id, c.step, c.tool, c.error_class, {cut_column("result", max_chars=ERROR_CHARS)} FROM tool_calls c
        WHERE c.id IN (SELECT min(f.id) FROM episodes e JOIN tool_calls f ON f.episode_id = e.id AND f.attempt = e.attempt
                       WHERE e.id IN ({among(episodes)}) AND f.error_class IS NOT NULL AND f.kind <> 'grade' GROUP BY e.id)"""
    return {row["episode_id"]: row for row in select_rows(tx, query)}


@sql_read_transaction
def count_error_classes(tx: Any, run: str, iteration: int | None = None) -> list[Row]:
    """Return the classes of errors of a run's calls and episodes, the most frequent first. `iteration` (counted from 1) selects
    one iteration. Raise NotFoundError if there is no such run or iteration.

    Each row has `error_class`, `tool`, the number of `errors`, and the number of `episodes` with such an error. `tool` is None
    if the episode itself failed, and empty if the call could not be parsed.
    """
    run_row = run_id_and_name(tx, run)
    if iteration is not None:
        find_iteration(tx, run_row, iteration)
    args: dict[str, Any] = {"run_id": run_row["id"]} | ({} if iteration is None else {"number": iteration - 1})
    numbers = "" if iteration is None else " AND i.number = :number"
    episodes = f"iterations i JOIN episodes e ON e.iteration_id = i.id WHERE i.run_id = :run_id{numbers}"
    query = f"""
        SELECT c.error_class, c.tool, count(*) AS errors, count(DISTINCT c.episode_id) AS episodes
        FROM (SELECT e.id, e.attempt FROM {episodes} AND e.tool_errors > 0) e
        JOIN tool_calls c ON c.episode_id = e.id AND c.attempt = e.attempt
        WHERE c.error_class IS NOT NULL AND c.kind <> 'grade' GROUP BY c.error_class, c.tool
        UNION ALL
        SELECT e.error_class, CAST(NULL AS TEXT), count(*), count(*) FROM {episodes} AND e.error_class <> ''
        GROUP BY e.error_class
        ORDER BY 3 DESC, 1, 2 LIMIT 50"""
    return select_rows(tx, query, **args)


EXAMPLES = 3
"""The number of episodes of each kind in the examples of a run."""


@sql_read_transaction
def load_run_examples(tx: Any, run: str) -> dict[str, list[dict[str, Any]]]:
    """Return the `best` and the `worst` EXAMPLES episodes of the run's newest iteration that has rewards, at most one episode
    per task in each list.
    """
    run_row = run_id_and_name(tx, run)
    query = """
        SELECT e.id, e.task_id FROM episodes e WHERE e.status = 'done' AND e.iteration_id = (
          SELECT max(i.id) FROM iterations i WHERE i.run_id = :id AND i.mean_reward IS NOT NULL)
        ORDER BY e.reward {way}, e.id"""
    ids: dict[str, list[int]] = {}
    for name, way in (("best", "DESC"), ("worst", "ASC")):
        by_task: dict[int, int] = {}
        for row in select_rows(tx, query.format(way=way), id=run_row["id"]):
            by_task.setdefault(row["task_id"], row["id"])
        ids[name] = [*by_task.values()][:EXAMPLES]
    rows = load_evidence(tx, run_row["name"], [id for its in ids.values() for id in its])
    return {name: [rows[id] for id in its] for name, its in ids.items()}


def load_evidence(tx: Any, run: str, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return episodes of a run as evidence, by id. Call this inside a transaction."""
    rows = select_values(tx, EpisodeRow, f"WHERE id IN ({among(ids)})")
    return {row["id"]: row for row in add_evidence(tx, run, rows)}
