"""A restarted agent is answered from the record of the lost attempts while it repeats its requests."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import pytest

from agentrl.workers.jobs import agent_replay
from agentrl.workers.jobs.inbox import InboxEvent
from agentrl.workers.requests.fork_request import ForkRequest, prepare_fork
from agentrl.workflow.errors import StateError
from agentrl.workflow.store.connect import Database
from agentrl.workflow.training.training_rows import rows_of
from agentrl.workflow.trajectory import Message
from tests.support.agents_stage import (
    AGENT,
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
from tests.support.played_runs import start, value, values
from tests.support.scripted_engine import ScriptedEngine
from tests.workers.test_agent_rollout import ANSWER, ASK, CHAT, TOOLS, Gated, Policy
from tests.workers.test_agent_rollout import db as db
from tests.workers.test_workers import in_memory as in_memory

QUESTION = user("Count.")


class Counter:
    """An engine whose turns are all different: "turn 1", "turn 2" and so on."""

    def __init__(self) -> None:
        self.count = 0
        self.engine = ScriptedEngine(self._turn)

    def _turn(self, _request: Any) -> Sequence[int]:
        self.count += 1
        return CHAT.turn(Message("assistant", f"turn {self.count}"))


@pytest.fixture
def counter() -> Counter:
    return Counter()


def lose(stage: Stage, attempt: int = 1) -> str:
    """The agent is lost; the key of the next attempt's agent."""
    write(stage.db, "UPDATE agent_attempts SET lease_until = 0 WHERE status = 'running'")
    stage.driver.inbox.put(InboxEvent(stage.group, 1, woken=True))
    return next_key(stage, attempt)


def next_key(stage: Stage, attempt: int) -> str:
    wait_for(lambda: value(stage.db, f"SELECT count(*) FROM agent_attempts WHERE attempt = {attempt} AND status = 'pending'"))
    wait_for(lambda: attempt_held(stage.driver, 1) == attempt)
    return run_agent(stage.db, 1)


def converse(stage: Stage, key: str, first: Mapping[str, Any], turns: int, before: Sequence[str] = ()) -> list[str]:
    """The model's words in a conversation of so many turns; those `before` are known already."""
    messages, said = [first], list[str]()
    for number in range(turns):
        said.append(before[number] if number < len(before) else ask(stage, key, messages).said)
        messages += [{"role": "assistant", "content": said[-1]}, user("More.")]
    return said


def tokens_of(stage: Stage) -> list[Any]:
    """What trains, without what only the store knows."""
    return [(row.input_ids, row.loss_mask, row.behavior_logprobs, row.weight) for row in rows_of([episode_of(stage.db, 1)])]


@pytest.fixture
def stage(db: Database, counter: Counter) -> Iterator[Stage]:
    with staged(Stage(db, group_of(db), counter.engine, CHAT)) as made:
        yield made


def stage_with(db: Database, counter: Counter, **agent: Any) -> Stage:
    return Stage(db, group_of(db, agent=AGENT | agent), counter.engine, CHAT)


def test_lost_agent_gets_recorded_turns_then_new_ones(stage: Stage, counter: Counter) -> None:
    assert converse(stage, run_agent(stage.db, 1), QUESTION, 3) == ["turn 1", "turn 2", "turn 3"]
    before = tokens_of(stage)
    again = lose(stage)
    assert converse(stage, again, QUESTION, 3) == ["turn 1", "turn 2", "turn 3"]
    assert (counter.count, tokens_of(stage)) == (3, before)
    assert converse(stage, lose(stage, 2), QUESTION, 4) == ["turn 1", "turn 2", "turn 3", "turn 4"]
    steps = episode_of(stage.db, 1).steps
    assert stage.driver.recorder.episodes[1].steps == steps
    assert ([step.chain for step in steps], counter.count) == ([0] * 4, 4)


def test_attempt_lost_early_keeps_older_record(stage: Stage, counter: Counter) -> None:
    converse(stage, run_agent(stage.db, 1), QUESTION, 3)
    converse(stage, lose(stage), QUESTION, 1)
    assert converse(stage, lose(stage, 2), QUESTION, 4) == ["turn 1", "turn 2", "turn 3", "turn 4"]
    assert counter.count == 4


def test_replay_survives_lost_rollout_worker(db: Database, counter: Counter) -> None:
    first = stage_with(db, counter, replay_ignore=["at [0-9]+"]).enter()
    converse(first, run_agent(db, 1), user("Count at 1."), 3)
    undisturbed = tokens_of(first)
    key = lose(first)
    said = converse(first, key, user("Count at 2."), 2)
    first.leave()
    with staged(Stage(db, first.group, counter.engine, CHAT)) as heir:
        said = converse(heir, key, user("Count at 2."), 3, said)
        assert (said[2], counter.count, tokens_of(heir)) == ("turn 3", 3, undisturbed)
        assert converse(heir, key, user("Count at 2."), 4, said)[3] == "turn 4"
        assert [step.chain for step in episode_of(db, 1).steps] == [0, 0, 0, 0]


def test_ignored_text_of_record_stays_in_rows(db: Database, counter: Counter) -> None:
    with staged(stage_with(db, counter, replay_ignore=["at [0-9]+"])) as stage:
        converse(stage, run_agent(db, 1), user("Count at 1."), 2)
        assert converse(stage, lose(stage), user("Count at 2."), 4) == [f"turn {n}" for n in range(1, 5)]
        steps = episode_of(db, 1).steps
        assert [step.chain for step in steps] == [0, 0, 0, 0]
        assert steps[0].prompt[-1].content == "Count at 1."
        assert counter.count == 4


def test_contradiction_ends_attempt_and_next_has_no_record(
    stage: Stage, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.workers.jobs.agent_rollout.WAIT_SECONDS", 0.1)
    converse(stage, run_agent(stage.db, 1), QUESTION, 2)
    key = lose(stage)
    said = converse(stage, key, QUESTION, 1)[0]
    other = [QUESTION, {"role": "assistant", "content": said}, user("Something else.")]
    assert ask(stage, key, other).status in (409, 421)
    again = next_key(stage, 2)
    assert converse(stage, again, QUESTION, 1) == ["turn 3"]
    rows = values(stage.db, "SELECT error_class FROM agent_attempts ORDER BY attempt")
    assert rows == ["lost", "mismatch", ""]
    detail = value(stage.db, "SELECT detail FROM events WHERE kind = 'replay_mismatch'")
    assert "message 2 (user) has 'Something else.' instead of 'More.'" in detail


def test_concurrent_requests_are_replayed_in_any_order(stage: Stage, counter: Counter) -> None:
    key = run_agent(stage.db, 1)
    said = {word: ask(stage, key, [user(word)]).said for word in ("one", "two", "three")}
    key = lose(stage)
    with ThreadPoolExecutor(2) as pool:
        new = pool.submit(ask, stage, key, [user("four")])  # not recorded: it waits for the recorded ones
        wait_for(lambda: stage.driver._waiting)
        assert {word: ask(stage, key, [user(word)]).said for word in ("three", "one", "two")} == said
        assert new.result().said == "turn 4"


def test_equal_requests_are_replayed_in_order_of_draws(stage: Stage) -> None:
    key = run_agent(stage.db, 1)
    said = [ask(stage, key, [QUESTION]).said for _ in range(3)]
    key = lose(stage)
    assert [ask(stage, key, [QUESTION]).said for _ in range(4)] == [*said, "turn 4"]
    assert [step.draw for step in episode_of(stage.db, 1).steps] == [0, 1, 2, 3]


def test_choices_and_streams_are_replayed(stage: Stage, counter: Counter) -> None:
    key = run_agent(stage.db, 1)
    choices = ask(stage, key, [QUESTION], n=3).document["choices"]
    before = tokens_of(stage)
    key = lose(stage)
    streamed = ask(stage, key, [QUESTION], n=3, stream=True).body.decode()
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    deltas = [(choice["index"], choice["delta"].get("content") or "") for event in events for choice in event["choices"]]
    assert ["".join(text for at, text in deltas if at == n) for n in range(3)] == [c["message"]["content"] for c in choices]
    assert (counter.count, tokens_of(stage)) == (3, before)


def test_cancelled_turn_is_sampled_again_after_loss(db: Database) -> None:
    gated = Gated(patience=1.0)
    with staged(Stage(db, group_of(db), gated.engine, CHAT)) as stage:
        with calling(stage, run_agent(db, 1), [QUESTION], "one", stream=True) as response:
            gated.let.release(2)
            assert response.readline()
            assert gated.begun.acquire(timeout=30)
        wait_for(lambda: episode_of(db, 1).steps)
        gated.let.release(100)
        key = lose(stage)
        assert ask(stage, key, [QUESTION]).status == 200
        assert gated.keys[0] == gated.keys[1]
        assert [step.delivered for step in episode_of(db, 1).steps] == [True]


def test_tool_results_of_record_stay(db: Database) -> None:
    policy = Policy(ASK, ANSWER)
    with staged(Stage(db, group_of(db, agent=AGENT | {"replay_ignore": [r"in \d+ s"]}), policy.engine, CHAT)) as stage:

        def play(key: str, result: str) -> None:
            made = ask(stage, key, [QUESTION], tools=TOOLS).document["choices"][0]["message"]["tool_calls"]
            shown = {"role": "tool", "tool_call_id": made[0]["id"], "content": result}
            ask(stage, key, [QUESTION, {"role": "assistant", "content": None, "tool_calls": made}, shown], tools=TOOLS)

        play(run_agent(db, 1), "42 in 3 s")
        before = episode_of(db, 1).steps
        play(lose(stage), "42 in 5 s")
        after = episode_of(db, 1).steps
        assert after == before
        assert after[0].results is not None
        assert after[0].results[0].content == "42 in 3 s"
        assert stage.driver.recorder.episodes[1].steps == after


def test_refused_request_is_refused_again(stage: Stage, counter: Counter) -> None:
    """An agent may shorten what is too long; only the shorter request is recorded."""
    for key in (run_agent(stage.db, 1), lose):
        key = key if isinstance(key, str) else key(stage)
        assert ask(stage, key, [user("word " * 3000)]).code == "context_length_exceeded"
        assert ask(stage, key, [user("word")]).said == "turn 1"


def test_restart_option_samples_again(db: Database, counter: Counter) -> None:
    with staged(stage_with(db, counter, resume="restart")) as stage:
        converse(stage, run_agent(db, 1), QUESTION, 2)
        assert converse(stage, lose(stage), QUESTION, 2) == ["turn 3", "turn 4"]


def test_slow_pattern_ends_replay_in_bounded_time(db: Database, counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_replay, "CLEAN_SECONDS", 0.2)
    with staged(stage_with(db, counter, replay_ignore=["(a|aa)+$"])) as stage:
        hostile = user("a" * 60 + "b")
        converse(stage, run_agent(db, 1), hostile, 1)
        assert converse(stage, lose(stage), hostile, 1) == ["turn 2"]
        assert "took more than" in value(db, "SELECT detail FROM events WHERE kind = 'replay_mismatch'")
        end_agent(stage, 1)
        stage.over()


def test_record_that_takes_long_to_search_is_left_out(db: Database, counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_replay, "LOAD_SECONDS", 0.0)
    with staged(stage_with(db, counter, replay_ignore=["(a|aa)+$"])) as stage:
        several = [user("a" * 24 + "b" * number) for number in (1, 2, 3)]
        key = run_agent(db, 1)
        assert [ask(stage, key, [message]).said for message in several] == ["turn 1", "turn 2", "turn 3"]
        assert converse(stage, lose(stage), several[0], 1) == ["turn 4"]
        assert "took more than 0 s" in value(db, "SELECT detail FROM events WHERE kind = 'replay_mismatch'")
        end_agent(stage, 1)
        stage.over()


def test_text_completions_are_replayed_by_tokens(stage: Stage, counter: Counter) -> None:
    key = run_agent(stage.db, 1)
    first = complete(stage, key, "Once upon")
    assert complete(stage, lose(stage), "Once upon") == first
    assert counter.count == 1


@pytest.fixture
def finished(db: Database, counter: Counter) -> Stage:
    """An ended episode of three turns."""
    with staged(Stage(db, group_of(db), counter.engine, CHAT)) as stage:
        converse(stage, run_agent(db, 1), QUESTION, 3)
        end_agent(stage, 1)
        stage.over()
    return stage


def fork_stage(stage: Stage, step: int, episode: int = 1, name: str = "fork") -> Stage:
    prepared = prepare_fork(stage.db, ForkRequest(episode, step, n=1, name=name))
    (group,) = start(stage.db, prepared.submission)
    return Stage(stage.db, group, stage.engine, CHAT)


def test_fork_of_agents_episode_replays_and_then_draws_anew(finished: Stage, counter: Counter) -> None:
    db, parent = finished.db, episode_of(finished.db, 1)
    with staged(fork_stage(finished, 2)) as stage:
        number = next(iter(stage.driver.recorder.episodes))
        key = run_agent(db, number)
        assert converse(stage, key, QUESTION, 4) == ["turn 1", "turn 2", "turn 4", "turn 5"]
        end_agent(stage, number)
        stage.over()
    record = episode_of(db, number)
    assert (record.status, len(record.steps), record.steps[:2]) == ("done", 4, parent.steps[:2])
    assert [(step.chain, step.parent) for step in record.steps] == [(0, -1), (0, 0), (0, 1), (0, 2)]
    (row,) = rows_of([record])
    trained = tuple(token for token, trains in zip(row.input_ids, row.loss_mask, strict=True) if trains)
    assert trained == (*record.steps[2].sampled_ids, *record.steps[3].sampled_ids)
    assert value(db, f"SELECT count(*) FROM steps WHERE episode_id = {number}") == 2
    with staged(fork_stage(finished, 3, number, "again")) as nested:
        deeper = next(iter(nested.driver.recorder.episodes))
        assert converse(nested, run_agent(db, deeper), QUESTION, 4)[:3] == ["turn 1", "turn 2", "turn 4"]
        assert counter.count == 6


def test_fork_continues_after_lost_agent_and_worker(finished: Stage, counter: Counter) -> None:
    db = finished.db
    forked = fork_stage(finished, 2).enter()
    (number,) = forked.driver.recorder.episodes
    said = converse(forked, run_agent(db, number), QUESTION, 3)
    write(db, "UPDATE agent_attempts SET lease_until = 0 WHERE status = 'running'")
    forked.driver.inbox.put(InboxEvent(forked.group, number, woken=True))
    wait_for(lambda: attempt_held(forked.driver, number) == 1)
    key = wait_for(lambda: values(db, "SELECT id FROM agent_attempts WHERE status = 'pending'")) and run_agent(db, number)
    assert converse(forked, key, QUESTION, 1) == said[:1]
    forked.leave()
    with staged(Stage(db, forked.group, finished.engine, CHAT)) as heir:
        assert converse(heir, key, QUESTION, 4, said[:1]) == [*said, "turn 5"]
        assert [step.chain for step in episode_of(db, number).steps] == [0] * 4


@pytest.mark.parametrize("how", ["contradicts", "ends"])
def test_fork_whose_agent_does_not_repeat_fails(finished: Stage, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.workers.jobs.agent_rollout.WAIT_SECONDS", 0.1)
    db = finished.db
    with staged(fork_stage(finished, 2)) as stage:
        (number,) = stage.driver.recorder.episodes
        key = run_agent(db, number)
        if how == "contradicts":
            assert ask(stage, key, [user("Something else.")]).status == 421
        else:
            converse(stage, key, QUESTION, 2)
            end_agent(stage, number)
        stage.over()
    reason = "did not repeat its requests" if how == "contradicts" else "after the forked step"
    assert reason in value(db, f"SELECT error FROM episodes WHERE id = {number}")


def test_fork_refuses_half_of_several_choices(db: Database, counter: Counter) -> None:
    with staged(Stage(db, group_of(db), counter.engine, CHAT)) as stage:
        ask(stage, run_agent(db, 1), [QUESTION], n=3)
        end_agent(stage, 1)
        stage.over()
    with pytest.raises(StateError, match=r"agentrl fork 1 --step 0"):
        prepare_fork(db, ForkRequest(1, 2, n=1))


def complete(stage: Stage, key: str, prompt: str) -> str:
    host, _, port = stage.driver.server.address.rpartition(":")
    connection = HTTPConnection(host, int(port), timeout=60)
    name = hashlib.sha256(str(time.monotonic_ns()).encode()).hexdigest()[:32]
    headers = {"Authorization": f"Bearer {key}", "X-Agentrl-Request": name, "X-Agentrl-Created": "1700000000"}
    connection.request("POST", "/v1/completions", json.dumps({"model": "m", "prompt": prompt, "max_tokens": 50}), headers)
    document = json.load(connection.getresponse())
    connection.close()
    text: str = document["choices"][0]["text"]
    return text
