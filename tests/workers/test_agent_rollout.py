"""An agent from outside decides an episode's turns: each call is a step before its reply is whole, whoever hangs up."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from agentrl.workers.jobs import pending_agents
from agentrl.workers.jobs.sampling_server import sampling_server
from agentrl.workflow.analysis.transcript import transcript_lines
from agentrl.workflow.engines import GenerateRequest
from agentrl.workflow.errors import InfraError
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import episode_rows, ledger
from agentrl.workflow.token_chains import SIDE_CALL, reasons_not_to_train
from agentrl.workflow.training.training_rows import rows_of
from agentrl.workflow.trajectory import ROOT, Episode, Message, ToolCall, ToolResult
from tests.support.agents_stage import (
    AGENT,
    Reply,
    Stage,
    ask,
    attempt_held,
    calling,
    end_agent,
    episode_of,
    group_of,
    run_agent,
    staged,
    user,
    wait_for,
    write,
)
from tests.support.played_runs import value, values
from tests.support.scripted_engine import ScriptedEngine
from tests.support.small_models import chat
from tests.workers.test_workers import in_memory as in_memory

CHAT = chat()
ANSWER = CHAT.turn(Message("assistant", "#### 42"))
OTHER = CHAT.turn(Message("assistant", "#### 48"))
CALL = ToolCall("calculator", {"expression": "6*7"})
ASK = CHAT.turn(Message("assistant", "", tool_calls=(CALL,)))
QUESTION = user("How much is 6*7?")
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]


@pytest.fixture
def db(own_database: Database, in_memory: None) -> Iterator[Database]:
    """The process's database, a broker that nobody reads, and nothing kept from other tests."""
    pending_agents._replies.forget()
    sampling_server.forget()
    yield own_database
    pending_agents._replies.forget()
    sampling_server.forget()


class Policy:
    """Says the same to the same prompt, and remembers what it was asked."""

    def __init__(self, *answers: Sequence[int]) -> None:
        self.requests: list[GenerateRequest] = []
        self._answers = list(answers)
        self.engine = ScriptedEngine(self._say)

    def _say(self, request: GenerateRequest) -> Sequence[int]:
        self.requests.append(request)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


class Gated:
    """Draws a token each time it is let, or after `patience` seconds."""

    def __init__(self, ids: Sequence[int] = ANSWER, patience: float = 60.0) -> None:
        self.let, self.begun = threading.Semaphore(0), threading.Semaphore(0)
        self.keys: list[int] = []
        self._ids = ids
        self.engine = ScriptedEngine(self._say, pace=lambda: self.let.acquire(timeout=patience))

    def _say(self, request: GenerateRequest) -> Sequence[int]:
        self.keys.append(request.key)
        self.begun.release()
        return self._ids


def whole(reply: Reply) -> Any:
    assert reply.status == 200, reply.body
    return reply.document


def test_agent_call_is_step_and_next_continues_its_tokens(db: Database) -> None:
    policy = Policy(ANSWER, OTHER)
    with staged(Stage(db, group_of(db), policy.engine, CHAT)) as stage:
        key = run_agent(db, 1)
        first = ask(stage, key, [QUESTION], temperature=0.1)
        more = [QUESTION, {"role": "assistant", "content": first.said}, user("and 6*8?")]
        second, again = (ask(stage, key, more, request="again") for _ in range(2))
        assert again.body == second.body
        assert (first.said, second.said) == ("#### 42", "#### 48")
        end_agent(stage, 1)
        stage.over()
    record = episode_of(db, 1)
    assert (record.status, record.stop_reason, record.final_answer) == ("done", "answered", "#### 48")
    one, two = record.steps
    assert (one.sampled_ids, two.sampled_ids) == (ANSWER, OTHER)
    assert (one.chain, one.parent, two.chain, two.parent, two.shared) == (0, ROOT, 0, 0, None)
    cached = [reply.document["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in (first, second, again)]
    assert cached == [0, *[len(one.prompt_ids) + len(ANSWER)] * 2]
    assert first.document["system_fingerprint"] == second.document["system_fingerprint"]
    assert two.prompt == (Message("user", "and 6*8?"),)
    assert [request.prompt_ids for request in policy.requests] == [one.prompt_ids, one.prompt_ids + ANSWER + two.prompt_ids]
    assert policy.requests[0].temperature == 1.0
    assert policy.requests[0].session == policy.requests[1].session
    assert policy.requests[0].key != policy.requests[1].key
    assert value(db, "SELECT count(*) FROM events WHERE kind = 'sampling_asked'") == 1


def test_agent_turn_ended_by_stop_string_continues_exactly(db: Database) -> None:
    stopped = tuple(CHAT.tokenizer.encode("#### 42 minus", add_special_tokens=False))
    policy = Policy(stopped, ANSWER)
    with staged(Stage(db, group_of(db), policy.engine, CHAT)) as stage:
        key = run_agent(db, 1)
        first = ask(stage, key, [QUESTION], stop=["min"])
        more = [QUESTION, {"role": "assistant", "content": first.said}, user("and?")]
        second = ask(stage, key, more, stop=["min"])
        assert (first.said, second.said) == ("#### 42", "#### 42")
        one, two = episode_of(db, 1).steps
    assert (one.message.content, one.sampled_ids) == ("#### 42", stopped)
    assert (two.chain, two.parent, two.new_row) == (0, 0, None)
    assert policy.requests[1].prompt_ids == one.prompt_ids + stopped + two.prompt_ids


def test_agent_call_is_recorded_only_if_its_tool_was_offered(db: Database) -> None:
    with staged(Stage(db, group_of(db), Policy(ASK).engine, CHAT)) as stage:
        key = run_agent(db, 1)
        for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            choice = whole(ask(stage, key, [QUESTION], **body))["choices"][0]
            assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)
            assert "6*7" in choice["message"]["content"]
        assert value(db, "SELECT count(*) FROM tool_calls") == 0
        again = [QUESTION, {"role": "assistant", "content": choice["message"]["content"]}, user("in words?")]
        ask(stage, key, again)
        assert [step.parent for step in episode_of(db, 1).steps][2] in (0, 1)


def test_agent_tool_results_are_observed_from_next_request(db: Database) -> None:
    policy = Policy(ASK, ANSWER)
    with staged(Stage(db, group_of(db), policy.engine, CHAT)) as stage:
        key = run_agent(db, 1)
        said = whole(ask(stage, key, [QUESTION], tools=TOOLS))["choices"][0]
        assert said["finish_reason"] == "tool_calls"
        made = said["message"]["tool_calls"]
        assert value(db, "SELECT status || kind FROM tool_calls") == "pendingagent"
        shown = {"role": "tool", "tool_call_id": made[0]["id"], "content": "42"}
        messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": made}, shown]
        assert ask(stage, key, messages, tools=TOOLS).said == "#### 42"
        known = stage.driver.recorder.episodes[1].steps
        assert known == episode_of(db, 1).steps
        assert known[0].results == (ToolResult("42"),)
        assert [step.chain for step in known] == [0, 0]
        end_agent(stage, 1)
        stage.over()
    assert value(db, "SELECT count(*) FROM request_options") == 1


def test_edited_history_opens_chain_with_shared_prefix(db: Database) -> None:
    policy = Policy(ANSWER)
    with staged(Stage(db, group_of(db), policy.engine, CHAT)) as stage:
        key = run_agent(db, 1)
        ask(stage, key, [user("x " * 50), QUESTION])
        ask(stage, key, [user("x " * 50), {"role": "assistant", "content": "#### 41"}, user("really?")])
        ask(stage, key, [user("x " * 50), QUESTION], tools=TOOLS)
        steps = episode_of(db, 1).steps
        assert stage.driver.recorder.episodes[1].steps == steps
        assert [step.chain for step in steps] == [0, 1, 2]
        assert steps[1].new_row
        assert "tools" in (steps[2].new_row or "")
        assert steps[1].parent == 0
        assert steps[1].shared
        assert len(steps[1].prompt_ids) < len(steps[0].prompt_ids)
        record = episode_of(db, 1)
        for request, step in zip(policy.requests, steps, strict=True):
            assert record.tokens_of(step.index) == request.prompt_ids + ANSWER


def test_concurrent_agent_calls_are_steps_with_own_draws(db: Database) -> None:
    policy = Policy(ANSWER)
    with staged(Stage(db, group_of(db), policy.engine, CHAT)) as stage, ThreadPoolExecutor(4) as pool:
        key = run_agent(db, 1)
        replies = list(pool.map(lambda n: ask(stage, key, [QUESTION], request=f"r{n}"), range(4)))
        assert [reply.said for reply in replies] == ["#### 42"] * 4
        steps = episode_of(db, 1).steps
        assert [step.index for step in steps] == [0, 1, 2, 3]
        assert {step.chain for step in steps} == {0, 1, 2, 3}
        assert len({request.key for request in policy.requests}) == 4
        assert stage.driver.recorder.episodes[1].steps == steps


def test_agent_choices_are_steps_that_share_prompt(db: Database) -> None:
    policy = Policy(ANSWER)
    with staged(Stage(db, group_of(db), policy.engine, CHAT)) as stage:
        key = run_agent(db, 1)
        reply = whole(ask(stage, key, [QUESTION], request="r", n=3, return_token_ids=True))
        assert [choice["token_ids"] for choice in reply["choices"]] == [list(ANSWER)] * 3
        again = ask(stage, key, [QUESTION], request="r", n=3, return_token_ids=True)
        assert again.document == reply
        steps = episode_of(db, 1).steps
        assert [(step.parent, step.shared, step.prompt_ids) for step in steps[1:]] == [(0, len(steps[0].prompt_ids), ())] * 2
        assert [step.prompt for step in steps] == [steps[0].prompt] * 3
        assert len({request.key for request in policy.requests}) == 3


def test_request_id_reused_with_other_body_is_refused(db: Database) -> None:
    policy = Policy(ANSWER, OTHER)
    with staged(Stage(db, group_of(db), policy.engine, CHAT)) as stage:
        key = run_agent(db, 1)
        first = ask(stage, key, [QUESTION], request="r")
        for other in (ask(stage, key, [user("Another?")], request="r"), ask(stage, key, [QUESTION], request="r", retry=1, n=2)):
            assert (other.status, other.code) == (422, "idempotency_key_reused")
        assert ask(stage, key, [QUESTION], request="r").body == first.body
        assert len(episode_of(db, 1).steps) == 1


def test_agent_retry_gets_recorded_reply_bytes(db: Database) -> None:
    policy = Policy(ANSWER, OTHER)
    group = group_of(db)
    with staged(Stage(db, group, policy.engine, CHAT)) as stage:
        key = run_agent(db, 1)
        first = ask(stage, key, [QUESTION], request="one")
        assert ask(stage, key, [QUESTION], request="one") == first
        assert ask(stage, key, [QUESTION], request="two", retry=1) == first
        streamed = ask(stage, key, [user("and 6*8?")], request="three", stream=True)
        assert ask(stage, key, [user("and 6*8?")], request="three", stream=True) == streamed
        assert ask(stage, key, [QUESTION], request="four").said == "#### 48", "an equal body alone is no retry"
    with staged(Stage(db, group, policy.engine, CHAT)) as heir:
        assert ask(heir, key, [QUESTION], request="one") == first, "the rows know it, too"
        assert ask(heir, key, [user("and 6*8?")], request="three", stream=True) == streamed
    assert len(policy.requests) == 3


def test_agent_retry_joins_call_in_flight(db: Database) -> None:
    gated = Gated()
    with staged(Stage(db, group_of(db), gated.engine, CHAT)) as stage, ThreadPoolExecutor(2) as pool:
        key = run_agent(db, 1)
        first = pool.submit(ask, stage, key, [QUESTION], "one", stream=True)
        assert gated.begun.acquire(timeout=60)
        gated.let.release(2)
        second = pool.submit(ask, stage, key, [QUESTION], "two", 1, stream=True)
        wait_for(lambda: len(stage.driver._conversations[1].open[0].waiting) == 2)
        gated.let.release(len(ANSWER))
        assert first.result() == second.result()
        assert len(episode_of(db, 1).steps) == 1


def test_stream_disconnect_leaves_undelivered_step_for_retry(db: Database) -> None:
    gated = Gated()
    with staged(Stage(db, group_of(db), gated.engine, CHAT)) as stage:
        key = run_agent(db, 1)
        with calling(stage, key, [QUESTION], "one", stream=True) as response:
            gated.let.release(2)
            assert response.readline()
            assert gated.begun.acquire(timeout=30), "one that is stopped before its first token leaves no step"
        wait_for(
            lambda: all(turn.stopped for turn in stage.driver._conversations[1].open)
        )  # or over, if a token was still to come
        gated.let.release(1)
        (cut,) = wait_for(lambda: episode_of(db, 1).steps)
        assert not cut.delivered
        assert cut.sampled_ids == ANSWER[: len(cut.sampled_ids)]
        assert cut.finish_reason == "length"
        gated.let.release(100)
        assert ask(stage, key, [QUESTION], "one", stream=True).status == 200
        assert gated.keys[0] == gated.keys[1], "a call that comes again is the call that it was"
        _, again = episode_of(db, 1).steps
        assert (again.delivered, again.sampled_ids) == (True, ANSWER)


def test_agent_survives_worker_kill(db: Database) -> None:
    policy = Policy(ANSWER, OTHER)
    group = group_of(db)
    stage = Stage(db, group, policy.engine, CHAT).enter()
    key = run_agent(db, 1)
    first = ask(stage, key, [QUESTION])
    stage.leave()
    assert ask(stage, key, [QUESTION]).status == 421
    with staged(Stage(db, group, policy.engine, CHAT)) as heir:
        assert value(db, "SELECT address FROM groups") == heir.driver.server.address
        more = [QUESTION, {"role": "assistant", "content": first.said}, user("and 6*8?")]
        assert ask(heir, key, more).said == "#### 48"
        assert [step.chain for step in episode_of(db, 1).steps] == [0, 0]
        assert values(db, "SELECT status FROM agent_attempts") == ["running"]
        end_agent(heir, 1)
        heir.over()
    assert episode_of(db, 1).status == "done"


@pytest.mark.parametrize("half", ["ended", "lost", "none", "claimed"])
def test_agent_rollout_takes_over_half_written_attempt(db: Database, half: str) -> None:
    policy = Policy(ANSWER)
    group = group_of(db)
    stage = Stage(db, group, policy.engine, CHAT).enter()
    ask(stage, run_agent(db, 1), [QUESTION])
    stage.leave()
    if half == "ended":  # while nobody held the group
        end_agent(stage, 1, answer="6 times 7")
    elif half == "lost":
        write(db, "UPDATE agent_attempts SET status = 'lost', error_class = 'killed', lease_until = NULL")
    elif half == "none":  # the episode was begun again, and the rollout killed before it opened the next attempt
        write(db, "UPDATE agent_attempts SET status = 'lost'")
        write(db, "UPDATE episodes SET attempt = 1")
    with staged(Stage(db, group, policy.engine, CHAT)) as heir:
        if half in ("lost", "none"):
            wait_for(lambda: "pending" in values(db, "SELECT status FROM agent_attempts WHERE attempt = 1"))
            ask(heir, run_agent(db, 1), [QUESTION])
        if half != "ended":
            end_agent(heir, 1, answer="6 times 7")
        heir.over()
    record = episode_of(db, 1)
    assert (record.status, record.stop_reason, record.final_answer, len(record.steps)) == ("done", "answered", "6 times 7", 1)
    assert policy.requests[0].key == policy.requests[-1].key


def test_lost_agent_restarts_with_same_sampling_keys(db: Database) -> None:
    policy = Policy(ANSWER)
    with staged(Stage(db, group_of(db, agent=AGENT | {"resume": "restart"}), policy.engine, CHAT)) as stage:
        key = run_agent(db, 1)
        ask(stage, key, [QUESTION])
        write(db, "UPDATE agent_attempts SET lease_until = 0")
        stage.driver.inbox.put(_woken(stage))
        wait_for(lambda: values(db, "SELECT status FROM agent_attempts ORDER BY attempt") == ["lost", "pending"])
        heir = wait_for(lambda: attempt_held(stage.driver, 1) > 0 and run_agent(db, 1))
        assert ask(stage, key, [QUESTION]).status == 409
        ask(stage, heir, [QUESTION])
        assert policy.requests[0].key == policy.requests[1].key
        assert values(db, "SELECT attempt || '/' || number FROM steps ORDER BY attempt") == ["0/0", "1/0"]
        for _ in range(4):
            write(db, "UPDATE agent_attempts SET lease_until = 0")
            lost = value(db, "SELECT count(*) FROM agent_attempts WHERE status = 'lost'")
            stage.driver.inbox.put(_woken(stage))
            wait_for(lambda n=lost: value(db, "SELECT count(*) FROM agent_attempts WHERE status = 'lost'") > n)
            wait_for(lambda: not stage.driver.is_live or "pending" in values(db, "SELECT status FROM agent_attempts"))
            run_agent(db, 1)
        stage.over()
    assert episode_of(db, 1).status == "infra_error"


def _woken(stage: Stage) -> Any:
    from agentrl.workers.jobs.inbox import InboxEvent

    return InboxEvent(stage.group, 1, woken=True)


ENDS = {
    "fine": ({}, True, ("done", "answered", "#### 42")),
    "answered": ({"answer": "6 times 7"}, True, ("done", "answered", "6 times 7")),
    "raised": ({"error_class": "ValueError", "error": "oh"}, True, ("done", "agent_error", "#### 42")),
    "late": ({"error_class": "timeout", "error": "600 s"}, True, ("done", "timeout", "#### 42")),
    "raised before": ({"error_class": "ValueError", "error": "oh"}, False, ("failed", None, "")),
    "late before": ({"error_class": "timeout", "error": "600 s"}, False, ("failed", None, "")),
    "never called": ({}, False, ("failed", None, "")),
}


@pytest.mark.parametrize("name", ENDS)
def test_agent_end_decides_episode_status(db: Database, name: str) -> None:
    said, calls, expected = ENDS[name]
    with staged(Stage(db, group_of(db), Policy(ANSWER).engine, CHAT)) as stage:
        key = run_agent(db, 1)
        if calls:
            ask(stage, key, [QUESTION])
        end_agent(stage, 1, **said)
        stage.over()
        assert ask(stage, key, [QUESTION]).status in (409, 421)
    record = episode_of(db, 1)
    assert (record.status, record.stop_reason, record.final_answer) == expected
    words = value(db, "SELECT error_class || ': ' || error FROM episodes")
    if record.status == "failed":
        assert words.startswith("AgentError: ")
        assert record.error
    else:
        assert words == f"{said.get('error_class', '')}: {said.get('error', '')}"


def test_agent_turn_cut_off_ends_episode_as_max_tokens(db: Database) -> None:
    with staged(Stage(db, group_of(db), Policy(ANSWER).engine, CHAT)) as stage:
        key = run_agent(db, 1)
        assert whole(ask(stage, key, [QUESTION], max_tokens=2))["choices"][0]["finish_reason"] == "length"
        end_agent(stage, 1)
        stage.over()
    assert episode_of(db, 1).stop_reason == "max_tokens"


def test_cancelled_turn_is_final_answer_only_if_continued(db: Database) -> None:
    gated = Gated()
    with staged(Stage(db, group_of(db), gated.engine, CHAT)) as stage:
        key = run_agent(db, 1)
        gated.let.release(len(ANSWER))
        first = ask(stage, key, [QUESTION])
        assert gated.begun.acquire(timeout=30)
        with calling(stage, key, [user("and 6*8?")], stream=True) as response:
            gated.let.release(2)
            assert response.readline()
            assert gated.begun.acquire(timeout=30), "one that is stopped before its first token leaves no step"
        wait_for(
            lambda: all(turn.stopped for turn in stage.driver._conversations[1].open)
        )  # or over, if a token was still to come
        gated.let.release(100)
        wait_for(lambda: len(episode_of(db, 1).steps) == 2)
        assert not episode_of(db, 1).steps[1].delivered
        assert episode_of(db, 1).final_answer == first.said
        end_agent(stage, 1)
        stage.over()
    record = episode_of(db, 1)
    assert (record.stop_reason, record.final_answer) == ("answered", "#### 42")
    unread = replace(record, steps=tuple(replace(step, delivered=False) for step in record.steps))
    assert unread.last_turn is None
    later = replace(unread.steps[1], index=2, parent=0, shared=None)
    assert replace(unread, steps=(*unread.steps, later)).last_turn == unread.steps[0], "who goes on from it has read it"


@pytest.mark.parametrize(("asked", "weight"), [(False, 0.0), (True, 1.0)])
def test_agent_rewards_are_kept_and_count_on_request(db: Database, asked: bool, weight: float) -> None:
    group = group_of(db, agent={**AGENT, "own_rewards": asked})
    with staged(Stage(db, group, Policy(ANSWER).engine, CHAT)) as stage:
        ask(stage, run_agent(db, 1), [QUESTION])
        end_agent(stage, 1, rewards={"mine": 7.0})
        stage.over()
    assert values(db, "SELECT value FROM rewards WHERE part = 'mine'") == [7.0]
    assert values(db, "SELECT weight FROM rewards WHERE part = 'mine'") == [weight]
    assert (value(db, "SELECT reward FROM episodes") >= 7.0) is asked


def test_agent_reward_name_with_two_sources_fails_episode(db: Database) -> None:
    with staged(Stage(db, group_of(db), Policy(ANSWER).engine, CHAT)) as stage:
        ask(stage, run_agent(db, 1), [QUESTION])
        end_agent(stage, 1, rewards={"numeric_answer": 1.0})
        stage.over()
    assert (episode_of(db, 1).status, value(db, "SELECT error_class FROM episodes")) == ("failed", "RewardError")
    assert "numeric_answer" in episode_of(db, 1).error


def test_agent_call_is_sent_away_if_rollout_fails(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(episode: Episode) -> bool:
        raise InfraError("The rollout fails.")

    with staged(Stage(db, group_of(db), Policy(ANSWER).engine, CHAT)) as stage:
        monkeypatch.setattr(stage.driver.recorder, "begin_step", fail)
        assert ask(stage, run_agent(db, 1), [QUESTION]).status == 421


def test_sampling_server_refuses_in_openai_error_shape(db: Database) -> None:
    with staged(
        Stage(db, group_of(db, agent={**AGENT, "max_calls": 1}), Policy(ANSWER).engine, CHAT, max_context=200)
    ) as stage:
        key = run_agent(db, 1)
        long = ask(stage, key, [user("x y " * 400)])
        assert (long.status, long.code) == (400, "context_length_exceeded")
        assert ask(stage, "another key", [QUESTION]).status == 421
        assert ask(stage, key, [QUESTION]).status == 200
        more = ask(stage, key, [user("again")])
        assert (more.status, more.code) == (429, "max_calls")


def test_side_call_is_step_that_does_not_train(db: Database) -> None:
    policy = Policy(ANSWER, OTHER)
    with staged(Stage(db, group_of(db, agent=AGENT | {"side_calls": True, "max_calls": 2}), policy.engine, CHAT)) as stage:
        key = run_agent(db, 1)
        assert ask(stage, key, [user("A title?")], side_call=True).not_applied == ""
        ask(stage, key, [QUESTION])
        assert ask(stage, key, [QUESTION]).code == "max_calls", "side calls count"
        end_agent(stage, 1)
        stage.over()
    record = episode_of(db, 1)
    assert [step.side_call for step in record.steps] == [True, False]
    assert dict(reasons_not_to_train(record)) == {0: SIDE_CALL}
    (row,) = rows_of([record])
    assert row.input_ids == record.tokens_of(1)
    assert (record.status, row.weight) == ("done", 1.0)
    assert values(db, "SELECT side_call FROM v_steps ORDER BY step") == [1, 0]
    assert any("1 of 2 steps are side calls" in line for line, _ in transcript_lines(episode_rows.find_episode(db, 1)))
    assert ledger.explain_fate(db, 1)["untrained"] == [{"step": 0, "reason": SIDE_CALL}]


def test_side_call_trains_unless_run_allows_it(db: Database) -> None:
    with staged(Stage(db, group_of(db), Policy(ANSWER).engine, CHAT)) as stage:
        assert ask(stage, run_agent(db, 1), [QUESTION], side_call=True).not_applied == "x-agentrl-train"
        assert [step.side_call for step in episode_of(db, 1).steps] == [False]
        assert "x-agentrl-train" in value(db, "SELECT CAST(asked AS TEXT) FROM steps")


def test_episode_of_side_calls_alone_fails(db: Database) -> None:
    with staged(Stage(db, group_of(db, agent=AGENT | {"side_calls": True}), Policy(ANSWER).engine, CHAT)) as stage:
        ask(stage, run_agent(db, 1), [QUESTION], side_call=True)
        end_agent(stage, 1)
        stage.over()
    assert value(db, "SELECT status FROM episodes") == "failed"
    assert "side calls" in value(db, "SELECT error FROM episodes")
