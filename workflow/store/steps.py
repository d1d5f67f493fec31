"""A step is two transactions. T1 *sampled*: tokens, logprobs, one pending row per tool call. T2 *observed*: all results.

Nothing reaches the `tools` queue before T1, and the policy reads nothing before T2. Steps that end together are committed
together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, bindparam, func, select, update

from workflow import db
from workflow.store.connect import insert, reading, transaction
from workflow.store.rollout import Fence, check
from workflow.store.rows import clean, clean_tree, message_row, pack
from workflow.trajectory import Step, ToolCall, ToolResult


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call of a step; `result` is there already where the call could not even be sent."""

    call: ToolCall
    effects: str
    result: ToolResult | None


@dataclass(frozen=True)
class Sampled:
    """What T1 records of one step; `text` is what was sampled, readable."""

    episode: int
    step: Step
    policy_id: int
    text: str
    calls: tuple[CallRecord, ...]


@transaction
def commit_sampled(tx: Connection, fence: Fence, records: Sequence[Sampled]) -> list[list[int]]:
    """T1: the steps as they were sampled, at most one per episode, one pending row per tool call.

    Returns the ids of each step's calls. A step that is there already (the commit's answer was lost) is left as it is.

    Raises:
        Fenced: another worker holds the group.
    """
    check(tx, fence)
    attempts = _attempts(tx, fence)
    made = _insert_steps(tx, records, attempts)
    fresh = [record for record in records if record.episode in made]
    if fresh:
        tx.execute(db.step_tokens.insert(), [_token_row(made[record.episode], record.step) for record in fresh])
        _count_steps(tx, fresh)
    calls = [row for record in fresh for row in _call_rows(record, attempts[record.episode], made[record.episode])]
    if calls:
        tx.execute(db.tool_calls.insert(), calls)
    return _ids_of_calls(tx, records, attempts)


def _attempts(tx: Connection, fence: Fence) -> dict[int, int]:
    rows = tx.execute(select(db.episodes.c.id, db.episodes.c.attempt).where(db.episodes.c.group_id == fence.group))
    return {row.id: row.attempt for row in rows}


def _insert_steps(tx: Connection, records: Sequence[Sampled], attempts: Mapping[int, int]) -> dict[int, int]:
    """Episode -> id of its new step; those that were there before are left out."""
    statement = (
        insert(tx, db.steps)
        .on_conflict_do_nothing(index_elements=["episode_id", "attempt", "number"])
        .returning(db.steps.c.episode_id, db.steps.c.id)
    )
    rows = tx.execute(statement, [_step_row(record, attempts[record.episode]) for record in records])
    return {row.episode_id: row.id for row in rows}


def _step_row(record: Sampled, attempt: int) -> dict[str, Any]:
    step = record.step
    return {
        "episode_id": record.episode,
        "attempt": attempt,
        "number": step.index,
        "policy_id": record.policy_id,
        "prompt": [message_row(message) for message in step.prompt],
        "text": clean(record.text),
        "content": clean(step.message.content),
        "thought": clean(step.message.thought),
        "new_row": step.new_row,
        "finish_reason": step.finish_reason,
        "prompt_tokens": len(step.prompt_ids),
        "sampled_tokens": len(step.sampled_ids),
        "logprob_sum": sum(step.behavior_logprobs),
        "generate_seconds": step.seconds,
        "sampled_at": datetime.now(UTC),
    }


def _token_row(step_id: int, step: Step) -> dict[str, Any]:
    return {
        "step_id": step_id,
        "prompt_ids": pack("i", step.prompt_ids),
        "sampled_ids": pack("i", step.sampled_ids),
        "behavior_logprobs": pack("f", step.behavior_logprobs),
    }


def _call_rows(record: Sampled, attempt: int, step_id: int) -> list[dict[str, Any]]:
    now = datetime.now(UTC)
    return [
        {
            "episode_id": record.episode,
            "step_id": step_id,
            "attempt": attempt,
            "step": record.step.index,
            "call": index,
            "tool": clean(item.call.name)[:128],
            "arguments": clean_tree(dict(item.call.arguments)),
            "effects": item.effects,
            "status": "done" if item.result else "pending",
            "result": clean(item.result.content) if item.result else None,
            "error_class": item.result.error_class if item.result else None,
            "created_at": now,
            "finished_at": now if item.result else None,
        }
        for index, item in enumerate(record.calls)
    ]


def _count_steps(tx: Connection, records: Sequence[Sampled]) -> None:
    episodes = db.episodes.c
    statement = (
        update(db.episodes)
        .where(episodes.id == bindparam("episode"))
        .values(
            status="running",
            started_at=func.coalesce(episodes.started_at, bindparam("began", type_=db.Utc())),
            steps=episodes.steps + 1,
            prompt_tokens=episodes.prompt_tokens + bindparam("prompted"),
            sampled_tokens=episodes.sampled_tokens + bindparam("sampled"),
            tool_calls=episodes.tool_calls + bindparam("calls"),
            generate_seconds=episodes.generate_seconds + bindparam("seconds"),
        )
    )
    tx.execute(
        statement,
        [
            {
                "episode": record.episode,
                "prompted": len(record.step.prompt_ids),
                "sampled": len(record.step.sampled_ids),
                "calls": len(record.calls),
                "seconds": record.step.seconds,
                "began": datetime.now(UTC) - timedelta(seconds=record.step.seconds),
            }
            for record in records
        ],
    )


def _ids_of_calls(tx: Connection, records: Sequence[Sampled], attempts: Mapping[int, int]) -> list[list[int]]:
    calls = db.tool_calls.c
    episodes = [record.episode for record in records if record.calls]
    if not episodes:
        return [[] for _ in records]
    query = select(calls.id, calls.episode_id, calls.attempt, calls.step).where(calls.episode_id.in_(episodes))
    found: dict[tuple[int, int, int], list[int]] = {}
    for row in tx.execute(query.order_by(calls.call)):
        found.setdefault((row.episode_id, row.attempt, row.step), []).append(row.id)
    return [found.get((record.episode, attempts[record.episode], record.step.index), []) for record in records]


@reading
def results_of(tx: Connection, calls: Sequence[int]) -> dict[int, ToolResult]:
    """The results that are there, by call id."""
    rows = tx.execute(select(db.tool_calls).where(db.tool_calls.c.id.in_(calls), db.tool_calls.c.result.is_not(None)))
    return {row.id: ToolResult(row.result, row.error_class, row.seconds) for row in rows}


@reading
def calls_of(tx: Connection, episode: int, step: int) -> list[int]:
    """Ids of the calls of the episode's step, in order."""
    calls = db.tool_calls.c
    attempt = select(db.episodes.c.attempt).where(db.episodes.c.id == episode).scalar_subquery()
    query = select(calls.id).where(calls.episode_id == episode, calls.attempt == attempt, calls.step == step)
    return list(tx.execute(query.order_by(calls.call)).scalars())


@transaction
def commit_observed(tx: Connection, fence: Fence, observed: Sequence[tuple[int, Step]]) -> None:
    """T2: each (episode, step) has all its results, in the order of the calls; only now may the model see them.

    Raises:
        Fenced: another worker holds the group.
    """
    check(tx, fence)
    for episode, step in observed:
        steps, episodes = db.steps, db.episodes
        results = step.results or ()
        attempt = select(episodes.c.attempt).where(episodes.c.id == episode).scalar_subquery()
        changed = tx.execute(
            update(steps)
            .where(steps.c.episode_id == episode, steps.c.attempt == attempt, steps.c.number == step.index)
            .where(steps.c.observed_at.is_(None))
            .values(observed_at=datetime.now(UTC))
        )
        if changed.rowcount:
            tx.execute(
                update(episodes)
                .where(episodes.c.id == episode)
                .values(
                    tool_errors=episodes.c.tool_errors + sum(result.error_class is not None for result in results),
                    tool_seconds=episodes.c.tool_seconds + sum(result.seconds for result in results),
                )
            )


@transaction
def restart_episode(tx: Connection, fence: Fence, episode: int) -> None:
    """Begins the episode again under the next attempt number; the old steps stay as they are.

    Raises:
        Fenced: another worker holds the group.
    """
    check(tx, fence)
    fresh = dict.fromkeys(("steps", "prompt_tokens", "sampled_tokens", "tool_calls", "tool_errors"), 0)
    tx.execute(
        update(db.episodes)
        .where(db.episodes.c.id == episode)
        .values(attempt=db.episodes.c.attempt + 1, generate_seconds=0, tool_seconds=0, **fresh)
    )
