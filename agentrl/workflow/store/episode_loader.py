"""Functions that load episodes with their steps. `row_codecs` converts single rows."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, func, null, select

from agentrl.workflow.store.row_codecs import (
    MAX_ID,
    clean_tree,
    episode_value,
    message_row,
    message_value,
    no_episode_error,
    pack,
    part_values,
    reward_rows,
    step_value,
    task_value,
    unpack,
)
from agentrl.workflow.store.stored_tokens import check_tokens
from agentrl.workflow.tables import schema
from agentrl.workflow.trajectory import Episode, Step, Task

__all__ = [
    "MAX_ID", "clean_tree", "episode_row", "load_episodes", "members_of", "message_row", "message_value", "pack",
    "part_values", "reward_rows", "split_in_parts", "task_value", "unpack",
]  # fmt: skip

PART_SIZE = 500
"""The maximum number of values in one query. Databases have limits (SQLite: 32,766)."""

_PROMPT_STEPS, _PROMPT_TOKENS = schema.steps.alias("prompt_step"), schema.step_tokens.alias("prompt_tokens")
_STEP_COLUMNS = [
    *(column for column in schema.steps.c if column.name != "prompt"),
    func.coalesce(_PROMPT_STEPS.c.prompt, schema.steps.c.prompt).label("prompt"),
]
_TOKEN_COLUMNS = [
    func.coalesce(_PROMPT_TOKENS.c.prompt_ids, schema.step_tokens.c.prompt_ids).label("prompt_ids"),
    schema.step_tokens.c.sampled_ids,
    schema.step_tokens.c.behavior_logprobs,
]

T = TypeVar("T")


def split_in_parts(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split the values into parts of at most PART_SIZE."""
    return (values[start : start + PART_SIZE] for start in range(0, len(values), PART_SIZE))


def episode_row(tx: Connection, episode: int, locked: bool = False) -> Mapping[Any, Any]:
    """Return the episode's row, locked if `locked`. Raise NotFoundError if there is no such episode."""
    query = select(schema.episodes).where(schema.episodes.c.id == episode)
    query = query.with_for_update() if locked else query
    row = tx.execute(query).mappings().one_or_none() if abs(episode) <= MAX_ID else None
    if row is None:
        raise no_episode_error(episode)
    return row


def load_episodes(tx: Connection, condition: Any, tasks: Mapping[int, Task], with_tokens: bool = True) -> tuple[Episode, ...]:
    """Return the episodes that meet the condition, with the steps of their current attempt, ordered by group and sample number.

    The first steps of a fork are read from its parent, which has the same task. Raise StateError if the tokens of one of these
    episodes or parents were removed.

    Args:
        condition: an SQL condition on `episodes`.
        tasks: the tasks of these episodes, by id.
        with_tokens: False for a caller that reads only texts. All token ids and logprobs are then 0.
    """
    order = (schema.episodes.c.group_id, schema.episodes.c.sample)
    rows = tx.execute(select(schema.episodes).where(condition).order_by(*order)).mappings().all()
    sampled = any(row["steps"] for row in rows)
    if with_tokens and sampled:
        check_tokens(tx, condition)
    inherited = _load_inherited_steps(tx, rows, tasks, with_tokens)
    current = schema.episodes.c.attempt == schema.steps.c.attempt
    steps = _load_steps(tx, condition, current, inherited, with_tokens) if sampled else {}
    by_episode = {episode: own for (episode, _), own in steps.items()}
    return tuple(
        episode_value(row, tasks[row["task_id"]], by_episode.get(row["id"], inherited.get(row["id"], ()))) for row in rows
    )


def load_earlier_attempts(tx: Connection, episode: Episode, first: int, last: int) -> dict[int, tuple[Step, ...]]:
    """Return the steps of the episode's attempts from `first` to `last`, both included, by the attempt's number. Each value
    begins with the steps that a fork inherits.
    """
    inherited = {episode.id: episode.steps[: episode.inherited]}
    steps = _load_steps(tx, schema.episodes.c.id == episode.id, schema.steps.c.attempt.between(first, last), inherited)
    return {attempt: tuple(own) for (_, attempt), own in steps.items()}


def _load_inherited_steps(
    tx: Connection, rows: Sequence[Mapping[Any, Any]], tasks: Mapping[int, Task], with_tokens: bool
) -> dict[int, tuple[Step, ...]]:
    forks = [row for row in rows if row["inherited_steps"]]
    ids = {row["parent_id"] for row in forks}
    loaded = load_episodes(tx, schema.episodes.c.id.in_(ids), tasks, with_tokens) if ids else ()
    parents = {parent.id: parent for parent in loaded}
    return {row["id"]: parents[row["parent_id"]].steps[: row["inherited_steps"]] for row in forks}


def _load_steps(
    tx: Connection, condition: Any, attempts: Any, inherited: Mapping[int, tuple[Step, ...]], with_tokens: bool = True
) -> dict[tuple[int, int], list[Step]]:
    """Return the steps by (episode, attempt), each list with the inherited steps first, whose messages later ones may share.

    `condition` is an SQL condition on `episodes`, and `attempts` is one on the attempt of the steps.
    """
    tokens = [column if with_tokens else null().label(column.name) for column in _TOKEN_COLUMNS]
    query = (
        select(*_STEP_COLUMNS, schema.policies.c.version, *tokens)
        .join(schema.episodes, (schema.episodes.c.id == schema.steps.c.episode_id) & attempts)
        .join(schema.policies, schema.policies.c.id == schema.steps.c.policy_id)
        .outerjoin(_PROMPT_STEPS, _PROMPT_STEPS.c.id == schema.steps.c.prompt_step_id)
        .where(condition)
        .order_by(schema.steps.c.episode_id, schema.steps.c.attempt, schema.steps.c.number)
    )
    if with_tokens:
        query = query.join(schema.step_tokens, schema.step_tokens.c.step_id == schema.steps.c.id)
        query = query.outerjoin(_PROMPT_TOKENS, _PROMPT_TOKENS.c.step_id == schema.steps.c.prompt_step_id)
    rows = tx.execute(query).mappings()
    calls = _load_calls(tx, condition)
    steps: dict[tuple[int, int], list[Step]] = {}
    for row in rows:
        before = steps.setdefault((row["episode_id"], row["attempt"]), list(inherited.get(row["episode_id"], ())))
        before.append(step_value(row, row["version"], calls.get(row["id"], []), before))
    return steps


def _load_calls(tx: Connection, condition: Any) -> dict[int, list[Any]]:
    rows = tx.execute(
        select(schema.tool_calls)
        .join(schema.episodes, schema.episodes.c.id == schema.tool_calls.c.episode_id)
        .where(condition, schema.tool_calls.c.kind != "grade")  # with = Postgres expects few calls, and reads all of them first
        .order_by(schema.tool_calls.c.step_id, schema.tool_calls.c.call)
    ).mappings()
    calls: dict[int, list[Any]] = {}
    for row in rows:
        calls.setdefault(row["step_id"], []).append(row)
    return calls


def members_of(iteration: int) -> ColumnElement[bool]:
    """Return the SQL condition for the episodes of an iteration.

    These are the episodes of the groups that the iteration sampled, and of the stored groups that it trains on.
    """
    # One condition for both: with an OR of two Postgres would read every episode.
    own = select(schema.groups.c.id).where(schema.groups.c.iteration_id == iteration)
    stored = select(schema.iteration_groups.c.group_id).where(schema.iteration_groups.c.iteration_id == iteration)
    return schema.episodes.c.group_id.in_(own.union_all(stored))
