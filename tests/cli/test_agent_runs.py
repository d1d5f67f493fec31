"""A run whose episodes an agent made, looked at by every command: the rows are made by hand, on both databases."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from agentrl.workers.requests import requirements
from agentrl.workers.stack.celery_app import make_app
from agentrl.workflow.config import RunConfig
from agentrl.workflow.settings import settings
from agentrl.workflow.store import rollout_claims, steps
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads.search_tree import load_search_tree
from agentrl.workflow.store.rollout_claims import Outcome
from tests.cli.test_cli import agentrl
from tests.cli.test_cli import data as data
from tests.cli.test_cli import tcp_redis as tcp_redis
from tests.search.test_search_rows import BETTER, SEED, add_and_roll_out, begun
from tests.support.played_runs import CALL, claim, sampled, start, submission
from tests.support.small_models import tiny_random

OUTSIDE = (
    "UPDATE tool_calls SET kind = 'agent', status = 'done', result = '42' WHERE step = 0",
    "UPDATE tool_calls SET kind = 'agent', status = 'unobserved' WHERE step = 1",
    "UPDATE steps SET delivered = :no WHERE number = 1",
)
SAID = """
    INSERT INTO agent_attempts (run, episode_id, attempt, status, error_class, error, output)
    VALUES ('outside', :id, 0, 'ended', 'RuntimeError', :error, :output)"""


@pytest.fixture
def outside(data: Database) -> str:
    """Two episodes: one whose agent raised after two turns, one whose agent raised before it asked anything."""
    asked = submission("outside", tasks=1)
    config = RunConfig.model_validate({**asked.config, "agent": "my_agent:solve"})
    (group,) = start(data, replace(asked, config=config.model_dump(mode="json")))
    work = claim(data, group)
    steps.commit_sampled(data, work.fence, [sampled(work, 0, 0, (CALL,))])
    data.write(lambda tx: tx.execute(text(OUTSIDE[0])))
    steps.commit_sampled(data, work.fence, [sampled(work, 0, 1, (CALL,))])
    data.write(lambda tx: [tx.execute(text(OUTSIDE[1])), tx.execute(text(OUTSIDE[2]), {"no": False})])
    first, second = (episode.id for episode in work.episodes)
    ends = [
        Outcome(
            first, "done", "agent_error", 1.0, {"numeric_answer": 1.0}, "42", "RuntimeError", "RuntimeError: boom\n\x1b[2Jowned"
        ),
        Outcome(second, "failed", error_class="AgentError", error="KeyError: 'x'\n\x1b[2Jowned"),
    ]
    rollout_claims.finish_episodes(data, work.fence, ends, work.reward_set, work.weights)
    said = {"id": first, "error": "RuntimeError: boom\n\x1b[2Jowned" + "x" * 5000, "output": "step 1\n\x1b[2Jowned\n"}
    data.write(lambda tx: tx.execute(text(SAID), said))
    return str(first)


def test_replay_shows_agent_calls_and_missing_results(outside: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = agentrl(capsys, "replay", outside)
    assert "call 0: calculator" in said
    assert "result (as the agent reported it):\n    42" in said
    assert "no later request has its result" in said
    assert "the agent did not receive all of it" in said
    assert "done (agent_error)  reward 1" in said
    assert "the agent ended with: RuntimeError: boom" in said
    assert "the agent printed:\n    step 1\n" in said
    assert "\x1b" not in said
    assert "x" * 1000 not in said


def test_verify_tools_refuses_calls_of_agent(outside: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = agentrl(capsys, "replay", outside, "--verify", "tools", code=6)
    assert "its agent ran them itself." in said


@pytest.mark.parametrize("command", [("replay",), ("why",), ("fork", "--step", "0")])
def test_episode_argument_that_is_run_explains_episode_lookup(
    outside: str, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    said = agentrl(capsys, *command, "outside", code=2)
    assert said == "agentrl: 'outside' is not an episode number.\n  List those of a run: agentrl episodes outside\n"


def test_episodes_command_finds_failed_agents_with_reason(outside: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "outside" in agentrl(capsys, "runs")
    listed = agentrl(capsys, "episodes", "outside")
    assert "agent_error" in listed
    assert "error: KeyError: 'x'" in listed
    assert "error: RuntimeError: boom" in listed
    only = agentrl(capsys, "episodes", "outside", "--stop-reason", "agent_error")
    assert "agent_error" in only
    assert "failed" not in only
    assert "'agent_error'" in agentrl(capsys, "episodes", "--stop-reason", "agnt_error", code=2)
    assert "KeyError: 'x'" in agentrl(capsys, "why", str(int(outside) + 1))
    assert "its agent failed: RuntimeError: boom" in agentrl(capsys, "why", outside)


def test_episodes_command_selects_versions_of_prompt_texts(data: Database, capsys: pytest.CaptureFixture[str]) -> None:
    add_and_roll_out(data, begun(data), (SEED, None, 0.25), (BETTER, SEED, 0.5))
    seed, better = (one.group for one in load_search_tree(data, "first").candidates)
    rewards = {
        group: {row["reward"] for row in json.loads(agentrl(capsys, "episodes", "first", "--texts-of", str(group), "--json"))}
        for group in (seed, better)
    }
    assert rewards == {seed: {0.25}, better: {0.5}}


def test_fork_needs_recorded_requests_and_config_shows_agent(outside: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = agentrl(capsys, "fork", outside, "--step", "1", code=6)
    assert "cannot be forked: the requests of its agent are not recorded." in said
    assert "--edit-message cannot be used" in agentrl(capsys, "fork", outside, "--step", "1", "--edit-message", "x", code=2)
    assert "agent.name: my_agent:solve" in agentrl(capsys, "config", "show", "outside")


@pytest.mark.slow
@pytest.mark.parametrize("data", ["sqlite"], indirect=True)
def test_submit_names_each_missing_agent_worker(
    data: Database, tcp_redis: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENTRL_BROKER_URL", tcp_redis)
    settings.cache_clear()
    for module in ("stack.celery_app", "stack.presence", "requests.requirements"):
        monkeypatch.setattr(f"agentrl.workers.{module}.app", make_app(settings()))
    words = ["submit", "--dataset", "arithmetic", "--max-tasks", "2", "--model", str(tiny_random(tmp_path / "model"))]
    agent = ("--agent", "tests.workers.test_agent_requests:solve")
    monkeypatch.setattr("agentrl.cli.ensure_workers.START_SECONDS", 0.1)
    said = agentrl(capsys, *words, *agent, code=4)
    for role in ("rollout", "agents", "endpoint"):
        assert said.count(f"Start one: agentrl worker {role}\n") == 1
    assert "is your own code and runs without a sandbox" in said
    plain = agentrl(capsys, *words, code=4)
    assert "worker rollout" in plain
    assert "worker agents" not in plain
    assert "worker endpoint" not in plain


def test_watch_end_summarises_agent_errors(outside: str, data: Database, capsys: pytest.CaptureFixture[str]) -> None:
    data.write(lambda tx: tx.execute(text("UPDATE runs SET status = 'done' WHERE name = 'outside'")))
    said = agentrl(capsys, "watch", "outside")
    assert "1 episode ended with an agent error, all with: RuntimeError: boom" in said
    assert "agentrl episodes outside --stop-reason agent_error" in said
    assert "\x1b" not in said


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("data", ["sqlite"], indirect=True)
def test_agents_worker_reports_missing_parts_without_import(
    data: Database, tcp_redis: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AGENTRL_BROKER_URL", tcp_redis)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings.cache_clear()
    monkeypatch.setattr(requirements, "app", make_app(settings()))
    body = "import os\nfound = [name for name in os.environ if name.startswith('AGENTRL_')]\nimporter = os.getppid()\n"
    (tmp_path / "told_agent.py").write_text(f"{body}def solve(task, llm): return 1.0\n")
    question = requirements.requirements_of({"agent": {"name": "told_agent:solve"}}, {}, "qwen", "", rolls_out=True)
    lacking = replace(question, key="another", config={"agent": {"name": "nowhere_at_all:solve"}})
    edited = f"{body}open({str(tmp_path / 'seen')!r}, 'w').write(repr((importer, found)))\ndef solve(task, llm): return 2.0\n"
    (tmp_path / "told_agent.py").write_text(edited)
    with worker_of("agents", tmp_path) as worker:
        answers = ask_until_answered(question)
        assert [(each.roles, each.lacks, each.other) for each in answers] == [
            (("agents",), (), ("the file of agents told_agent:solve",))
        ]
        (said,) = ask_until_answered(lacking)[0].lacks
        assert "the agent 'nowhere_at_all:solve' cannot be loaded: " in said
    assert (tmp_path / "seen").read_text() == repr((worker, []))


@contextmanager
def worker_of(role: str, folder: Path) -> Iterator[int]:
    """A worker of that role with this process's environment, and the modules of the folder; its pid."""
    path = os.pathsep.join([str(folder), *sys.path])
    with (folder / "worker.log").open("ab") as log:
        command = [sys.executable, "-m", "agentrl.workers.stack.worker", role]
        made = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stderr=log)
    try:
        yield made.pid
    finally:
        made.terminate()
        made.wait(30)


def ask_until_answered(question: requirements.Requirements) -> list[requirements.WorkerCheck]:
    """The workers' answers, once there are any."""
    deadline = time.monotonic() + 60
    while not (found := requirements.ask_workers(replace(question, roles=("agents",)), workers=1)):
        assert time.monotonic() < deadline
    return found
