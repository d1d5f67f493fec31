"""The agents job: what it makes of an agent that is lost, with real rows; how agents end by themselves is in tests/agents."""

from collections.abc import Iterator
from typing import Any

import pytest

from agentrl.workers.agents import agents_job, processes
from agentrl.workers.jobs import pending_agents
from agentrl.workers.jobs.sampling_server import sampling_server
from agentrl.workers.stack.dispatch import NO_REPLY
from agentrl.workflow.errors import InfraError
from agentrl.workflow.store import agent_holds
from agentrl.workflow.store.connect import Database
from tests.support.agents_stage import Stage, group_of, staged, wait_for
from tests.support.played_runs import value, values
from tests.support.scripted_engine import ScriptedEngine
from tests.support.small_models import chat
from tests.workers.test_workers import in_memory as in_memory


@pytest.fixture
def stage(own_database: Database, in_memory: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A group that waits for its agents."""
    pending_agents._replies.forget()
    sampling_server.forget()
    monkeypatch.setattr(agents_job, "_endpoint_url", lambda: "http://127.0.0.1:1")
    with staged(Stage(own_database, group_of(own_database), ScriptedEngine(lambda request: ()), chat())) as made:
        yield made
    pending_agents._replies.forget()
    sampling_server.forget()


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


def wake(stage: Stage) -> None:
    from agentrl.workers.jobs.inbox import InboxEvent

    stage.driver.inbox.put(InboxEvent(stage.group, 1, woken=True))
