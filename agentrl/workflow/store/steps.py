"""The transactions of a step.

A step of the built-in loop has two. T1, *sampled*, writes the tokens, the logprobs, and a pending row per tool call. T2,
*observed*, marks that all results are stored. No call is sent to the `tools` queue before T1, and the policy reads no result
before T2. Steps that end at the same time are committed together. Judges of an ended episode are called in the same way, with
rows of the kind `grade` (`commit_asked`).

For external agents, one request to the model is one step (`commit_calls`). Several requests of one episode may run at the same
time, so no request knows its step's number in advance: the commit gives the step its number and its chain. A request has an id:
if a request with the same id is committed again, the stored step is returned. The agent runs its tools itself. Its tool calls
are rows of the kind `agent`, which are never sent to a tools worker. A later request that contains a call's result completes
the call's row. A call whose result no request contains becomes unobserved.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row, bindparam, func, select, update

from agentrl.workflow.store.agent_attempts import MISMATCH
from agentrl.workflow.store.connect import insert, read_transaction, transaction
from agentrl.workflow.store.episode_annotations import insert_annotations, tools_annotations
from agentrl.workflow.store.episode_loader import load_earlier_attempts
from agentrl.workflow.store.prepared_statements import PreparedStatement
from agentrl.workflow.store.rollout_claims import Fence, HeldEpisodes, check_claim
from agentrl.workflow.store.row_codecs import call_row, clean_tree, hash_prompt, step_row, token_row
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import Utc
from agentrl.workflow.trajectory import ROOT, CallRecord, Episode, Step, StepRecord, StepRequest, ToolCall, ToolResult, storable

CONTINUED = "another turn continues the same one"
"""The reason that a step starts a new chain although its tokens continue its parent's: another step already continues the
parent's chain.
"""
BESIDE = "requested while another request was still running"
"""The reason that a step starts a new chain if its request arrived before the first step of the episode was stored."""


@dataclass(frozen=True, slots=True)
class JudgeQuestions:
    """The calls to the judges after an episode's last step. `questions` has the arguments of each call, by the judge's name."""

    episode: int
    step: int
    questions: Mapping[str, Mapping[str, Any]]


_EPISODES, _STEPS, _CALLS, _OPTIONS = schema.episodes.c, schema.steps.c, schema.tool_calls.c, schema.request_options.c
_AGENTS = schema.agent_attempts.c
_THE_STEP = (
    (_STEPS.episode_id == bindparam("of_episode"))
    & (_STEPS.attempt == bindparam("of_attempt"))
    & (_STEPS.number == bindparam("of_number"))
)
_STEP_ID = select(_STEPS.id).where(_THE_STEP).scalar_subquery()
_NEW_STEP = PreparedStatement(schema.steps.insert().inline())
_NEW_TOKENS = PreparedStatement(schema.step_tokens.insert().values(step_id=_STEP_ID).inline())
_NEW_CALL = PreparedStatement(schema.tool_calls.insert().values(step_id=_STEP_ID).inline())
_SHARE_PROMPT = PreparedStatement(
    update(schema.groups)
    .where(schema.groups.c.id == bindparam("of_group"))
    .values(prompt_step_id=_STEP_ID)
    .returning(schema.groups.c.prompt_step_id)
)
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
        _insert_steps(tx, fresh, held)
    return _load_call_ids(tx, fence, records)


def _insert_steps(tx: Connection, records: Sequence[StepRecord], held: HeldEpisodes, options: int | None = None) -> None:
    """Write the rows of sampled steps, their tokens and their calls, and update the counts in their episodes. `options` is the
    id of the row in `request_options` with the tools and template options of the steps' requests; None if the requests have
    neither.
    """
    rows = [(step_row(one, held.run, held.attempts[one.episode], options), token_row(one.step)) for one in records]
    if rows := _share_prompts(tx, rows, held):
        _write_rows(tx, rows, held)
    _COUNT_STEP.run(tx, *(_step_counts(record) for record in records))
    calls = [
        _call_row(item, record.episode, record.step.index, number, held, "call" if record.request is None else "agent")
        for record in records
        for number, item in enumerate(record.calls)
    ]
    if calls:
        _NEW_CALL.run(tx, *calls)


_StepRows = tuple[dict[str, Any], dict[str, Any]]
"""The row of a step in `steps`, and its row in `step_tokens`."""


def _share_prompts(tx: Connection, rows: Sequence[_StepRows], held: HeldEpisodes) -> list[_StepRows]:
    """Replace each prompt that the group already stores by a reference to its step. If the group stores none yet, insert its
    first step now, because later rows need its id. Return the rows that are still to be inserted.
    """
    unwritten = []
    for step, tokens in rows:
        if step["number"] == 0 and len(held.attempts) > 1:
            prompt_hash = hash_prompt(step, tokens)
            if not held.prompt_steps:
                _write_rows(tx, [(step, tokens)], held)
                values = {"of_group": held.group, "prompt_hash": prompt_hash}
                ((step_id,),) = _SHARE_PROMPT.rows(tx, _step_key(step["episode_id"], 0, held) | values)
                held.prompt_steps[prompt_hash] = step_id
                continue
            if prompt_hash in held.prompt_steps:
                step |= {"prompt_step_id": held.prompt_steps[prompt_hash], "prompt": []}
                tokens["prompt_ids"] = b""
        unwritten.append((step, tokens))
    return unwritten


def _write_rows(tx: Connection, rows: Sequence[_StepRows], held: HeldEpisodes) -> None:
    """Insert steps and their tokens."""
    _NEW_STEP.run(tx, *(step for step, _ in rows))
    _NEW_TOKENS.run(tx, *(_step_key(step["episode_id"], step["number"], held) | tokens for step, tokens in rows))


def _step_key(episode: int, step: int, held: HeldEpisodes) -> dict[str, int]:
    """Return the parameters of the SQL condition `_THE_STEP`, which selects one step."""
    return {"of_episode": episode, "of_attempt": held.attempts[episode], "of_number": step}


def _call_row(item: CallRecord, episode: int, step: int, number: int, held: HeldEpisodes, kind: str) -> dict[str, Any]:
    names = {"run": held.run, "episode_id": episode, "attempt": held.attempts[episode], "step": step}
    return _step_key(episode, step, held) | names | call_row(item, number, kind)


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


_MARK_OBSERVED = PreparedStatement(update(schema.steps).where(_THE_STEP, _STEPS.observed_at.is_(None)))
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
        if _MARK_OBSERVED.run(tx, {**_step_key(episode, step.index, held), "observed_at": datetime.now(UTC)}):
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
    key = _step_key(one.episode, one.step, held)
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


# steps of external agents


@dataclass(frozen=True, slots=True)
class _StepPosition:
    """The position of a stored or inherited step in its episode."""

    number: int
    chain: int
    parent: int
    request_id: str


@dataclass(frozen=True, slots=True)
class _StoredSteps:
    """The positions of an episode's steps. `has_ended` is True if the agent of the current attempt has ended or is lost."""

    places: list[_StepPosition]
    has_ended: bool


_AGENT_STATUS = (
    select(_AGENTS.status)
    .where(_AGENTS.episode_id == bindparam("of_episode"), _AGENTS.attempt == bindparam("of_attempt"))
    .with_for_update(read=True)  # on Postgres the agent cannot end before the steps are committed
    .scalar_subquery()
)
_PLACES = PreparedStatement(
    select(_AGENT_STATUS, _STEPS.number, _STEPS.chain, _STEPS.parent_step, _STEPS.request_id)
    .select_from(schema.episodes)
    .outerjoin(schema.steps, (_STEPS.episode_id == _EPISODES.id) & (_STEPS.attempt == bindparam("of_attempt")))
    .where(_EPISODES.id == bindparam("of_episode"))
    .order_by(_STEPS.number)
)
_SHOW_RESULT = PreparedStatement(
    update(schema.tool_calls)
    .where(_CALLS.episode_id == bindparam("of_episode"), _CALLS.attempt == bindparam("of_attempt"))
    .where(_CALLS.step == bindparam("of_step"), _CALLS.call == bindparam("of_call"))
    .where(_CALLS.kind == "agent", _CALLS.status == "pending")
)
_OPEN_CALL = PreparedStatement(
    select(_CALLS.id)
    .where(_CALLS.episode_id == bindparam("of_episode"), _CALLS.attempt == bindparam("of_attempt"))
    .where(_CALLS.step == bindparam("of_step"), _CALLS.kind == "agent", _CALLS.status == "pending")
    .limit(1)
)
_OPTIONS_OF_HASH = PreparedStatement(select(_OPTIONS.id).where(_OPTIONS.content_hash == bindparam("hash")))
_DELIVER = PreparedStatement(update(schema.steps).where(_THE_STEP))


@transaction
def commit_calls(tx: Connection, fence: Fence, records: Sequence[StepRecord]) -> list[Step | None]:
    """Commit the steps, and the results of earlier tool calls: an agent runs its calls itself, so the messages of its next
    request contain the results. Return the steps in the order of `records`.

    The returned steps have their index, parent and chain. A step whose request id is already stored is not written again. If
    the agent of an episode's current attempt has ended or is lost, nothing is written for that episode, and None is returned
    for its records that are not stored yet. Raise Fenced if another worker holds the group.
    """
    return insert_calls(tx, fence, records)


def insert_calls(tx: Connection, fence: Fence, records: Sequence[StepRecord]) -> list[Step | None]:
    """Write the rows of `commit_calls` in the transaction `tx`. See `commit_calls`."""
    held = check_claim(tx, fence)
    # in the order of episodes, so that two transactions lock the rows of agents in the same order
    places = {episode: _read_places(tx, episode, held) for episode in sorted({record.episode for record in records})}
    return [_commit_call(tx, record, held, places[record.episode]) for record in records]


def _commit_call(tx: Connection, record: StepRecord, held: HeldEpisodes, stored: _StoredSteps) -> Step | None:
    request, places = record.request, stored.places
    assert request is not None
    for place in places:
        if place.request_id == request.id:
            return replace(record.step, index=place.number, chain=place.chain, parent=place.parent)
    if stored.has_ended:
        return None
    step = _placed(record, places)
    _insert_steps(tx, [replace(record, step=step)], held, _store_options(tx, request))
    _show_results(tx, record, held)
    places.append(_StepPosition(step.index, step.chain, ROOT if step.parent is None else step.parent, request.id))
    return step


def _read_places(tx: Connection, episode: int, held: HeldEpisodes) -> _StoredSteps:
    """Return the positions of the episode's steps, and whether the agent of its current attempt has ended or is lost."""
    rows = _PLACES.rows(tx, {"of_episode": episode, "of_attempt": held.attempts[episode]})
    places = [
        _StepPosition(number, chain, ROOT if parent is None else parent, request or "")
        for _, number, chain, parent, request in rows
        if number is not None
    ]
    if len(places) != held.steps[episode]:
        places = [*_inherited_places(tx, episode), *places]
    return _StoredSteps(places, rows[0][0] in ("ended", "lost"))


def _inherited_places(tx: Connection, episode: int) -> list[_StepPosition]:
    """Return the positions of the steps that a fork inherits. No request of the fork has the id of one of theirs."""
    fork = tx.execute(select(_EPISODES.parent_id, _EPISODES.inherited_steps).where(_EPISODES.id == episode)).one()
    if fork.parent_id is None or not fork.inherited_steps:
        return []
    query = (
        select(_STEPS.number, _STEPS.chain, _STEPS.parent_step)
        .join(schema.episodes, (_EPISODES.id == _STEPS.episode_id) & (_EPISODES.attempt == _STEPS.attempt))
        .where(_STEPS.episode_id == fork.parent_id)
        .order_by(_STEPS.number)
    )
    rows = tx.execute(query).all()
    own = [_StepPosition(row.number, row.chain, ROOT if row.parent_step is None else row.parent_step, "") for row in rows]
    before = [*_inherited_places(tx, fork.parent_id), *own]
    return [place for place in before if place.number < fork.inherited_steps]


def _placed(record: StepRecord, places: Sequence[_StepPosition]) -> Step:
    """Return the step with its index, parent and chain.

    The step continues its parent's chain, unless the prompt diverges from the parent's tokens or another step already continues
    that chain.
    """
    step = record.step
    beside = next((place.number for place in places if place.request_id == record.beside), None) if record.beside else None
    parent = (ROOT if step.parent is None else step.parent) if beside is None else beside
    parent_position = next((place for place in places if place.number == parent), None)
    number = places[-1].number + 1 if places else 0
    if parent_position is not None and step.shared is None:
        has_successor = any(place.parent == parent and place.chain == parent_position.chain for place in places)
        if not has_successor:
            return replace(step, index=number, parent=parent, chain=parent_position.chain)
        step = replace(step, new_row=step.new_row or CONTINUED)
    if places and not step.new_row:
        step = replace(step, new_row=BESIDE)
    chain = max((place.chain for place in places), default=-1) + 1
    return replace(step, index=number, parent=parent, chain=chain)


def _store_options(tx: Connection, request: StepRequest) -> int | None:
    if not request.tools and not request.template_options:
        return None
    # Keys keep their order, in which a template shows them.
    values = {"tools": clean_tree(list(request.tools)), "template_options": clean_tree(request.template_options)}
    content_hash = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    stored = _OPTIONS_OF_HASH.rows(tx, {"hash": content_hash})
    if not stored:
        statement = insert(tx, schema.request_options).values(content_hash=content_hash, **values)
        tx.execute(statement.on_conflict_do_nothing(index_elements=["content_hash"]))
        stored = _OPTIONS_OF_HASH.rows(tx, {"hash": content_hash})
    return int(stored[0][0])


def _show_results(tx: Connection, record: StepRecord, held: HeldEpisodes) -> None:
    """Store the results that the request contains, and mark each step as observed whose calls all have results."""
    now = datetime.now(UTC)
    key = {"of_episode": record.episode, "of_attempt": held.attempts[record.episode]}
    steps = set[int]()
    for (step, call), result in record.earlier_results.items():
        values = {"status": "done", "result": storable(result), "finished_at": now}
        if _SHOW_RESULT.run(tx, {**key, "of_step": step, "of_call": call, **values}):
            steps.add(step)
    for step in steps:
        if not _OPEN_CALL.rows(tx, {**key, "of_step": step}):
            _MARK_OBSERVED.run(tx, {**key, "of_number": step, "observed_at": now})


@transaction
def mark_delivered(tx: Connection, fence: Fence, delivered: Mapping[tuple[int, int], bool]) -> None:
    """Store whether the client got the whole response of each step. Raise Fenced if another worker holds the group."""
    held = check_claim(tx, fence)
    for (episode, step), all_of_it in delivered.items():
        _DELIVER.run(tx, {**_step_key(episode, step, held), "delivered": all_of_it})


@read_transaction
def load_requests(tx: Connection, episodes: Sequence[int]) -> dict[int, dict[int, StepRequest]]:
    """Return the requests of the episodes' current attempts: episode id -> step number -> request, in order of steps. For a
    fork, the requests of the inherited steps are included.
    """
    return _requests_of(tx, episodes)


def _requests_of(tx: Connection, episodes: Sequence[int]) -> dict[int, dict[int, StepRequest]]:
    requests: dict[int, dict[int, StepRequest]] = {}
    forks = select(_EPISODES.id, _EPISODES.parent_id, _EPISODES.inherited_steps)
    for fork in tx.execute(forks.where(_EPISODES.id.in_(episodes), _EPISODES.inherited_steps > 0)).all():
        before = _requests_of(tx, [fork.parent_id]).get(fork.parent_id, {})
        requests[fork.id] = {number: one for number, one in before.items() if number < fork.inherited_steps}
    current = (_EPISODES.id == _STEPS.episode_id) & (_EPISODES.attempt == _STEPS.attempt)
    query = _REQUESTS.join(schema.episodes, current).where(_STEPS.episode_id.in_(episodes))
    for row in tx.execute(query.order_by(_STEPS.episode_id, _STEPS.number)):
        requests.setdefault(row.episode_id, {})[row.number] = _request_of(row)
    return requests


_REQUESTS = (
    select(_STEPS.episode_id, _STEPS.attempt, _STEPS.number, _STEPS.request_id, _STEPS.request_hash, _STEPS.asked)
    .add_columns(_OPTIONS.tools, _OPTIONS.template_options)
    .outerjoin(schema.request_options, _OPTIONS.id == _STEPS.options_id)
    .where(_STEPS.request_id.is_not(None))
)


def _request_of(row: Row[Any]) -> StepRequest:
    tools, options = tuple(row.tools or ()), row.template_options or {}
    return StepRequest(row.request_id, row.request_hash or "", row.asked or {}, tools, options)


@dataclass(frozen=True, slots=True)
class EarlierAttempt:
    """A lost attempt at an episode: its steps, and by the step's index the request that the step answered. In a fork, the
    inherited steps come first, and they have no request.
    """

    steps: tuple[Step, ...]
    requests: Mapping[int, StepRequest]


@read_transaction
def load_earlier(tx: Connection, episode: Episode, attempt: int) -> list[EarlierAttempt]:
    """Return the lost attempts from which the attempt with this number may be replayed, the oldest first.

    If an attempt contradicted the record (`MISMATCH`), that attempt and all earlier ones are left out, because the attempt
    after it began without a record.
    """
    agents = schema.agent_attempts.c
    strayed = select(func.max(agents.attempt)).where(agents.episode_id == episode.id, agents.error_class == MISMATCH)
    last = tx.execute(strayed.where(agents.attempt < attempt)).scalar_one()
    first = 0 if last is None else last + 1
    requests: dict[int, dict[int, StepRequest]] = {}
    query = _REQUESTS.where(_STEPS.episode_id == episode.id, _STEPS.attempt.between(first, attempt - 1))
    for row in tx.execute(query.order_by(_STEPS.attempt, _STEPS.number)):
        requests.setdefault(row.attempt, {})[row.number] = _request_of(row)
    steps = load_earlier_attempts(tx, episode, first, attempt - 1)
    return [EarlierAttempt(steps[number], requests.get(number, {})) for number in sorted(steps)]
