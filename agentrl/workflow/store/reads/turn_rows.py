"""The turns of an episode for the page: some steps with their messages, sampled text and calls.

Texts are cut where they are read; beside each, in NAME_chars, is how many characters it has.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.workflow.store.driver_reader import Row, among, select_rows
from agentrl.workflow.store.reads.episode_shape import in_parts
from agentrl.workflow.token_chains import EQUAL

READ_CHARS = 20_001
"""The most characters that are read of a text: one more than is shown of any."""
MAX_ROWS = 20_000
"""The most calls, rewards or annotations that are read at once."""


def cut_column(column: str, name: str = "", most: int = READ_CHARS) -> str:
    """Return the beginning of a text column, and the number of its characters, for a SELECT."""
    name = name or column.rpartition(".")[2]
    return f"substr({column}, 1, {most}) AS {name}, length({column}) AS {name}_chars"


_STEPS = f"""
    SELECT s.id, s.number AS step, p.version AS policy_version, {cut_column("s.thought")}, {cut_column("s.content")},
           {cut_column("s.text")}, {cut_column("s.new_row")}, s.finish_reason,
           s.logprob_sum / nullif(s.sampled_tokens, 0) AS mean_logprob, s.generate_seconds, s.sampled_at, s.observed_at,
           s.request_id, s.prompt, s.asked
    FROM steps s JOIN policies p ON p.id = s.policy_id WHERE s.id IN ({{ids}})"""


def load_steps(tx: Any, ids: Sequence[int]) -> list[Row]:
    """Return the steps of these numbers of rows, by step; `equal` is how many turns say what the step's line says, if several
    do.
    """
    found: list[Mapping[str, Any]] = []
    for some in in_parts(ids):
        found += select_rows(tx, _STEPS.format(ids=among(some)))
    rows = [{**row, "equal": _equal(row["asked"])} for row in found]
    return sorted(rows, key=lambda row: row["step"])


def _equal(asked: Any) -> int | None:
    return asked.get(EQUAL) if isinstance(asked, dict) else None


_CALL_COLUMNS = f"""
    c.id, c.step_id, c.step, c.call, c.tool, c.kind, c.arguments, c.loose, c.status, {cut_column("c.result")}, c.error_class,
    c.starts, c.sends AS attempts, c.seconds, c.cpu_seconds, c.sandbox, c.exit_status, c.exit_code, c.worker, c.created_at,
    c.started_at, c.finished_at"""


def load_calls(tx: Any, ids: Sequence[int]) -> dict[int, list[Row]]:
    """Step -> its calls, of the steps of these numbers of rows."""
    found: dict[int, list[Row]] = {}
    for some in in_parts(ids):
        query = f"""
            SELECT {_CALL_COLUMNS} FROM tool_calls c WHERE c.step_id IN ({among(some)}) AND c.kind <> 'grade'
            ORDER BY c.step, c.call LIMIT {MAX_ROWS}"""
        for row in select_rows(tx, query):
            found.setdefault(row["step"], []).append(_with_queue_seconds(row))
    return found


def load_grades(tx: Any, episode: int, attempt: int) -> list[Row]:
    """Return the calls that judged the episode."""
    query = f"""
        SELECT {_CALL_COLUMNS} FROM tool_calls c WHERE c.episode_id = :id AND c.attempt = :attempt AND c.kind = 'grade'
        ORDER BY c.step, c.call LIMIT {MAX_ROWS}"""
    return [_with_queue_seconds(row) for row in select_rows(tx, query, id=episode, attempt=attempt)]


def _with_queue_seconds(row: Row) -> Row:
    asked, started = row["created_at"], row["started_at"]
    return {**row, "queue_seconds": (started - asked).total_seconds() if started else None}


def load_step_rewards(tx: Any, episode: int, steps: Sequence[int]) -> dict[int, list[Row]]:
    """Return step -> its rewards in every reward set."""
    found: dict[int, list[Row]] = {}
    for some in in_parts(steps):
        query = f"""
            SELECT w.step, s.name AS reward_set, w.part, w.value, w.weight FROM rewards w
            JOIN reward_sets s ON s.id = w.reward_set_id
            WHERE w.episode_id = :id AND w.step IN ({among(some)}) ORDER BY w.id + 0 LIMIT {MAX_ROWS}"""
        for row in select_rows(tx, query, id=episode):
            found.setdefault(row["step"], []).append({name: value for name, value in row.items() if name != "step"})
    return found


def load_annotations(tx: Any, episode: int, attempt: int, steps: Sequence[int], most: int) -> tuple[list[Row], int]:
    """Return what was said of these steps, or, where there are none, of the episode; and how much of it was too much."""
    place = f"a.step IN ({among(steps)})" if steps else "a.step IS NULL"
    of_it = f"FROM annotations a WHERE a.episode_id = :id AND a.attempt = :attempt AND {place}"
    query = f"""
        SELECT a.id, a.step, a.source, a.kind, a.name, a.data, a.seconds, a.created_at {of_it} ORDER BY a.id LIMIT {most + 1}"""
    found = select_rows(tx, query, id=episode, attempt=attempt)
    if len(found) <= most:
        return found, 0
    (count,) = select_rows(tx, f"SELECT count(*) AS n {of_it}", id=episode, attempt=attempt)
    return found[:most], count["n"] - most
