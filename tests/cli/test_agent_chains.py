"""Commands on episodes of an agent whose calls make several chains."""

from collections.abc import Iterator
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.workers.jobs import pending_agents
from agentrl.workers.jobs.sampling_server import sampling_server
from agentrl.workflow.store.connect import Database
from agentrl.workflow.trajectory import Message
from tests.support.agents_stage import Stage, ask, end_agent, group_of, run_agent, staged, user
from tests.support.small_models import chat
from tests.workers.test_agent_rollout import Policy
from tests.workers.test_workers import in_memory as in_memory

QUESTION = user("How much is 6*7?")
OTHERS = ([user("And 6*8?")], [user("And 6*9?")], [QUESTION, {"role": "assistant", "content": "41"}, user("sure?")])


@pytest.fixture
def two(own_database: Database, in_memory: None) -> Iterator[Database]:
    """Two episodes of one task, whose agents said the same in another order; the second one's last turn was not read."""
    pending_agents._replies.forget()
    sampling_server.forget()
    said = chat().turn(Message("assistant", "#### 42"))
    with staged(Stage(own_database, group_of(own_database, size=2), Policy(said).engine, chat())) as stage:
        for number, others in ((1, OTHERS), (2, OTHERS[::-1])):
            key = run_agent(own_database, number)
            for messages in ([QUESTION], *others):
                ask(stage, key, messages)
            end_agent(stage, number)
        stage.over()
    yield own_database
    pending_agents._replies.forget()
    sampling_server.forget()


def told(capsys: pytest.CaptureFixture[str], *words: Any, code: int = 0) -> str:
    assert main([*map(str, words)]) == code
    return capsys.readouterr().out


def test_verify_accepts_agent_calls_in_other_order(two: Database, capsys: pytest.CaptureFixture[str]) -> None:
    assert "the same" in told(capsys, "replay", 1, "--diff", 2).splitlines()[-1]
    assert "4 chains" in told(capsys, "replay", 1)


def test_views_show_row_and_reason_of_each_chain(two: Database, capsys: pytest.CaptureFixture[str]) -> None:
    query = "SELECT chain, new_row FROM v_steps WHERE episode_id = 2 ORDER BY chain"
    shown = told(capsys, "sql", query)
    assert "no earlier turn has these messages" in shown
    assert len(shown.splitlines()) == 5
    assert "2" in told(capsys, "sql", "SELECT count(*) AS episodes FROM v_ledger")


def test_rescore_takes_final_answer_of_several_chains(two: Database, capsys: pytest.CaptureFixture[str]) -> None:
    run = told(capsys, "sql", "SELECT name FROM runs").splitlines()[-1].strip()
    said = told(capsys, "rescore", run, "--reward", "numeric_answer", "--name", "again")
    assert "reward set again, 2 episodes scored" in said
