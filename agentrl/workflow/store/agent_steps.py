"""Steps of agents from outside: a call of the model is a step, which is numbered and placed in a chain inside its commit.

Several calls of one episode may run at the same time, so that none of them knows which step it will be. A call is known by its
request's id: one that is committed again is the step that it was. The agent runs its tools itself. Their rows, of the kind
`agent`, are never sent: they are answered when a later request shows what came of them, or stay unobserved.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, bindparam, select, update

from agentrl.workflow.store.connect import insert, read_transaction, transaction
from agentrl.workflow.store.episode_loader import clean_tree
from agentrl.workflow.store.prepared_statements import PreparedStatement
from agentrl.workflow.store.rollout_claims import Fence, HeldEpisodes, check_claim
from agentrl.workflow.store.row_codecs import prompt_rows
from agentrl.workflow.store.steps import (
    COUNT_STEP,
    MARK_OBSERVED,
    NEW_CALL,
    NEW_TOKENS,
    THE_STEP,
    CallRecord,
    SampledStep,
    call_row,
    step_counts,
    step_key,
    step_row,
    token_row,
)
from agentrl.workflow.tables import schema
from agentrl.workflow.trajectory import ROOT, Step, storable

CONTINUED = "another turn continues the same one"
"""Why a step opens a chain of its own although it continues its parent token for token."""
BESIDE = "requested while another request was still running"
"""Why a step opens another chain whose request came before any step was there."""


@dataclass(frozen=True)
class CallStep:
    """The record of one sampled answer to a request; the commit gives its step an index and a chain.

    Args:
        sampled: the step, and the calls that the agent is to run.
        request_id: names the request, and the answer among those to the same request.
        request_hash: sha256 of its body.
        asked: the sampling that the client asked for, and when.
        tools: the tools that the request brought, as schemas.
        template_options: what it told the chat template.
        shared_messages: so many of the first messages of its prompt are those of its parent's line.
        beside: the request id of the step that takes the place of its parent, where that is committed with it.
        shown: (step, call) -> what came of it, as the request shows it.
    """

    sampled: SampledStep
    request_id: str
    request_hash: str
    asked: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    shared_messages: int = 0
    beside: str = ""
    shown: Mapping[tuple[int, int], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestMark:
    """The identity of a stored step's request, and the request's own data."""

    step: int
    request_id: str
    request_hash: str
    asked: Mapping[str, Any]
    tools: tuple[Mapping[str, Any], ...]
    template_options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _StepPosition:
    """Where a step that is there stands."""

    number: int
    chain: int
    parent: int
    request_id: str


_STEPS, _CALLS, _EPISODES, _OPTIONS = schema.steps.c, schema.tool_calls.c, schema.episodes.c, schema.request_options.c
_PLACES = PreparedStatement(
    select(_STEPS.number, _STEPS.chain, _STEPS.parent_step, _STEPS.request_id)
    .where(_STEPS.episode_id == bindparam("of_episode"), _STEPS.attempt == bindparam("of_attempt"))
    .order_by(_STEPS.number)
)
_NEW_CALL_STEP = PreparedStatement(schema.steps.insert().inline())
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
_DELIVER = PreparedStatement(update(schema.steps).where(THE_STEP))


@transaction
def commit_calls(tx: Connection, fence: Fence, records: Sequence[CallStep]) -> list[Step]:
    """Return the answers as they were sampled, in this order, with what their requests show of earlier calls.

    Returns the steps as they stand in their episodes. One that is there already, by its request's id, is returned, not written.

    Raises:
        Fenced: another worker holds the group.
    """
    return insert_calls(tx, fence, records)


def insert_calls(tx: Connection, fence: Fence, records: Sequence[CallStep]) -> list[Step]:
    """As `commit_calls`, within a transaction."""
    held = check_claim(tx, fence)
    places: dict[int, list[_StepPosition]] = {}
    return [_commit_call(tx, record, held, places) for record in records]


def _commit_call(tx: Connection, record: CallStep, held: HeldEpisodes, known: dict[int, list[_StepPosition]]) -> Step:
    episode = record.sampled.episode
    if episode not in known:
        known[episode] = _read_places(tx, episode, held)
    places = known[episode]
    for place in places:
        if place.request_id == record.request_id:
            return replace(record.sampled.step, index=place.number, chain=place.chain, parent=place.parent)
    step = _placed(record, places)
    sampled = replace(record.sampled, step=step)
    row = step_row(sampled, held) | {
        "prompt": prompt_rows(step, record.shared_messages),
        "request_id": record.request_id,
        "request_hash": record.request_hash,
        "asked": clean_tree(record.asked) or None,
        "options_id": _store_options(tx, record),
        "observed_at": datetime.now(UTC) if sampled.calls and all(item.result for item in sampled.calls) else None,
    }
    _NEW_CALL_STEP.run(tx, row)
    NEW_TOKENS.run(tx, token_row(sampled, held))
    COUNT_STEP.run(tx, step_counts(sampled))
    if sampled.calls:
        NEW_CALL.run(tx, *(_agent_call_row(item, episode, step.index, n, held) for n, item in enumerate(sampled.calls)))
    _show_results(tx, record, held)
    places.append(_StepPosition(step.index, step.chain, ROOT if step.parent is None else step.parent, record.request_id))
    return step


def _read_places(tx: Connection, episode: int, held: HeldEpisodes) -> list[_StepPosition]:
    rows = _PLACES.rows(tx, {"of_episode": episode, "of_attempt": held.attempts[episode]})
    return [
        _StepPosition(number, chain, ROOT if parent is None else parent, request or "")
        for number, chain, parent, request in rows
    ]


def _placed(record: CallStep, places: Sequence[_StepPosition]) -> Step:
    """The step with its index, its parent and its chain: its parent's, if nothing else goes on with that."""
    step = record.sampled.step
    beside = next((place.number for place in places if place.request_id == record.beside), None) if record.beside else None
    parent = (ROOT if step.parent is None else step.parent) if beside is None else beside
    found = next((place for place in places if place.number == parent), None)
    number = places[-1].number + 1 if places else 0
    if found is not None and step.shared is None:
        taken = any(place.parent == parent and place.chain == found.chain for place in places)
        if not taken:
            return replace(step, index=number, parent=parent, chain=found.chain)
        step = replace(step, new_row=step.new_row or CONTINUED)
    if places and not step.new_row:
        step = replace(step, new_row=BESIDE)
    chain = max((place.chain for place in places), default=-1) + 1
    return replace(step, index=number, parent=parent, chain=chain)


def _agent_call_row(item: CallRecord, episode: int, step: int, number: int, held: HeldEpisodes) -> dict[str, Any]:
    return call_row(item, episode, step, number, held, "agent") | {"sends": 0}


def _store_options(tx: Connection, record: CallStep) -> int | None:
    """The id of the tools and template options that the request brought; each pair is stored once."""
    if not record.tools and not record.template_options:
        return None
    # Keys keep their order, in which a template shows them.
    values = {"tools": clean_tree(list(record.tools)), "template_options": clean_tree(record.template_options)}
    content_hash = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    statement = insert(tx, schema.request_options).values(content_hash=content_hash, **values)
    tx.execute(statement.on_conflict_do_nothing(index_elements=["content_hash"]))
    return int(tx.execute(select(_OPTIONS.id).where(_OPTIONS.content_hash == content_hash)).scalar_one())


def _show_results(tx: Connection, record: CallStep, held: HeldEpisodes) -> None:
    """Answers the calls whose results the request shows; a step whose calls are all answered is observed."""
    now = datetime.now(UTC)
    key = {"of_episode": record.sampled.episode, "of_attempt": held.attempts[record.sampled.episode]}
    steps = set[int]()
    for (step, call), said in record.shown.items():
        values = {"status": "done", "result": storable(said), "finished_at": now}
        if _SHOW_RESULT.run(tx, {**key, "of_step": step, "of_call": call, **values}):
            steps.add(step)
    for step in steps:
        if not _OPEN_CALL.rows(tx, {**key, "of_step": step}):
            MARK_OBSERVED.run(tx, {**key, "of_number": step, "observed_at": now})


@transaction
def mark_delivered(tx: Connection, fence: Fence, delivered: Mapping[tuple[int, int], bool]) -> None:
    """Return (episode, step) -> whether the client received the full turn.

    Raises:
        Fenced: another worker holds the group.
    """
    held = check_claim(tx, fence)
    for (episode, step), all_of_it in delivered.items():
        _DELIVER.run(tx, {**step_key(episode, step, held), "delivered": all_of_it})


@read_transaction
def load_marks(tx: Connection, episodes: Sequence[int]) -> dict[int, list[RequestMark]]:
    """Return episode -> the marks of the steps of its current attempt that answered requests, in order."""
    query = (
        select(_STEPS.episode_id, _STEPS.number, _STEPS.request_id, _STEPS.request_hash, _STEPS.asked)
        .add_columns(_OPTIONS.tools, _OPTIONS.template_options)
        .join(schema.episodes, (_EPISODES.id == _STEPS.episode_id) & (_EPISODES.attempt == _STEPS.attempt))
        .outerjoin(schema.request_options, _OPTIONS.id == _STEPS.options_id)
        .where(_STEPS.episode_id.in_(episodes), _STEPS.request_id.is_not(None))
        .order_by(_STEPS.episode_id, _STEPS.number)
    )
    found: dict[int, list[RequestMark]] = {}
    for episode, number, request_id, request_hash, asked, tools, options in tx.execute(query):
        mark = RequestMark(number, request_id, request_hash or "", asked or {}, tuple(tools or ()), options or {})
        found.setdefault(episode, []).append(mark)
    return found
