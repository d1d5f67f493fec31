"""A call of an agent from outside is a step: it is placed when it is committed, once, in a chain of the episode."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text

from agentrl.workflow.errors import Fenced
from agentrl.workflow.store import agent_attempts, agent_holds, rollout_claims, steps, tool_calls, vacuum
from agentrl.workflow.store.agent_attempts import AgentEnd
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import episode_rows
from agentrl.workflow.store.rollout_claims import GroupWork, Outcome
from agentrl.workflow.store.steps import CONTINUED
from agentrl.workflow.trajectory import (
    ROOT,
    CallRecord,
    Message,
    Step,
    StepRecord,
    StepRequest,
    ToolCall,
    ToolResult,
    messages_of,
)
from tests.support.played_runs import EXPIRED, claim, start, submission, value, values

ASKED = (Message("system", "be brief"), Message("user", "How much is 6*7?"))
MADE = CallRecord(ToolCall("calculator", {"expression": "6*7"}), "none", None)
TOOLS = ({"type": "function", "function": {"name": "calculator", "parameters": {"b": 1, "a": 2}}},)


def turn(prompt: Sequence[Message] = ASKED, calls: tuple[CallRecord, ...] = (), **changes: Any) -> Step:
    """A turn of two tokens that begins a line, unless changed."""
    message = Message("assistant", "42", "", tuple(item.call for item in calls))
    made = Step(0, tuple(prompt), (1, 2, 3), (4, 5), (-0.5, -0.25), "stop", message, 0, parent=ROOT)
    return replace(made, **changes)


def answer(
    work: GroupWork,
    request: str,
    step: Step,
    calls: tuple[CallRecord, ...] = (),
    brought: Mapping[str, Any] | None = None,
    **more: Any,
) -> StepRecord:
    """The answer to that request, with what it brought, in the work's first episode."""
    asked = StepRequest(request, "hash of " + request, **(brought or {}))
    return StepRecord(work.episodes[0].id, step, work.policy_id, "42", calls, asked, **more)


def begun(db: Database) -> GroupWork:
    """The claim of the only group of a new run."""
    return claim(db, start(db, submission(tasks=1))[0], lease=EXPIRED)


def stored(db: Database, work: GroupWork) -> tuple[Step, ...]:
    """The steps of the first episode as whoever only looks reads them."""
    return episode_rows.find_episode(db, work.episodes[0].id).episode.steps


def reclaimed(db: Database, work: GroupWork) -> tuple[Step, ...]:
    """The steps of the first episode as who claims the group next reads them."""
    return claim(db, work.fence.group, lease=EXPIRED).episodes[0].steps


def commit(db: Database, work: GroupWork, *records: StepRecord) -> list[Any]:
    return steps.commit_calls(db, work.fence, records)


def test_agent_step_that_continues_has_next_index_in_chain(database: Database) -> None:
    work = begun(database)
    (first,) = commit(database, work, answer(work, "a", turn()))
    (second,) = commit(database, work, answer(work, "b", turn([Message("user", "and 6*8?")], parent=0)))
    assert [(step.index, step.chain, step.parent) for step in (first, second)] == [(0, 0, ROOT), (1, 0, 0)]
    assert stored(database, work) == (first, second)


def test_agent_step_committed_again_is_the_same_step(database: Database) -> None:
    work = begun(database)
    one = answer(work, "a", turn(calls=(MADE,)), (MADE,))
    (first,) = commit(database, work, one)
    other = replace(one, step=turn(sampled_ids=(9,), behavior_logprobs=(-9.0,)))
    again, fresh = commit(database, work, other, answer(work, "b", turn()))
    assert (again.index, again.chain, again.parent) == (first.index, first.chain, first.parent)
    assert (fresh.index, fresh.chain) == (1, 1)
    assert stored(database, work) == (first, fresh)
    assert values(database, "SELECT steps || '/' || tool_calls FROM episodes WHERE id = :e", e=work.episodes[0].id) == ["2/1"]


def with_agent(db: Database) -> tuple[GroupWork, int]:
    """The claim of the only group of a new run, and the id of its first episode's running agent, which "w" holds."""
    work = begun(db)
    agent_holds.open_attempts(db, work.fence, [episode.id for episode in work.episodes])
    agent = agent_attempts.claim_agent(db, work.episodes[0].id, 0, "w", "hash of a key", 60.0)
    assert agent is not None
    return work, agent.id


@pytest.mark.parametrize("end", ["ended", "given back"])
def test_agent_step_is_refused_after_agent_has_ended(database: Database, end: str) -> None:
    work, agent = with_agent(database)
    other = replace(answer(work, "other", turn()), episode=work.episodes[1].id)
    (first,) = commit(database, work, answer(work, "a", turn()))
    if end == "ended":
        assert agent_attempts.finish_agent(database, agent, "w", AgentEnd())
    else:
        assert agent_attempts.give_up_agent(database, agent, "w", "it was killed", "lost")
    refused, accepted = commit(database, work, answer(work, "b", turn(parent=0)), other)
    assert refused is None
    assert accepted is not None
    assert commit(database, work, answer(work, "a", turn())) == [first]  # repeated because the reply of the commit was lost
    assert stored(database, work) == (first,)


def test_agent_ends_only_after_a_commit_in_progress(database: Database) -> None:
    work, agent = with_agent(database)
    with ThreadPoolExecutor(1) as pool:
        with database.engine.begin() as tx:
            (step,) = steps.insert_calls(tx, work.fence, [answer(work, "a", turn())])
            ending = pool.submit(agent_attempts.finish_agent, database, agent, "w", AgentEnd())
            with pytest.raises(TimeoutError):
                ending.result(0.3)
        assert ending.result(30)
    assert stored(database, work) == (step,)
    assert commit(database, work, answer(work, "b", turn(parent=0))) == [None]


def test_agent_steps_committed_at_once_overwrite_nothing(database: Database) -> None:
    work = begun(database)
    (first,) = commit(database, work, answer(work, "first", turn()))
    with ThreadPoolExecutor(8) as pool:
        made = pool.map(lambda n: commit(database, work, answer(work, f"r{n}", turn(parent=0)))[0], range(8))
    found = sorted(made, key=lambda step: step.index)
    assert [step.index for step in found] == list(range(1, 9))
    assert [step.chain for step in found] == list(range(8)), "one goes on with the chain, each other opens its own"
    assert {step.new_row for step in found[1:]} == {CONTINUED}
    assert stored(database, work) == (first, *found)


def test_agent_step_choices_share_prompt(database: Database) -> None:
    work = begun(database)
    (first,) = commit(database, work, answer(work, "a", turn()))
    more = Message("user", "more")
    one = answer(work, "b", turn([more], parent=0))
    whole = (*ASKED, first.message, more)
    two = answer(
        work, "b.1", turn(whole, prompt_ids=(), shared=8, new_row="another choice"), beside="b", shared_messages=len(whole)
    )
    second, third = commit(database, work, one, two)
    assert (third.parent, third.shared, third.chain) == (1, 8, 1)
    assert stored(database, work) == (first, second, third)
    assert messages_of(stored(database, work), 2) == (*whole, third.message)
    assert value(database, "SELECT prompt FROM steps WHERE number = 2") in ('[{"shared": 4}]', [{"shared": 4}])


def test_agent_step_of_new_chain_references_shared_messages(database: Database) -> None:
    work = begun(database)
    long = Message("user", "x" * 5000)
    thought = Message("assistant", "so", "I think", (ToolCall("f", {"b": 1, "a": [1.5, None]}),))
    (first,) = commit(database, work, answer(work, "a", turn([long, *ASKED])))
    edited = turn([long, ASKED[0], thought, Message("tool", "7", name="f")], parent=0, shared=2, new_row="edited history")
    (second,) = commit(database, work, answer(work, "b", edited, shared_messages=2))
    nested = turn([*edited.prompt[:3], Message("tool", "8", name="f")], parent=1, shared=3, new_row="edited history")
    (third,) = commit(database, work, answer(work, "c", nested, shared_messages=3))
    assert stored(database, work) == reclaimed(database, work) == (first, second, third)
    assert [step.chain for step in stored(database, work)] == [0, 1, 2]
    assert sum(len(str(row)) for row in values(database, "SELECT prompt FROM steps WHERE number > 0")) < 500


def test_agent_tool_calls_are_answered_by_next_request(database: Database) -> None:
    work = begun(database)
    lost = CallRecord(ToolCall("", {}, "no JSON"), "none", ToolResult("no JSON", "parse_error"))
    calls = (MADE, MADE, lost)
    (first,) = commit(database, work, answer(work, "a", turn(calls=calls), calls))
    assert tool_calls.lost_calls(database, max_sends=5) == []
    assert all(tool_calls.find_call(database, number) is None for number in values(database, "SELECT id FROM tool_calls"))
    commit(database, work, answer(work, "b", turn(parent=0), earlier_results={(0, 0): "forty\0two"}))
    assert stored(database, work)[0] == first, "one of two is still to come"
    shown = {(0, 0): "another story", (0, 1): "42"}
    (third,) = commit(database, work, answer(work, "c", turn(parent=0), earlier_results=shown))
    results = (ToolResult("forty\ufffdtwo"), ToolResult("42"), ToolResult("no JSON", "parse_error"))
    assert stored(database, work)[0] == replace(first, results=results)
    assert stored(database, work)[third.index] == third
    assert values(database, "SELECT DISTINCT kind || status FROM tool_calls") == ["agentdone"]


def test_agent_tool_calls_without_results_end_unobserved(database: Database) -> None:
    work = begun(database)
    commit(database, work, answer(work, "a", turn(calls=(MADE,)), (MADE,)))
    ended = Outcome(work.episodes[0].id, "done", "answered", 1.0, {"numeric_answer": 1.0}, "42", of_agent=True)
    rollout_claims.finish_episodes(database, work.fence, [ended], work.reward_set, work.weights)
    assert values(database, "SELECT status FROM tool_calls") == ["unobserved"]


def test_agent_tool_calls_of_failed_group_end_unobserved(database: Database) -> None:
    work = begun(database)
    commit(database, work, answer(work, "a", turn(calls=(MADE,)), (MADE,)))
    assert rollout_claims.fail_attempt(database, work.fence, "InfraError", "the sampler is gone", max_attempts=1)
    assert values(database, "SELECT status FROM tool_calls") == ["unobserved"]


def test_agent_step_tools_and_template_options_are_stored_once(database: Database) -> None:
    work = begun(database)
    brought: Mapping[str, Any] = {"tools": TOOLS, "template_options": {"enable_thinking": False}, "asked": {"temperature": 0.5}}
    commit(database, work, *(answer(work, f"r{n}", turn(), brought=brought) for n in range(3)), answer(work, "bare", turn()))
    assert value(database, "SELECT count(*) FROM request_options") == 1
    requests = steps.load_requests(database, [work.episodes[0].id])[work.episodes[0].id]
    assert list(requests) == [0, 1, 2, 3]
    assert requests[0] == StepRequest("r0", "hash of r0", **brought)
    assert list(requests[0].tools[0]["function"]["parameters"]) == ["b", "a"]
    assert requests[3] == StepRequest("bare", "hash of bare")


def test_agent_step_delivery_can_be_recorded_later(database: Database) -> None:
    work = begun(database)
    commit(database, work, answer(work, "a", turn(delivered=False)))
    steps.mark_delivered(database, work.fence, {(work.episodes[0].id, 0): True})
    assert stored(database, work)[0].delivered


def test_agent_step_commit_is_fenced_without_the_group(database: Database) -> None:
    work = begun(database)
    claim(database, work.fence.group)
    with pytest.raises(Fenced):
        commit(database, work, answer(work, "a", turn()))
    with database.engine.begin() as tx:
        assert tx.execute(text("SELECT count(*) FROM steps")).scalar_one() == 0


def test_vacuum_keeps_what_agents_sent(database: Database) -> None:
    work = begun(database)
    (step,) = commit(database, work, answer(work, "a", turn(), brought={"tools": TOOLS}))
    agent_holds.open_attempts(database, work.fence, [work.episodes[0].id])
    vacuum.vacuum(database)
    assert stored(database, work) == (step,)
    assert steps.load_requests(database, [work.episodes[0].id])[work.episodes[0].id][0].tools == TOOLS
    assert values(database, "SELECT status FROM agent_attempts") == ["pending"]
