"""The agents job: what it makes of an agent that is lost, with real rows; how agents end by themselves is in tests/agents."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl.workers.agents import agents_job, processes
from agentrl.workers.jobs import pending_agents
from agentrl.workers.jobs.sampling_server import sampling_server
from agentrl.workers.stack.dispatch import NO_REPLY
from agentrl.workers.stack.listening import accepts_connections, bind, url_of
from agentrl.workflow.agents import CLOCK, LLM
from agentrl.workflow.agents.agent_limits import check_held
from agentrl.workflow.config import AgentConfig
from agentrl.workflow.errors import ConfigError, InfraError, ServiceError
from agentrl.workflow.store import agent_holds, leases
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.endpoint_reads import ENDPOINT
from tests.support.agents_stage import AGENT, Stage, group_of, staged, wait_for
from tests.support.played_runs import value, values
from tests.support.scripted_engine import ScriptedEngine
from tests.support.small_models import chat
from tests.workers.test_workers import in_memory as in_memory


@pytest.fixture
def stage(own_database: Database, in_memory: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A group that waits for its agents."""
    yield from waiting(own_database, monkeypatch, AGENT)


@pytest.fixture(params=[False, True], ids=["process", "sandbox"])
def telling_time(
    request: pytest.FixtureRequest, own_database: Database, in_memory: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stage]:
    """A group whose agent answers with the time that it reads."""
    agent = {"name": f"{__name__}:tell_time", "frozen_clock": True, "sandbox": request.param}
    try:
        check_held(AgentConfig.model_validate(agent))
    except ConfigError as error:
        pytest.skip(str(error))
    yield from waiting(own_database, monkeypatch, agent)


def waiting(database: Database, monkeypatch: pytest.MonkeyPatch, agent: dict[str, Any]) -> Iterator[Stage]:
    pending_agents._replies.forget()
    sampling_server.forget()
    monkeypatch.setattr(agents_job, "_endpoint_url", lambda: "http://127.0.0.1:1")
    with staged(Stage(database, group_of(database, agent=agent), ScriptedEngine(lambda request: ()), chat())) as made:
        yield made
    pending_agents._replies.forget()
    sampling_server.forget()


def tell_time(task: Any, llm: Any) -> str:
    times, monotonic = (time.time(), datetime.now(UTC).timestamp()), time.monotonic()
    time.sleep(0.05)
    again = (time.time(), datetime.now(UTC).timestamp())
    return f"{times[1]} {times == again} {time.monotonic() - monotonic >= 0.05}"


def test_frozen_clock_is_that_of_first_attempt(telling_time: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = telling_time

    def lost(*_: Any) -> None:
        raise InfraError("The agent's supervisor process is gone.")

    with monkeypatch.context() as patched:
        patched.setattr(processes, "run", lost)
        agents_job.agent(1, 0, NO_REPLY)
    wake(stage)
    wait_for(lambda: value(stage.db, "SELECT max(attempt) FROM agent_attempts") == 1)
    agents_job.agent(1, 1, NO_REPLY)
    moment, *checks = value(stage.db, "SELECT answer FROM agent_attempts WHERE attempt = 1").split()
    began = datetime.fromisoformat(value(stage.db, "SELECT started_at FROM agent_attempts WHERE attempt = 0"))
    assert float(moment) == pytest.approx(began.replace(tzinfo=UTC).timestamp(), abs=1e-5)
    assert checks == ["True", "True"], "the clock stands still, and durations do not"


def test_agent_without_supervisor_restarts_limited_times(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> None:
        raise InfraError("The agent's supervisor process is gone.")

    monkeypatch.setattr(processes, "run", lost)
    for attempt in range(5):
        wait_for(lambda n=attempt: value(stage.db, "SELECT max(attempt) FROM agent_attempts") == n)
        agents_job.agent(1, attempt, NO_REPLY)
        found = agent_holds.load_agents(stage.db, stage.group, 60.0)
        assert all(state.status != "running" for state in found.values())
        wake(stage)
    stage.over()
    assert values(stage.db, "SELECT DISTINCT status || ' ' || error_class FROM agent_attempts") == ["lost killed"]
    assert value(stage.db, "SELECT status FROM episodes") == "infra_error"


def test_function_run_as_program_reads_frozen_clock(tmp_path: Path) -> None:
    """As in the sandbox, without the sandbox."""
    (tmp_path / "task.json").write_text(json.dumps({"key": "t/1", "messages": []}))
    files = {"AGENTRL_TASK": str(tmp_path / "task.json"), "AGENTRL_ANSWER": str(tmp_path / "answer.json")}
    model = LLM("http://127.0.0.1:1/v1", "key", "m").variables
    command = [sys.executable, "-m", "agentrl.workers.agents.function", f"{__name__}:tell_time"]
    subprocess.run(command, check=True, env=os.environ | model | files | {CLOCK: "1700000000.5"})
    assert json.loads((tmp_path / "answer.json").read_text())["text"] == "1700000000.5 True True"


def wake(stage: Stage) -> None:
    from agentrl.workers.jobs.inbox import InboxEvent

    stage.driver.inbox.put(InboxEvent(stage.group, 1, woken=True))


def test_agent_waits_for_endpoint_that_accepts_connections(own_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart of the stack, the stored URL is that of the endpoint before, until its successor stores its own."""
    monkeypatch.setattr(agents_job, "database", lambda: own_database)
    with closing(bind("127.0.0.1", 0)) as ended:
        old = url_of(ended)
    leases.publish_service(own_database, ENDPOINT, old, 60.0)
    with closing(bind("127.0.0.1", 0)) as successor:
        url = url_of(successor)
        store = partial(leases.publish_service, own_database, ENDPOINT, url, 60.0)
        threading.Timer(0.5, store).start()
        assert agents_job._endpoint_url() == url
    assert not accepts_connections("http://127.0.0.1:none"), "an invalid AGENTRL_ENDPOINT_URL"
    monkeypatch.setattr(agents_job, "URL_SECONDS", 0.1)
    with pytest.raises(ServiceError, match=f"Nothing listens at {url}"):
        agents_job._endpoint_url()
