"""The turns of an episode for the page: some steps with their messages, sampled text, calls and tokens, or one full text.

Long texts are cut when they are read. The column NAME_chars has the full length of the text NAME, in characters. The page lists
each cut text with a path. `load_text` reads the full text at that path.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.errors import NotFoundError
from agentrl.workflow.store.driver_reader import Row, among, select_rows
from agentrl.workflow.store.reads.episode_shape import EpisodeShape, in_parts, load_shape
from agentrl.workflow.store.row_codecs import RemovedTokens, unpack
from agentrl.workflow.tables.step_values import CONTENT, FINAL_ANSWER, JOIN_PROMPT, JOIN_PROMPT_IDS, PROMPT, PROMPT_IDS, THOUGHT
from agentrl.workflow.tables.views import AnnotationRow, CallRow
from agentrl.workflow.token_chains import EQUAL

READ_CHARS = 20_001
"""The maximum number of characters that are read of a text. It is one more than is shown, so the caller can see that the text
is longer.
"""
MAX_ROWS = 20_000
"""The maximum number of calls, rewards or annotations that are read at once."""


def cut_column(column: str, name: str = "", max_chars: int = READ_CHARS) -> str:
    """Return the SQL for the first `max_chars` characters of a text column and for the length of the full text."""
    name = name or column.rpartition(".")[2]
    return f"substr({column}, 1, {max_chars}) AS {name}, length({column}) AS {name}_chars"


_STEPS = f"""
    SELECT s.id, s.number AS step, p.version AS policy_version, {cut_column(THOUGHT, "thought")},
           {cut_column(CONTENT, "content")},
           {cut_column("s.text")}, {cut_column("s.new_row")}, s.finish_reason,
           s.logprob_sum / nullif(s.sampled_tokens, 0) AS mean_logprob, s.generate_seconds, s.sampled_at, s.observed_at,
           s.request_id, {PROMPT} AS prompt, s.asked
    FROM steps s JOIN policies p ON p.id = s.policy_id {JOIN_PROMPT} WHERE s.id IN ({{ids}})"""


def load_steps(tx: Any, ids: Sequence[int]) -> list[Row]:
    """Return the steps with these row ids, ordered by step number.

    If a step could continue several earlier turns, `equal` is the number of these turns; else `equal` is None.
    """
    steps: list[Mapping[str, Any]] = []
    for some in in_parts(ids):
        steps += select_rows(tx, _STEPS.format(ids=among(some)))
    rows = [{**row, "equal": _equal(row["asked"])} for row in steps]
    return sorted(rows, key=lambda row: row["step"])


def _equal(options: Any) -> int | None:
    return options.get(EQUAL) if isinstance(options, dict) else None


CALL_FIELDS = tuple(name for name in CallRow.COLUMNS if name not in ("run", "iteration", "episode_id", "effects"))
"""The columns of a call that the page shows: those of `v_tool_calls` without `effects` and without the columns that are the
same for all calls of the episode.
"""
_READ_OTHERWISE = {"result": cut_column("c.result"), "queue_seconds": ""}
_CALL_COLUMNS = "c.step_id, " + ", ".join(
    column for name in CALL_FIELDS if (column := _READ_OTHERWISE.get(name, f"{CallRow.COLUMNS[name].sql} AS {name}"))
)


def load_calls(tx: Any, ids: Sequence[int]) -> dict[int, list[Row]]:
    """Return the calls of the steps with these row ids, by step number."""
    calls: dict[int, list[Row]] = {}
    for some in in_parts(ids):
        query = f"""
            SELECT {_CALL_COLUMNS} FROM tool_calls c WHERE c.step_id IN ({among(some)}) AND c.kind <> 'grade'
            ORDER BY c.step, c.call LIMIT {MAX_ROWS}"""
        for row in select_rows(tx, query):
            calls.setdefault(row["step"], []).append(_with_queue_seconds(row))
    return calls


def load_grades(tx: Any, episode: int, attempt: int) -> list[Row]:
    """Return the calls that judged the episode."""
    query = f"""
        SELECT {_CALL_COLUMNS} FROM tool_calls c WHERE c.episode_id = :id AND c.attempt = :attempt AND c.kind = 'grade'
        ORDER BY c.step, c.call LIMIT {MAX_ROWS}"""
    return [_with_queue_seconds(row) for row in select_rows(tx, query, id=episode, attempt=attempt)]


def _with_queue_seconds(row: Row) -> Row:
    created, started = row["created_at"], row["started_at"]
    return {**row, "queue_seconds": (started - created).total_seconds() if started else None}


def load_step_rewards(tx: Any, episode: int, steps: Sequence[int]) -> dict[int, list[Row]]:
    """Return the rewards of each step in all reward sets, by step number."""
    rewards: dict[int, list[Row]] = {}
    for some in in_parts(steps):
        query = f"""
            SELECT w.step, s.name AS reward_set, w.part, w.value, w.weight FROM rewards w
            JOIN reward_sets s ON s.id = w.reward_set_id
            WHERE w.episode_id = :id AND w.step IN ({among(some)}) ORDER BY w.id + 0 LIMIT {MAX_ROWS}"""
        for row in select_rows(tx, query, id=episode):
            rewards.setdefault(row["step"], []).append({name: value for name, value in row.items() if name != "step"})
    return rewards


ANNOTATION_FIELDS = tuple(name for name in AnnotationRow.COLUMNS if name not in ("run", "iteration", "episode_id", "attempt"))
"""The columns of an annotation that the page shows: those of `v_annotations` without the columns that are the same for the
whole episode.
"""


def load_annotations(tx: Any, episode: int, attempt: int, steps: Sequence[int], max_rows: int) -> tuple[list[Row], int]:
    """Return at most `max_rows` annotations, and the number of those that are left out.

    They are the annotations of the steps in `steps` or, if `steps` is empty, those of the whole episode.
    """
    place = f"a.step IN ({among(steps)})" if steps else "a.step IS NULL"
    of_it = f"FROM annotations a WHERE a.episode_id = :id AND a.attempt = :attempt AND {place}"
    query = f"SELECT {', '.join(f'a.{name}' for name in ANNOTATION_FIELDS)} {of_it} ORDER BY a.id LIMIT {max_rows + 1}"
    annotations = select_rows(tx, query, id=episode, attempt=attempt)
    if len(annotations) <= max_rows:
        return annotations, 0
    (count,) = select_rows(tx, f"SELECT count(*) AS n {of_it}", id=episode, attempt=attempt)
    return annotations[:max_rows], count["n"] - max_rows


TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The packed tokens of a step: its new prompt tokens, its sampled tokens, and the logprobs of the sampled tokens."""

    prompt_ids: bytes
    sampled_ids: bytes
    logprobs: bytes


def find_removed_tokens(tx: Any, steps: Sequence[int]) -> RemovedTokens | None:
    """Return the first run whose tokens were removed, among the runs of the steps with these row ids; None if there is none."""
    for some in in_parts(steps):
        query = f"""
            SELECT r.name, r.tokens_removed_at FROM runs r WHERE r.tokens_removed_at IS NOT NULL
            AND r.name IN (SELECT s.run FROM steps s WHERE s.id IN ({among(some)})) ORDER BY r.id LIMIT 1"""
        for row in select_rows(tx, query):
            return RemovedTokens(row["name"], row["tokens_removed_at"])
    return None


def load_tokens(tx: Any, steps: Sequence[int]) -> dict[int, StepTokens]:
    """Return the tokens of each step, by the id of the step's row. Raise StateError if the tokens of one were removed."""
    if removed := find_removed_tokens(tx, steps):
        raise removed.error()
    return read_tokens(tx, steps)


def read_tokens(tx: Any, steps: Sequence[int]) -> dict[int, StepTokens]:
    """Return the tokens of each step like `load_tokens`. None of the tokens may have been removed."""
    tokens: dict[int, StepTokens] = {}
    for some in in_parts(steps):
        query = f"""
            SELECT s.id, {PROMPT_IDS} AS prompt_ids, t.sampled_ids, t.behavior_logprobs
            FROM steps s JOIN step_tokens t ON t.step_id = s.id {JOIN_PROMPT_IDS} WHERE s.id IN ({among(some)})"""
        for row in select_rows(tx, query):
            columns = (bytes(row[name]) for name in ("prompt_ids", "sampled_ids", "behavior_logprobs"))
            tokens[row["id"]] = StepTokens(*columns)
    return tokens


def unpack_ids(packed: bytes, first: int, last: int) -> list[int]:
    """Unpack the token ids from position `first` up to, but not including, `last`."""
    return unpack("i", packed[first * TOKEN_BYTES : last * TOKEN_BYTES])


MAX_PATH = 200
"""The maximum length of a path, in characters."""
_OF_STEPS = {"thought": THOUGHT, "content": CONTENT, "text": "s.text", "new_row": "s.new_row"}
_OF_AGENTS = ("error", "output", "answer")
_OF_EPISODES = {"final_answer": FINAL_ANSWER, "error": "e.error"}
_OF_MESSAGES = ("content", "thought", "tool_calls")


def load_text(tx: Any, episode: int, path: str) -> str:
    """Return the full text (or JSON) at the path. Raise NotFoundError if the episode or text is missing."""
    shape = load_shape(tx, episode)
    value = _find(tx, shape, path.split("/")) if len(path) <= MAX_PATH else None
    if value is None:
        raise NotFoundError(
            f"Episode {episode} has no text at the path {path[:60]!r}.",
            "Valid paths are the values of the fields named `of` in the JSON of the episode.",
        )
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _find(tx: Any, shape: EpisodeShape, path: list[str]) -> Any:
    match path:
        case ["episode", name] if name in _OF_EPISODES:
            return _column(tx, f"SELECT {_OF_EPISODES[name]} AS found FROM episodes e WHERE e.id = :id", id=shape.id)
        case ["task", "reference"]:
            return _column(tx, "SELECT reference AS found FROM tasks WHERE id = :id", id=shape.task_id)
        case ["task", "messages", place, name] if name in _OF_MESSAGES:
            rows = select_rows(tx, "SELECT messages FROM tasks WHERE id = :id", id=shape.task_id)
            return _of_message(rows[0]["messages"], place, name)
        case ["agent", name] if name in _OF_AGENTS:
            query = f"""
                SELECT {name} AS found FROM agent_attempts WHERE episode_id = :id AND attempt = :attempt
                ORDER BY id DESC LIMIT 1"""
            return _column(tx, query, id=shape.id, attempt=shape.attempt)
        case ["steps", step, name] if name in _OF_STEPS:
            return _column(tx, f"SELECT {_OF_STEPS[name]} AS found FROM steps s WHERE s.id = :id", id=_step_id(shape, step))
        case ["steps", step, "messages", place, name] if name in _OF_MESSAGES:
            query = f"SELECT {PROMPT} AS prompt FROM steps s {JOIN_PROMPT} WHERE s.id = :id"
            rows = select_rows(tx, query, id=_step_id(shape, step))
            return _of_message(rows[0]["prompt"], place, name) if rows else None
        case ["calls", call, name] if name in ("arguments", "result"):
            return _of_call(tx, shape, _number(call), name)
        case ["annotations", number, "data"]:
            query = "SELECT data FROM annotations WHERE id = :number AND episode_id = :id"
            rows = select_rows(tx, query, number=_number(number), id=shape.id)
            return rows[0]["data"] if rows else None
    return None


def _column(tx: Any, query: str, **parameters: Any) -> str | None:
    rows = select_rows(tx, query, **parameters)
    return rows[0]["found"] if rows else None


def _number(word: str) -> int:
    """Parse a number in a path. If it is invalid, return -1, which matches no row and no position."""
    return int(word) if len(word) <= 18 and word.isascii() and word.isdigit() else -1


def _step_id(shape: EpisodeShape, step: str) -> int:
    return next(iter(shape.step_ids([_number(step)])), -1)


def _of_message(messages: Any, place: str, name: str) -> Any:
    number = _number(place)
    if not isinstance(messages, list) or not 0 <= number < len(messages) or not isinstance(messages[number], dict):
        return None
    value = messages[number].get(name)
    return value if value is None or name == "tool_calls" else str(value)


def _of_call(tx: Any, shape: EpisodeShape, call: int, name: str) -> Any:
    """Return a column of a call; None if the episode neither has nor inherits the call."""
    query = f"SELECT episode_id, step_id, {name} FROM tool_calls WHERE id = :id"
    rows = select_rows(tx, query, id=call)
    if not rows or (rows[0]["episode_id"] != shape.id and rows[0]["step_id"] not in {row["id"] for row in shape.rows}):
        return None
    return rows[0][name]
