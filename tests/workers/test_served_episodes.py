"""The episodes of `agentrl serve` while the database is away, or an error strikes: none is lost, none stays open for ever."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from agentrl.workers.jobs import sampling_server
from agentrl.workers.jobs.agent_rollout import AgentRollout
from agentrl.workers.jobs.served_episodes import OpenEpisode, ServedEpisodes
from agentrl.workers.requests.serve_request import serve_config, serve_submission
from agentrl.workflow.config import build
from agentrl.workflow.errors import DeviceLost, ServiceError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.store import agent_attempts, served_runs
from agentrl.workflow.store.connect import Database
from agentrl.workflow.trajectory import Message, PolicyRef
from tests.support.agents_stage import wait_for
from tests.support.scripted_engine import ScriptedEngine
from tests.support.small_models import chat

CHAT = chat()
ANSWER = CHAT.turn(Message("assistant", "#### 42"))


@dataclass
class Stage:
    db: Database
    episodes: ServedEpisodes

    def open(self) -> OpenEpisode:
        return self.episodes.open("client").result(30)

    def ask(self, opened: OpenEpisode) -> int:
        """The status of a call, which comes again while nobody holds its episode, as the endpoint's does."""
        deadline = time.monotonic() + 30
        while (status := self._ask(opened)) == 421 and time.monotonic() < deadline:
            time.sleep(0.05)
        return status

    def _ask(self, opened: OpenEpisode) -> int:
        body = json.dumps({"messages": [{"role": "user", "content": "How much is 6*7?"}]})
        headers = {"Authorization": f"Bearer {opened.key}", "X-Agentrl-Request": "0" * 32}
        connection = HTTPConnection(self.episodes.server.address, timeout=30)
        connection.request("POST", "/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status

    def rows(self, query: str) -> Sequence[Any]:
        with self.db.read() as tx:
            return [tuple(row) for row in tx.execute(text(query))]


@pytest.fixture
def stage(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr("agentrl.workers.jobs.inbox.POLL_SECONDS", 0.1)
    monkeypatch.setattr("agentrl.workers.jobs.served_episodes.POLL_SECONDS", 0.1)
    config = serve_config(build({"model.path": "tiny"}), None, {})
    run = served_runs.open_run(
        database, serve_submission(database, config, PolicyRef("tiny", "hash"), "", None), "host:1/a", 60
    )
    policy: Any = SimpleNamespace(
        engine=ScriptedEngine(lambda request: ANSWER), chat=CHAT, policy=SimpleNamespace(max_context=2048)
    )
    served = ServedEpisodes(database, run, Experiment(config), policy, sampling_server.start(lambda: database, "127.0.0.1"))
    served.start()
    try:
        yield Stage(database, served)
    finally:
        served.close()


def failing(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, error: Exception, times: int = 1) -> None:
    """The next calls of that name fail."""
    whole: Callable[..., Any] = getattr(target, name)
    left = [error] * times

    def fails(*args: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return whole(*args, **named)

    monkeypatch.setattr(target, name, fails)


def test_served_run_that_was_lost_ends_at_second_check(stage: Stage) -> None:
    config = serve_config(build({"model.path": "tiny"}), None, {})
    submission = serve_submission(stage.db, config, PolicyRef("tiny", "hash"), "", None)
    served_runs.open_run(stage.db, submission, "host:2/b", -1.0)
    stage.db.write(lambda tx: tx.execute(text("UPDATE iterations SET lease_until = 0")))  # also this server's own: it slept
    for statuses in (["running", "running"], ["running", "done"], ["running", "done"]):
        stage.episodes._end_lost_runs()
        assert [status for (status,) in stage.rows("SELECT status FROM runs ORDER BY id")] == statuses


AWAY = ServiceError("The database does not answer.", "Start it.")


def test_served_episode_end_is_written_after_database_outage(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = stage.open()
    assert stage.ask(opened) == 200
    failing(monkeypatch, agent_attempts, "finish_agent", AWAY, times=3)
    stage.episodes.end(opened.id, "42", {"liked": 0.5}).result(30)
    assert stage.rows("SELECT status, reward, final_answer FROM episodes") == [("done", 0.5, "42")]
    assert not stage.episodes.is_open(opened.id)


@pytest.mark.parametrize("when", ["start", "_begin", "_commit", "_judge_agents"])
def test_served_episode_continues_after_database_outage(stage: Stage, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    failing(monkeypatch, AgentRollout, when, AWAY, times=2)
    opened = stage.open()
    assert stage.ask(opened) == 200
    stage.episodes.end(opened.id).result(30)
    assert stage.rows("SELECT status, steps, attempt FROM episodes") == [("done", 1, 0)]
    assert stage.rows("SELECT count(*) FROM steps") == [(1,)]


def test_served_episode_failure_leaves_others_running(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = stage.open(), stage.open()
    failing(monkeypatch, AgentRollout, "_commit", RuntimeError("broken"))
    assert stage._ask(first) in (409, 421)
    wait_for(lambda: not stage.episodes.is_open(first.id))
    assert stage.ask(second) == 200
    assert stage.rows("SELECT status FROM episodes ORDER BY id")[0] == ("infra_error",)


def test_serve_ends_if_device_is_lost(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """No later call could be sampled: the process has to be started again, which `agentrl serve` says with its exit code."""
    opened = stage.open()
    lost = DeviceLost("CUDA error: unspecified launch failure")
    failing(monkeypatch, AgentRollout, "_begin", lost)
    stage._ask(opened)  # its episode is no longer held here
    assert stage.episodes.lost.wait(30)
    assert stage.episodes.failure is lost
    assert stage.rows("SELECT failures FROM groups") == [(0,)]


def test_served_run_cleanup_failure_is_harmless(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.episodes.forgets = True
    failing(monkeypatch, served_runs, "forget_ended", RuntimeError("broken"))
    for _ in range(2):
        opened = stage.open()
        assert stage.ask(opened) == 200
        stage.episodes.end(opened.id).result(30)
    wait_for(lambda: stage.rows("SELECT count(*) FROM episodes")[0][0] <= 1)
