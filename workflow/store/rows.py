"""Rows to values and back: packed token arrays, messages, whole episodes with their steps."""

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, select

from workflow import db
from workflow.errors import NotFoundError
from workflow.rewards import Part
from workflow.trajectory import Episode, Message, Step, Task, ToolCall, ToolResult

MAX_ID = 2**63 - 1
"""No database takes a greater number."""

AT_ONCE = 500
"""Values in one query: a database takes only so many (SQLite 32,766)."""

T = TypeVar("T")


def in_parts(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """The values in parts of AT_ONCE."""
    return (values[start : start + AT_ONCE] for start in range(0, len(values), AT_ONCE))


def episode_row(tx: Connection, episode: int, locked: bool = False) -> Mapping[Any, Any]:
    """The episode's row, `locked` against others until the transaction ends.

    Raises:
        NotFoundError: there is none.
    """
    query = select(db.episodes).where(db.episodes.c.id == episode)
    query = query.with_for_update() if locked else query
    row = tx.execute(query).mappings().one_or_none() if abs(episode) <= MAX_ID else None
    if row is None:
        raise NotFoundError(f"There is no episode {episode}.", "List them with `agentrl episodes RUN`.")
    return row


def load_episodes(tx: Connection, condition: Any, tasks: Mapping[int, Task]) -> tuple[Episode, ...]:
    """The episodes that meet the condition with the steps of their current attempt, in order of group and sample.

    A fork's first steps are read through its parent, whose task is the same.
    """
    order = (db.episodes.c.group_id, db.episodes.c.sample)
    rows = tx.execute(select(db.episodes).where(condition).order_by(*order)).mappings().all()
    steps = _load_steps(tx, condition) if any(row["steps"] for row in rows) else {}
    inherited = _inherited(tx, rows, tasks)
    return tuple(
        Episode(
            task=tasks[row["task_id"]],
            sample=row["sample"],
            steps=(*inherited.get(row["id"], ()), *steps.get(row["id"], ())),
            status=row["status"],
            stop_reason=row["stop_reason"],
            reward=row["reward"],
            id=row["id"],
            error=row["error"],
            parent_id=row["parent_id"],
            fork_step=row["fork_step"] or 0,
            inherited=row["inherited_steps"],
            tainted=row["tainted"],
        )
        for row in rows
    )


def _inherited(tx: Connection, rows: Sequence[Mapping[Any, Any]], tasks: Mapping[int, Task]) -> dict[int, tuple[Step, ...]]:
    ids = {row["parent_id"] for row in rows if row["parent_id"] is not None}
    parents = {parent.id: parent for parent in load_episodes(tx, db.episodes.c.id.in_(ids), tasks)} if ids else {}
    return {
        row["id"]: parents[row["parent_id"]].steps[: row["inherited_steps"]] for row in rows if row["parent_id"] is not None
    }


def _load_steps(tx: Connection, condition: Any) -> dict[int, list[Step]]:
    of_attempt = (db.episodes.c.id == db.steps.c.episode_id) & (db.episodes.c.attempt == db.steps.c.attempt)
    rows = tx.execute(
        select(db.steps, db.step_tokens.c.prompt_ids, db.step_tokens.c.sampled_ids, db.step_tokens.c.behavior_logprobs)
        .add_columns(db.policies.c.version)
        .join(db.episodes, of_attempt)
        .join(db.step_tokens, db.step_tokens.c.step_id == db.steps.c.id)
        .join(db.policies, db.policies.c.id == db.steps.c.policy_id)
        .where(condition)
        .order_by(db.steps.c.episode_id, db.steps.c.number)
    ).mappings()
    calls = _load_calls(tx, condition)
    found: dict[int, list[Step]] = {}
    for row in rows:
        made = calls.get(row["id"], [])
        found.setdefault(row["episode_id"], []).append(_step_value(row, made))
    return found


def _load_calls(tx: Connection, condition: Any) -> dict[int, list[Any]]:
    rows = tx.execute(
        select(db.tool_calls)
        .join(db.episodes, db.episodes.c.id == db.tool_calls.c.episode_id)
        .where(condition, db.tool_calls.c.kind != "grade")  # with = Postgres expects few calls, and reads all of them first
        .order_by(db.tool_calls.c.step_id, db.tool_calls.c.call)
    )
    found: dict[int, list[Any]] = {}
    for row in rows:
        found.setdefault(row.step_id, []).append(row)
    return found


def _step_value(row: Mapping[Any, Any], calls: Sequence[Any]) -> Step:
    made = tuple(
        ToolCall(call.tool, call.arguments, call.result if call.error_class == "parse_error" else None) for call in calls
    )
    results = tuple(ToolResult(call.result or "", call.error_class, call.seconds) for call in calls)
    return Step(
        index=row["number"],
        prompt=tuple(message_value(message) for message in row["prompt"]),
        prompt_ids=tuple(unpack("i", row["prompt_ids"])),
        sampled_ids=tuple(unpack("i", row["sampled_ids"])),
        behavior_logprobs=tuple(unpack("f", row["behavior_logprobs"])),
        finish_reason=row["finish_reason"],
        message=Message("assistant", row["content"], row["thought"], made),
        policy_version=row["version"],
        seconds=row["generate_seconds"],
        results=results if row["observed_at"] is not None else None,
        new_row=row["new_row"],
    )


def members_of(iteration: int) -> ColumnElement[bool]:
    """The condition on `episodes`: those of the iteration, its own or those of the stored groups that it trains on."""
    # One condition for both: with an OR of two Postgres would read every episode.
    own = select(db.groups.c.id).where(db.groups.c.iteration_id == iteration)
    stored = select(db.iteration_groups.c.group_id).where(db.iteration_groups.c.iteration_id == iteration)
    return db.episodes.c.group_id.in_(own.union_all(stored))


def task_value(row: Mapping[Any, Any]) -> Task:
    """The task of a row that carries the tasks columns."""
    return Task(row["key"], tuple(message_value(m) for m in row["messages"]), row["reference"], row["metadata"])


def message_value(row: Mapping[str, str]) -> Message:
    """The message of a JSON column."""
    return Message(row["role"], row["content"], name=row.get("name", ""))  # type: ignore[arg-type]


def message_row(message: Message) -> dict[str, str]:
    """The message as a JSON column holds it."""
    row = {"role": message.role, "content": clean(message.content)}
    return row | {"name": message.name} if message.name else row


def reward_rows(parts: Mapping[str, Part]) -> list[dict[str, Any]]:
    """Part, step and value of each row that the parts take: one, or one for each step."""
    return [
        {"part": name, "step": step, "value": value}
        for name, part in parts.items()
        for step, value in ([(db.WHOLE, part)] if isinstance(part, float) else enumerate(part))
    ]


def part_values(rows: Iterable[Any]) -> dict[str, Part]:
    """The parts of an episode's rows of one set, which name part, step and value; in the order of the rows."""
    parts: dict[str, Part] = {}
    for row in rows:
        before = parts.get(row.part, ())
        parts[row.part] = row.value if row.step == db.WHOLE else (*(before if isinstance(before, tuple) else ()), row.value)
    return parts


def clean(text: str) -> str:
    """The text as every database can hold it: NUL and lone surrogates replaced (the exact tokens are kept beside)."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def clean_tree(value: Any) -> Any:
    """A JSON value whose strings and numbers every database can hold."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(str(key)): clean_tree(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [clean_tree(item) for item in value]
    return value


def pack(kind: str, values: Iterable[float]) -> bytes:
    """Little-endian int32 (`i`) or float32 (`f`), 4 bytes a value."""
    numbers = tuple(values)
    return struct.pack(f"<{len(numbers)}{kind}", *numbers)


def unpack(kind: str, blob: bytes) -> list[Any]:
    """The values of a blob made by `pack`."""
    return list(struct.unpack(f"<{len(blob) // 4}{kind}", blob))
