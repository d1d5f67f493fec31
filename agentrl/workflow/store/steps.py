"""The two transactions of a step. T1, *sampled*, writes the tokens, the logprobs, and a pending row per tool call. T2,
*observed*, marks that all results are stored.

No call is sent to the `tools` queue before T1, and the policy reads no result before T2. Steps that end at the same time are
committed together. Judges of an ended episode are called in the same way, with rows of the kind `grade` (`commit_asked`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, bindparam, func, select, update

from agentrl.workflow.store.connect import read_transaction, transaction
from agentrl.workflow.store.episode_annotations import insert_annotations, tools_annotations
from agentrl.workflow.store.prepared_statements import PreparedStatement
from agentrl.workflow.store.rollout_claims import Fence, HeldEpisodes, check_claim
from agentrl.workflow.store.row_codecs import call_row, step_row, token_row
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import Utc
from agentrl.workflow.trajectory import CallRecord, Step, StepRecord, ToolCall, ToolResult


@dataclass(frozen=True, slots=True)
class JudgeQuestions:
    """The calls to the judges after an episode's last step. `questions` has the arguments of each call, by the judge's name."""

    episode: int
    step: int
    questions: Mapping[str, Mapping[str, Any]]


_EPISODES, _STEPS, _CALLS = schema.episodes.c, schema.steps.c, schema.tool_calls.c
THE_STEP = (
    (_STEPS.episode_id == bindparam("of_episode"))
    & (_STEPS.attempt == bindparam("of_attempt"))
    & (_STEPS.number == bindparam("of_number"))
)
_STEP_ID = select(_STEPS.id).where(THE_STEP).scalar_subquery()
_NEW_STEP = PreparedStatement(schema.steps.insert().inline())
_NEW_TOKENS = PreparedStatement(schema.step_tokens.insert().values(step_id=_STEP_ID).inline())
_NEW_CALL = PreparedStatement(schema.tool_calls.insert().values(step_id=_STEP_ID).inline())
_COUNT_STEP = PreparedStatement(
    update(schema.episodes)
    .where(_EPISODES.id == bindparam("episode"))
    .values(
        status="running",
        started_at=func.coalesce(_EPISODES.started_at, bindparam("began", type_=Utc())),
        steps=_EPISODES.steps + 1,
        prompt_tokens=_EPISODES.prompt_tokens + bindparam("prompted"),
        sampled_tokens=_EPISODES.sampled_tokens + bindparam("sampled"),
        tool_calls=_EPISODES.tool_calls + bindparam("calls"),
        generate_seconds=_EPISODES.generate_seconds + bindparam("seconds"),
    )
)
_CALLS_OF_GROUP = PreparedStatement(
    select(_CALLS.id, _CALLS.episode_id, _CALLS.step)
    .join(schema.episodes, (_EPISODES.id == _CALLS.episode_id) & (_EPISODES.attempt == _CALLS.attempt))
    .where(_EPISODES.group_id == bindparam("group"), _CALLS.step.between(bindparam("first"), bindparam("last")))
    .where(_CALLS.kind == "call")
    .order_by(_CALLS.call)
)


@transaction
def commit_sampled(tx: Connection, fence: Fence, records: Sequence[StepRecord]) -> list[list[int]]:
    """Commit sampled turns: insert the steps, at most one per episode, and a pending row per tool call.

    Return the ids of each step's calls. A step that is already stored (because the reply of its commit was lost) is not written
    again. Raise Fenced if another worker holds the group.
    """
    held = check_claim(tx, fence)
    fresh = [record for record in records if record.step.index >= held.steps[record.episode]]
    if fresh:
        insert_steps(tx, fresh, held)
    return _load_call_ids(tx, fence, records)


def insert_steps(tx: Connection, records: Sequence[StepRecord], held: HeldEpisodes, options: int | None = None) -> None:
    """Write the rows of sampled steps, their tokens and their calls, and update the counts in their episodes. `options` is the
    id of the row in `request_options` with the tools and template options of the steps' requests; None if the requests have
    neither.
    """
    _NEW_STEP.run(tx, *(step_row(record, held.run, held.attempts[record.episode], options) for record in records))
    _NEW_TOKENS.run(tx, *(step_key(record.episode, record.step.index, held) | token_row(record.step) for record in records))
    _COUNT_STEP.run(tx, *(_step_counts(record) for record in records))
    calls = [
        _call_row(item, record.episode, record.step.index, number, held, "call" if record.request is None else "agent")
        for record in records
        for number, item in enumerate(record.calls)
    ]
    if calls:
        _NEW_CALL.run(tx, *calls)


def step_key(episode: int, step: int, held: HeldEpisodes) -> dict[str, int]:
    """Return the parameters of the SQL condition `THE_STEP`, which selects one step."""
    return {"of_episode": episode, "of_attempt": held.attempts[episode], "of_number": step}


def _call_row(item: CallRecord, episode: int, step: int, number: int, held: HeldEpisodes, kind: str) -> dict[str, Any]:
    names = {"run": held.run, "episode_id": episode, "attempt": held.attempts[episode], "step": step}
    return step_key(episode, step, held) | names | call_row(item, number, kind)


def _step_counts(record: StepRecord) -> dict[str, Any]:
    return {
        "episode": record.episode,
        "prompted": len(record.step.prompt_ids),
        "sampled": len(record.step.sampled_ids),
        "calls": len(record.calls),
        "seconds": record.step.seconds,
        "began": datetime.now(UTC) - timedelta(seconds=record.step.seconds),
    }


def _load_call_ids(tx: Connection, fence: Fence, records: Sequence[StepRecord]) -> list[list[int]]:
    steps = [record.step.index for record in records if record.calls]
    ids: dict[tuple[int, int], list[int]] = {}
    if steps:
        for call, episode, step in _CALLS_OF_GROUP.rows(tx, {"group": fence.group, "first": min(steps), "last": max(steps)}):
            ids.setdefault((episode, step), []).append(call)
    return [ids.get((record.episode, record.step.index), []) for record in records]


_CALL_RESULTS = select(_CALLS.id, _CALLS.result, _CALLS.error_class, _CALLS.seconds, _CALLS.annotations).where(
    _CALLS.id.in_(bindparam("calls", expanding=True)), _CALLS.result.is_not(None)
)


@read_transaction
def load_results(tx: Connection, calls: Sequence[int]) -> dict[int, ToolResult]:
    """Return the results of calls that have one, with the tools' annotations, by call id."""
    rows = tx.execute(_CALL_RESULTS, {"calls": list(calls)})
    return {
        call: ToolResult(result, error_class, seconds, annotations=tools_annotations(annotations))
        for call, result, error_class, seconds, annotations in rows
    }


@read_transaction
def list_calls(tx: Connection, episode: int, step: int) -> list[int]:
    """Return the ids of the calls of one step of the episode's current attempt, in order."""
    calls = schema.tool_calls.c
    attempt = select(schema.episodes.c.attempt).where(schema.episodes.c.id == episode).scalar_subquery()
    query = select(calls.id).where(calls.episode_id == episode, calls.attempt == attempt, calls.step == step)
    return list(tx.execute(query.where(calls.kind == "call").order_by(calls.call)).scalars())


MARK_OBSERVED = PreparedStatement(update(schema.steps).where(THE_STEP, _STEPS.observed_at.is_(None)))
_COUNT_RESULTS = PreparedStatement(
    update(schema.episodes)
    .where(_EPISODES.id == bindparam("episode"))
    .values(tool_errors=_EPISODES.tool_errors + bindparam("errors"), tool_seconds=_EPISODES.tool_seconds + bindparam("seconds"))
)


@transaction
def commit_observed(tx: Connection, fence: Fence, observed: Sequence[tuple[int, Step]]) -> None:
    """Commit T2: mark each (episode, step) as observed. Each step has all of its results, and the policy may read them after
    this commit. Raise Fenced if another worker holds the group.
    """
    held = check_claim(tx, fence)
    for episode, step in observed:
        results = step.results or ()
        if MARK_OBSERVED.run(tx, {**step_key(episode, step.index, held), "observed_at": datetime.now(UTC)}):
            errors = sum(result.error_class is not None for result in results)
            seconds = sum(result.seconds for result in results)
            _COUNT_RESULTS.run(tx, {"episode": episode, "errors": errors, "seconds": seconds})
            annotations = [annotation for result in results for annotation in result.annotations]
            if annotations:
                insert_annotations(tx, episode, held.attempts[episode], step.index, held.run, annotations)


_ROWS_OF_STEP = (
    select(_CALLS.id, _CALLS.kind, _CALLS.tool)
    .where(_CALLS.episode_id == bindparam("of_episode"), _CALLS.attempt == bindparam("of_attempt"))
    .where(_CALLS.step == bindparam("of_number"))
)


@transaction
def commit_asked(tx: Connection, fence: Fence, questions: Sequence[JudgeQuestions]) -> list[list[int]]:
    """Insert a pending row for each call to a judge, in the last step of the episode. Existing rows are not changed.

    Return the ids of each episode's rows, in the order of the episode's questions. The calls may be sent only after this
    commit. Raise Fenced if another worker holds the group.
    """
    held = check_claim(tx, fence)
    return [_insert_questions(tx, one, held) for one in questions]


def _insert_questions(tx: Connection, one: JudgeQuestions, held: HeldEpisodes) -> list[int]:
    key = step_key(one.episode, one.step, held)
    rows = tx.execute(_ROWS_OF_STEP, key).all()
    judges = {row.tool for row in rows if row.kind == "grade"}
    fresh = [judge for judge in one.questions if judge not in judges]
    if fresh:
        numbered = enumerate(fresh, start=len(rows))
        _NEW_CALL.run(tx, *(_question_row(one, judge, number, held) for number, judge in numbered))
        rows = tx.execute(_ROWS_OF_STEP, key).all()
    ids = {row.tool: row.id for row in rows if row.kind == "grade"}
    return [ids[judge] for judge in one.questions]


def _question_row(one: JudgeQuestions, judge: str, number: int, held: HeldEpisodes) -> dict[str, Any]:
    record = CallRecord(ToolCall(judge, one.questions[judge]), "none", None)
    return _call_row(record, one.episode, one.step, number, held, "grade")


@transaction
def restart_episode(tx: Connection, fence: Fence, episode: int) -> None:
    """Start the episode again with the next attempt number. The steps of earlier attempts stay stored. Raise Fenced if another
    worker holds the group.
    """
    check_claim(tx, fence)
    fresh = dict.fromkeys(("steps", "prompt_tokens", "sampled_tokens", "tool_calls", "tool_errors"), 0)
    tx.execute(
        update(schema.episodes)
        .where(schema.episodes.c.id == episode)
        .values(attempt=schema.episodes.c.attempt + 1, generate_seconds=0, tool_seconds=0, **fresh)
    )
