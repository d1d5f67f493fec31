"""Coding agents of npm (`make clients`), unmodified, are killed with -9 and started again: they get the recorded turns."""

import itertools
import os
import signal
import threading
from pathlib import Path

import pytest

from agentrl.workflow.store.connect import Database
from agentrl.workflow.training.training_rows import rows_of
from agentrl.workflow.trajectory import Message
from tests.clients.test_npm_clients import CALLS, ROOM, check_rows, coding_agents, run_coding_agent, start_coding_agent, turn_of
from tests.support.agents_stage import AGENT, Stage, episode_of, group_of, run_agent, staged, wait_for
from tests.support.played_runs import value
from tests.support.scripted_engine import ScriptedEngine
from tests.support.served_endpoint import endpoint_over
from tests.workers.test_agent_endpoint import held
from tests.workers.test_agent_replay import lose
from tests.workers.test_agent_rollout import CHAT
from tests.workers.test_agent_rollout import db as db
from tests.workers.test_workers import in_memory as in_memory

pytestmark = pytest.mark.slow


def folders(tmp_path: Path) -> list[Path]:
    """Two folders with names like those that an agents worker makes."""
    return [tmp_path / f"agentrl-agent-{letter * 7}_" for letter in "ab"]


@coding_agents
def test_killed_coding_agent_gets_recorded_turn(db: Database, tmp_path: Path, name: str) -> None:
    (first, second), let = folders(tmp_path), threading.Semaphore(0)
    call, done = turn_of(CALLS[name]), CHAT.turn(Message("assistant", "It is done."))
    turns = itertools.chain([call], itertools.repeat(done))
    engine = ScriptedEngine(lambda _request: next(turns), pace=lambda: let.acquire(timeout=120))
    with staged(Stage(db, group_of(db), engine, CHAT, ROOM)) as stage, endpoint_over(db) as served:
        held(stage)
        with start_coding_agent(name, served.url, run_agent(db, 1), first) as process:
            let.release(len(call) + 2)
            wait_for(lambda: stage.driver._conversations[1].count == 2)  # the command has run; its result is being answered
            os.killpg(process.pid, signal.SIGKILL)
        recorded = episode_of(db, 1).steps[0]
        key = lose(stage)
        held(stage)
        let.release(1000)
        assert "It is done." in run_coding_agent(name, served.url, key, second)
        check_rows(db)
        assert episode_of(db, 1).steps[0].prompt_ids == recorded.prompt_ids
        assert value(db, "SELECT count(*) FROM steps WHERE replayed") == 1


@coding_agents
def test_coding_agent_lost_at_its_end_is_replayed_exactly(db: Database, tmp_path: Path, name: str) -> None:
    turns = [turn_of(CALLS[name]), CHAT.turn(Message("assistant", "It is done."))]
    engine = ScriptedEngine(lambda _request: turns.pop(0))
    agent = {**AGENT, "replay_ignore": [r"PGID: \d+"]}  # qwen-code tells the model the number of the command's process group
    with staged(Stage(db, group_of(db, agent=agent), engine, CHAT, ROOM)) as stage, endpoint_over(db) as served:
        held(stage)
        key = run_agent(db, 1)
        for folder in folders(tmp_path):
            assert "It is done." in run_coding_agent(name, served.url, key, folder)
            check_rows(db)
            rows = rows_of([episode_of(db, 1)])
            if folder.name.startswith("agentrl-agent-a"):
                before, key = rows, lose(stage)
                held(stage)
        assert rows == before
        assert not turns
