"""What agents, tools and hooks say of their episodes: rows once per attempt, read by rewards, replay and SQL."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

import agentrl
from agentrl.cli.main import main
from agentrl.workers.jobs import pending_agents
from agentrl.workers.jobs.sampling_server import sampling_server
from agentrl.workers.jobs.tool_call import run_tool
from agentrl.workers.requests.rescoring import rescore
from agentrl.workflow import emitters
from agentrl.workflow.agents.keys import new_emit_key, sampling_key
from agentrl.workflow.annotations import MAX_AT_ONCE, MAX_DATA, Annotation, rewards_of
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.hooks import Hook
from agentrl.workflow.store import episode_annotations
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import episode_rows
from agentrl.workflow.store.tool_calls import CallWork
from agentrl.workflow.tools import Tool
from agentrl.workflow.trajectory import Episode, Message
from tests.support.agents_stage import LONG_MS, Stage, ask, end_agent, episode_of, group_of, run_agent, staged, user, write
from tests.support.played_runs import value, values
from tests.support.scripted_engine import ScriptedEngine
from tests.support.served_endpoint import Served, endpoint_over
from tests.support.small_models import chat
from tests.workers.test_workers import CALL, ends, in_memory, play, rollout_of

__all__ = ["in_memory"]
CHAT: Chat = chat()
ANSWER = CHAT.turn(Message("assistant", "#### 42"))
ASK = CHAT.turn(Message("assistant", "", tool_calls=(CALL.call,)))
QUESTION = user("How much is 6*7?")
ONE = {"id": "one", "kind": "annotation", "name": "note", "data": {"a": 1}}


@pytest.fixture
def db(own_database: Database, in_memory: None) -> Iterator[Database]:
    pending_agents._replies.forget()
    sampling_server.forget()
    yield own_database
    pending_agents._replies.forget()
    sampling_server.forget()


@pytest.fixture
def stage(db: Database) -> Iterator[Stage]:
    with staged(Stage(db, group_of(db), ScriptedEngine(lambda request: ANSWER), CHAT)) as entered:
        yield entered


@pytest.fixture
def served(stage: Stage) -> Iterator[Served]:
    with endpoint_over(stage.db) as found:
        yield found


def began(stage: Stage) -> tuple[int, str]:
    """The only episode, whose agent has begun, and the key of its annotations."""
    (number,) = stage.driver.recorder.episodes
    key = new_emit_key()
    run_agent(stage.db, number, sampling_key(key))
    write(stage.db, f"UPDATE groups SET lease_until = {LONG_MS}")  # the endpoint forwards to who holds it
    return number, key


def emit(served: Served, key: str, *said: Any) -> httpx2.Response:
    sent, headers = json.dumps({"annotations": list(said)}), {"authorization": f"Bearer {key}"}
    return httpx2.post(f"{served.url}/v1/annotations", content=sent, headers=headers, timeout=30, verify=False)


def test_annotations_may_be_an_empty_list(stage: Stage, served: Served) -> None:
    _, key = began(stage)
    answer = emit(served, key)
    assert (answer.status_code, answer.json()) == (200, {"annotations": 0})
    assert value(stage.db, "SELECT count(*) FROM annotations") == 0


def test_sampling_server_logs_errors_and_answers_in_openai_shape(
    stage: Stage, served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("a key that no log may hold")

    _, key = began(stage)
    monkeypatch.setattr("agentrl.workers.jobs.sampling_server.add_annotations", fail)
    answer = emit(served, key, ONE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    monkeypatch.setattr(stage.driver, "take", fail)
    reply = ask(stage, sampling_key(key), [QUESTION])
    assert (reply.status, reply.code) == (500, "internal_error")
    logged = [record.getMessage() for record in caplog.records if record.name == "agentrl.sampling_server"]
    assert [said.partition(" req_")[0] for said in logged] == ["call"] * 2
    assert all("KeyError in fail:" in said and "no log may hold" not in said for said in logged)


SAYS = """
import subprocess, sys
import agentrl
agentrl.emit_reward({"exact": True, "short": 0.25})
agentrl.emit_reward(0.5, step=0)
agentrl.emit_message("adding first", plan=[1, 2])
agentrl.emit_object({"x": None}, name="state")
agentrl.emit_annotation({"depth": 3}, name="tree", step=0)
try:
    1 / 0
except ZeroDivisionError as error:
    agentrl.emit_exception(error)
with agentrl.operation("search", query="Paris"):
    pass

@agentrl.operation
def looked_up():
    return 7

assert looked_up() == 7
if sys.argv[1:] != ["child"]:
    subprocess.run([sys.executable, "-P", "-c", "import agentrl; agentrl.emit_message('from a child')"], check=True)
"""


def test_annotations_of_agent_and_children_become_rows(
    stage: Stage, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    number, key = began(stage)
    assert ask(stage, sampling_key(key), [QUESTION]).status == 200
    environment = {emitters.EMIT_URL: f"{served.url}/v1/annotations", emitters.EMIT_KEY: key}
    subprocess.run([sys.executable, "-P", "-c", SAYS], env=environment, check=True, timeout=120)
    end_agent(stage, number)
    stage.over()
    said = episode_of(stage.db, number).annotations
    assert [(each.kind, each.name, each.step) for each in said] == [
        ("reward", "exact", 0),
        ("reward", "short", 0),
        ("reward", "reward", 0),
        ("message", "", 0),
        ("object", "state", 0),
        ("annotation", "tree", 0),
        ("exception", "ZeroDivisionError", 0),
        ("operation", "search", 0),
        ("operation", "looked_up", 0),
        ("message", "", 0),
    ]
    assert said[3].data == {"message": "adding first", "plan": [1, 2]}
    assert "ZeroDivisionError: division by zero" in said[6].data["traceback"]
    assert said[7].seconds is not None
    assert said[7].data == {"query": "Paris"}
    assert said[9].data == {"message": "from a child"}
    assert values(stage.db, "SELECT count(*) FROM v_annotations WHERE source = 'agent'") == [10]
    parts = dict(row.split("=") for row in values(stage.db, "SELECT part || '=' || weight FROM v_rewards WHERE part <> 'x'"))
    assert {name: float(weight) for name, weight in parts.items() if name in ("exact", "short", "reward")} == {
        "exact": 0.0,  # the run has rewards of its own
        "short": 0.0,
        "reward": 0.0,
    }
    assert main(["replay", str(number)]) == 0
    shown = capsys.readouterr().out
    assert 'agent said: reward short  {"value": 0.25}' in shown
    assert main(["replay", str(number), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["annotations"]) == 10


def notes(episode: Episode) -> float:
    """A reward that reads what was said."""
    return float(sum(each.kind == "message" for each in episode.annotations))


def test_reward_reads_annotations_when_scoring_and_rescoring(db: Database) -> None:
    named = f"{__name__}:notes"
    group = group_of(db, agent={"name": "tests.support.agents_stage:nobody", "own_rewards": True}, rewards={named: 1.0})
    with staged(Stage(db, group, ScriptedEngine(lambda request: ANSWER), CHAT)) as stage, endpoint_over(db) as served:
        number, key = began(stage)
        ask(stage, sampling_key(key), [QUESTION])
        message = {"kind": "message", "data": {"message": "hm"}}
        assert emit(served, key, {**message, "id": "a"}, {**message, "id": "b"}).json() == {"annotations": 2}
        earned = {"kind": "reward", "name": "own", "data": {"value": 0.5}}
        assert emit(served, key, {**earned, "id": "c"}).status_code == 200
        end_agent(stage, number)
        stage.over()
    parts = values(db, "SELECT part || ' ' || value || ' ' || weight FROM v_rewards ORDER BY part")
    assert "own 0.5 1.0" in parts, "it was asked for"
    assert rescore(db, str(value(db, "SELECT name FROM runs")), [named], "again")["mean"] == 2.0


def test_annotations_are_written_once_and_never_after_the_end(stage: Stage, served: Served) -> None:
    number, key = began(stage)
    assert emit(served, key, ONE).status_code == 200
    assert emit(served, key, ONE, {**ONE, "id": "two"}).status_code == 200
    assert values(stage.db, "SELECT emission FROM annotations ORDER BY id") == ["one", "two"]
    assert values(stage.db, "SELECT count(*) FROM annotations WHERE step IS NULL") == [2]
    ask(stage, sampling_key(key), [QUESTION])
    end_agent(stage, number)
    stage.over()
    answer = emit(served, key, {**ONE, "id": "late"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "episode_over")
    assert len(episode_of(stage.db, number).annotations) == 2


def test_annotations_refuse_sampling_and_foreign_keys(stage: Stage, served: Served) -> None:
    _, key = began(stage)
    for wrong in (sampling_key(key), sampling_key(sampling_key(key)), "stranger", "x" * 300):
        assert emit(served, wrong, ONE).status_code == 401
    here = httpx2.post(
        f"http://{stage.driver.server.address}/v1/annotations",
        json={"annotations": [ONE]},
        headers={"authorization": f"Bearer {sampling_key(key)}"},
    )
    assert here.status_code == 421, "nor where the rollout itself is asked"
    assert values(stage.db, "SELECT count(*) FROM annotations") == [0]


DEEP: Any = {}
for _ in range(40):
    DEEP = {"a": DEEP}


NO_ANNOTATIONS: list[tuple[Any, str]] = [
    ("words", "an annotation must be an object"),
    ({**ONE, "more": 1}, "an annotation must be an object"),
    ({**ONE, "id": ""}, "id must be a text"),
    ({**ONE, "id": "A" * 65}, "id must be a text"),
    ({**ONE, "id": 7}, "id must be a text"),
    ({**ONE, "kind": "spam"}, "kind must be one of"),
    ({**ONE, "name": "x" * 129}, "name must be a text"),
    ({**ONE, "step": -1}, "step must be the index"),
    ({**ONE, "step": 2**40}, "step must be the index"),
    ({**ONE, "step": True}, "step must be the index"),
    ({**ONE, "step": 3}, "has no step 3 yet"),
    ({**ONE, "seconds": -1}, "seconds must be a number"),
    ({**ONE, "data": [1]}, "data must be an object"),
    ({**ONE, "data": DEEP}, "levels deep"),
    ({**ONE, "data": {"a": "x" * MAX_DATA}}, f"at most {MAX_DATA} bytes"),
    ({**ONE, "kind": "reward", "data": {"value": "much"}}, "a reward must be a finite number"),
    ({**ONE, "kind": "reward", "data": {"value": 1e31}}, "a reward must be a finite number"),
    ({**ONE, "kind": "reward", "data": {"value": True}}, "a reward must be a finite number"),
    ({**ONE, "kind": "reward", "name": "", "data": {"value": 1}}, "a reward must have a name"),
]


def test_annotations_refuse_invalid_entry_with_reason(stage: Stage, served: Served) -> None:
    _, key = began(stage)
    for said, why in NO_ANNOTATIONS:
        answer = emit(served, key, said)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_annotation"), said
        assert why in answer.json()["error"]["message"], said
        assert values(stage.db, "SELECT count(*) FROM annotations") == [0], said


NO_LISTS = [b"", b"[]", b"{", b"[" * 100_000, b'{"annotations": NaN}', b'{"annotations": 7}', b'{"annotations":[],"a":1}']


def test_annotations_refuse_body_that_is_not_a_list(stage: Stage, served: Served) -> None:
    _, key = began(stage)
    for body in NO_LISTS:
        sent = httpx2.post(f"{served.url}/v1/annotations", content=body, headers={"authorization": f"Bearer {key}"})
        assert (sent.status_code, sent.json()["error"]["code"]) == (400, "invalid_annotation"), body[:40]


def test_annotations_are_limited_in_number_and_size(stage: Stage, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    _, key = began(stage)
    assert emit(served, key, *({**ONE, "id": str(n)} for n in range(MAX_AT_ONCE + 1))).status_code == 400
    monkeypatch.setattr(episode_annotations, "MAX_OF_ATTEMPT", 2)
    assert emit(served, key, ONE).status_code == 200
    assert "at most 2" in emit(served, key, {**ONE, "id": "two"}, {**ONE, "id": "three"}).json()["error"]["message"]
    odd = {**ONE, "id": "odd", "name": "\udc00\x00", "data": {"\x00": "\ud800"}}
    assert emit(served, key, odd).status_code == 200
    assert values(stage.db, "SELECT name FROM annotations WHERE emission = 'odd'") == ["?\ufffd"]


# tools and hooks


def scores(number: int) -> str:
    """Says what it thinks of the episode."""
    agentrl.emit_reward(number / 4, name="progress")
    with agentrl.operation("inside"):
        return "noted"


def test_tool_annotations_come_with_its_result() -> None:
    told = run_tool(Tool(scores), CallWork(7, "math", "scores", {"number": 3}, "none"))
    assert [(each.id, each.source, each.kind, each.name) for each in told.annotations] == [
        ("call:7:0", "tool", "reward", "progress"),
        ("call:7:1", "tool", "operation", "inside"),
    ]
    assert told.annotations[0].data == {"value": 0.75}


class Talks(Hook):
    """Says something at every place."""

    def on_rollout_start(self, episode: Episode) -> None:
        agentrl.emit_message("begins")

    def on_trace_end(self, episode: Episode) -> None:
        agentrl.emit_annotation({"steps": len(episode.steps)}, name="seen")

    def on_rollout_end(self, episode: Episode) -> None:
        agentrl.emit_reward(7.0)


def test_hook_annotations_are_kept_once_and_are_no_reward(sqlite: Database) -> None:
    play(rollout_of(sqlite, [ANSWER, ANSWER], hooks=[f"{__name__}:Talks"]), turns=2)
    ((status, _, _, reward),) = ends(sqlite)
    assert (status, reward) == ("done", 0.5)
    of_one = "FROM v_annotations WHERE episode_id = 1 ORDER BY id"
    said = values(sqlite, f"SELECT kind || ' ' || coalesce(step, -1) || ' ' || source {of_one}")
    assert said == ["message -1 hook", "annotation 0 hook", "reward 0 hook"]
    names = values(sqlite, "SELECT emission FROM annotations WHERE episode_id = 1 ORDER BY id")
    assert names == ["hook:0:on_rollout_start:0:0", "hook:0:on_trace_end:1:0", "hook:score:0"]


def test_annotations_outside_episode_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(emitters.EMIT_KEY, raising=False)
    agentrl.emit_reward(1.0)
    with pytest.raises(ZeroDivisionError), agentrl.operation("fails"):
        raise ZeroDivisionError


def test_operation_records_exception_and_whole_async_time() -> None:
    import asyncio

    said: list[Annotation] = []

    @agentrl.operation("slow", size=2)
    async def slow() -> int:
        await asyncio.sleep(0.01)
        return 3

    with emitters.collected(said, "tool", "test"):
        assert asyncio.run(slow()) == 3
        with pytest.raises(ValueError, match="no"), agentrl.operation("fails"):
            raise ValueError("no")
        with pytest.raises(agentrl.AgentRLError, match="A reward must be a finite number"):
            agentrl.emit_reward(float("nan"))
    assert [(each.name, dict(each.data)) for each in said] == [("slow", {"size": 2}), ("fails", {"error": "ValueError: no"})]
    assert said[0].seconds is not None
    assert said[0].seconds >= 0.01


def test_emitted_reward_is_of_episode_or_step_and_last_counts() -> None:
    def said(number: float, step: int | None = None, source: str = "agent") -> Annotation:
        data = {"value": number} if step is None else {"value": number, "step": step}
        return Annotation("x", "reward", "r", data, step, None, source)

    assert rewards_of([said(1.0), said(0.5)], 2) == {"r": 0.5}
    assert rewards_of([said(1.0, 0), said(0.25, 0), said(2.0, 1), said(0.5)], 3) == {"r": (0.25, 2.0, 0.5)}
    assert rewards_of([said(1.0, source="hook"), said(1.0, 9)], 2) == {}


def rate(served: Served, key: str, *rewards: Any) -> httpx2.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx2.post(f"{served.url}/v1/annotations", json={"rewards": list(rewards)}, headers=headers, timeout=30)


def test_rewards_name_the_response_that_earned_them(stage: Stage, served: Served) -> None:
    number, key = began(stage)
    calls = [ask(stage, sampling_key(key), [user(f"How much is 6*{n}?")], n=n).document["id"] for n in (1, 2)]
    given = [{"response": calls[0], "value": 1}, {"response": calls[1], "value": -0.5, "name": "thumbs", "choice": 1}]
    assert rate(served, key, *given).json() == {"annotations": 2}
    end_agent(stage, number)
    stage.over()
    found = rewards_of(episode_rows.find_episode(stage.db, number).episode.annotations, 3)
    assert found == {"reward": (1.0, 0.0, 0.0), "thumbs": (0.0, 0.0, -0.5)}


def test_rewards_of_unknown_responses_are_refused(stage: Stage, served: Served) -> None:
    _, key = began(stage)
    mine = ask(stage, sampling_key(key), [QUESTION]).document["id"]
    bad: list[Any] = [
        {"response": mine[:-1] + ("0" if mine[-1] != "0" else "1"), "value": 1},
        {"response": mine, "value": 1, "choice": 1},
        {"response": mine, "value": 1, "choice": True},
        {"response": mine, "value": 1, "choice": 10**30},
        {"response": mine, "value": "1"},
        {"response": mine, "value": 1e31},
        {"response": mine, "value": 1, "name": ""},
        {"response": mine, "value": 1, "step": 0},
        {"response": [mine], "value": 1},
        {"response": "x" * 10_000, "value": 1},
        {"value": 1},
        7,
    ]
    assert [rate(served, key, reward).status_code for reward in bad] == [400] * len(bad)
    assert rate(served, key, *[{"response": mine, "value": 1}] * (MAX_AT_ONCE + 1)).status_code == 400
    assert rate(served, sampling_key(key), {"response": mine, "value": 1}).status_code == 401
    assert not values(stage.db, "SELECT id FROM annotations")
