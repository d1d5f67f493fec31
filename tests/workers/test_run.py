"""Whole runs through real workers, a real Redis and a real database, with a small random model that really samples and
trains.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from agentrl.workers.stack.celery_app import broker_url
from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.settings import Settings
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import AGENTS_ROLE, TOOLS_ROLE
from agentrl.workflow.store.reads import run_rows
from bench.faults.fork_server import Nursery
from tests.support.forked_stack import ForkedStack, forked_stack
from tests.support.forked_stack import stack as stack
from tests.support.gate import at_gate, open_gate
from tests.support.real_stack import LUCKY, SIZES, SMALL, TURNS, Stack, embedded_stack
from tests.support.small_models import tiny_random

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs_of_module")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers."""
    return tiny_random(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture
def embedded(short_folder: Path) -> Iterator[Stack]:
    """The embedded stack, started by the first submit."""
    with embedded_stack(short_folder, idle_seconds="3600") as made:
        yield made


def count(database: Database, query: str) -> int:
    """One number from the rows."""
    with database.read() as tx:
        return int(tx.execute(text(query)).scalar_one())


def assert_whole(database: Database, iterations: int, episodes: int, trained: int = 1) -> None:
    """What every finished run owes: each planned episode ended once, was consumed at most once, each version is there."""
    assert count(database, "SELECT count(*) FROM iterations WHERE status = 'done'") == iterations
    assert count(database, "SELECT count(*) FROM episodes") == episodes
    assert count(database, "SELECT count(*) FROM episodes WHERE status = 'done'") == episodes
    assert count(database, "SELECT count(*) FROM policies") == iterations + 1
    steps = count(database, "SELECT count(*) FROM policies WHERE kind = 'trained'")
    assert steps >= trained
    assert steps + count(database, "SELECT count(*) FROM iterations WHERE skipped <> ''") == iterations
    assert count(database, "SELECT count(*) FROM (SELECT episode_id FROM consumptions GROUP BY 1 HAVING count(*) > 1) x") == 0
    assert count(database, "SELECT count(*) FROM steps WHERE id NOT IN (SELECT step_id FROM step_tokens)") == 0
    unanswered = "SELECT count(*) FROM tool_calls WHERE result IS NULL AND episode_id IN"
    assert count(database, f"{unanswered} (SELECT id FROM episodes WHERE stop_reason = 'answered')") == 0


def test_run_ends_as_planned_and_can_be_queried(embedded: Stack, model: Path) -> None:
    name = embedded.agentrl("submit", "--dataset", "arithmetic", "--model", str(model), "--max-tasks", "8", *SMALL, "--wait")
    run = name.strip()
    assert_whole(embedded.database, iterations=2, episodes=32)
    assert run_rows.describe_run(embedded.database, run)["status"] == "done"
    rows = json.loads(
        embedded.agentrl("sql", "SELECT iteration, episodes, policy_version FROM v_iterations ORDER BY 1", "--json")
    )
    assert [(row["iteration"], row["episodes"], row["policy_version"]) for row in rows] == [(1, 16, 0), (2, 16, 1)]
    listed = json.loads(embedded.agentrl("episodes", run, "--json"))
    assert len(listed) == 32
    assert "reward" in embedded.agentrl("replay", str(listed[0]["id"]))


def test_submit_twice_with_same_name_makes_one_run(stack: Stack, model: Path) -> None:
    asked = ("submit", "--dataset", "arithmetic", "--model", str(model), "--max-tasks", "4", "--name", "twice", *SMALL)
    assert stack.agentrl(*asked) == stack.agentrl(*asked, "--wait") == "twice\n"
    assert_whole(stack.database, iterations=1, episodes=16)
    stack.agentrl(*asked, "--seed", "7", code=3)


def test_rollout_worker_kill_costs_no_episode(embedded: Stack, model: Path, tmp_path: Path) -> None:
    """Twice: it kills itself where it has just committed some turns, the first of the run and later ones."""
    blows = ("commit_sampled.after:2:kill", "commit_sampled.after:9:kill")
    embedded.environment |= {"AGENTRL_FAULT_DIR": str(tmp_path), "AGENTRL_FAULT": ",".join(blows)}
    run = embedded.agentrl("submit", "--dataset", "arithmetic", "--model", str(model), "--max-tasks", "16", *SMALL).strip()
    embedded.wait_for(run)
    assert_whole(embedded.database, iterations=4, episodes=64)
    assert count(embedded.database, "SELECT sum(losses) FROM groups") >= len(blows)
    told = f"2 workers were lost, and the work went on from the last commit: agentrl events {run}"
    assert told in embedded.agentrl("watch", run)


GATED = (*SIZES, *TURNS, "-s", "hooks=[tests.support.parity_hook:Lucky,tests.support.gate:AtStart]")
"""The same, each group held before its first token."""

HELD = "SELECT count(*) FROM groups WHERE status = 'running' AND worker <> ''"


def held_run(stack: Stack, model: Path) -> str:
    """A run of two iterations, the first of which a worker has begun and cannot end before the gate is open."""
    run = stack.agentrl("submit", "--dataset", "arithmetic", "--model", str(model), "--max-tasks", "8", *GATED).strip()
    stack.wait(lambda: at_gate(stack.home, "rollout"), "a group being claimed")
    return run


def test_worker_stop_returns_claims_without_a_loss(stack: ForkedStack, model: Path) -> None:
    run = held_run(stack, model)
    stack.kill_worker("rollout,train", signal.SIGTERM)
    open_gate(stack.home, "rollout")
    stack.wait_for(run)
    assert_whole(stack.database, iterations=2, episodes=32)
    assert count(stack.database, "SELECT max(losses) FROM groups") == 0
    assert count(stack.database, "SELECT max(attempt) FROM groups") == 2


def test_paused_run_waits_for_resume(stack: Stack, model: Path) -> None:
    run = held_run(stack, model)
    stack.agentrl("pause", run)
    stack.agentrl("pause", run)
    open_gate(stack.home, "rollout")
    stack.wait(lambda: count(stack.database, HELD) == 0, "what was begun being finished or dropped")
    assert run_rows.describe_run(stack.database, run)["status"] == "paused"
    assert count(stack.database, "SELECT count(*) FROM iterations WHERE status = 'done'") == 0
    stack.agentrl("resume", run, "--wait")
    assert_whole(stack.database, iterations=2, episodes=32)
    stack.agentrl("resume", run, code=6)


def test_finished_run_can_be_extended(stack: Stack, model: Path) -> None:
    words = ("--dataset", "arithmetic", "--model", str(model), "--max-tasks", "8", "--iterations", "2", *SMALL[2:])
    run = stack.agentrl("submit", *words, "--wait").strip()
    said = stack.agentrl("resume", run, "--iterations", "1")
    assert said.startswith(f"{run}: running (was done)\n  longer: 2 -> 3 iterations\n")
    stack.wait_for(run)
    assert_whole(stack.database, iterations=3, episodes=48)
    assert [row["run"] for row in json.loads(stack.agentrl("runs", "--json"))] == [run]


def test_cancelled_run_stays_cancelled(stack: ForkedStack, model: Path) -> None:
    run = held_run(stack, model)
    stack.agentrl("cancel", run)
    stack.agentrl("cancel", run)
    stack.agentrl("resume", run, code=6)
    open_gate(stack.home, "rollout")
    stack.stop()
    assert run_rows.describe_run(stack.database, run)["status"] == "cancelled"
    assert count(stack.database, "SELECT count(*) FROM episodes WHERE status <> 'cancelled'") == 0


def test_workers_need_only_the_logins_of_the_compose_stack(
    redis_server: Settings, postgres: Database, model: Path, tmp_path: Path
) -> None:
    url = postgres.url.render_as_string(hide_password=False)
    stack = Stack(
        tmp_path / "home",
        AGENTRL_DATABASE_URL=url,
        AGENTRL_BROKER_URL=broker_url(redis_server),
        PYTHONPATH=os.pathsep.join([str(Path("tests/support/compose_agents").resolve()), *sys.path]),
    )
    try:
        for role in ("rollout", "train", "control", "endpoint"):
            stack.worker(role)
        for role, login in (("tools", TOOLS_ROLE), ("agents", AGENTS_ROLE)):
            limited = postgres.url.set(username=login).render_as_string(hide_password=False)
            stack.worker(role, AGENTRL_DATABASE_URL=limited)
        asked = ("submit", "--dataset", "arithmetic", "--model", str(model), "--max-tasks", "8", *SIZES, *LUCKY)
        run = stack.agentrl(*asked, *TURNS, "--detach").strip()
        assert "done" in stack.agentrl("watch", run)
        assert_whole(stack.database, iterations=2, episodes=32)
        assert "done" in stack.agentrl("runs")
        assert json.loads(stack.agentrl("sql", f"SELECT status FROM v_runs WHERE run = '{run}'", "--json"))
        agent = (*asked, "--agent", "plain_agent:solve")
        stack.agentrl(*agent, "--wait")
        assert count(stack.database, "SELECT count(*) FROM agent_attempts WHERE error_class = ''") == 32
        refused = stack.command(*agent, "-s", "agent.show_reference=true", "--wait")
        assert "login of this agents worker may not read references" in refused.stdout + refused.stderr
    finally:
        stack.close()


def test_evaluation_is_a_run_with_an_interval(stack: Stack, model: Path) -> None:
    said = json.loads(
        stack.agentrl("eval", "--policy", str(model), "--dataset", "arithmetic", "--split", "test", "-n", "6", "--json")
    )
    assert said["episodes"] == 6
    assert 0 <= said["low"] <= said["mean_reward"] <= said["high"] <= 1
    assert said["interval_by"] == "Wilson"
    assert count(stack.database, "SELECT count(*) FROM policies") == 1


def hub_cache(folder: Path, name: str) -> Path:
    """A hub cache that holds one random model under that name, as a download would have left it."""
    repository = folder / "hub" / f"models--{name.replace('/', '--')}"
    revision = "0123456789abcdef0123456789abcdef01234567"
    tiny_random(repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    return folder


def gsm8k_rows(folder: Path) -> Path:
    """Two rows in the published format."""
    rows = [
        {"question": "Ann has 2 pens and buys 3. How many?", "answer": "2+3=<<2+3=5>>5 pens.\n#### 5"},
        {"question": "Four boxes of 6 eggs. How many eggs?", "answer": "4*6=<<4*6=24>>24 eggs.\n#### 24"},
    ]
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_readme_first_command_runs_from_hub_cache(short_folder: Path) -> None:
    stack = Stack(
        short_folder / "home",
        HF_HOME=str(hub_cache(short_folder / "hf", "Qwen/Qwen2.5-0.5B-Instruct")),
        AGENTRL_GSM8K_DIR=str(gsm8k_rows(short_folder / "gsm8k")),
        AGENTRL_IDLE_STOP_SECONDS="3600",
    )
    try:
        run = stack.agentrl("submit", "--dataset", "gsm8k", "--epochs", "3").strip()
        stack.wait_for(run)
        assert_whole(stack.database, iterations=3, episodes=48, trained=0)  # a random model is hardly ever right
        assert run_rows.describe_run(stack.database, run)["model"] == "Qwen/Qwen2.5-0.5B-Instruct"
        assert count(stack.database, "SELECT count(*) FROM runs WHERE length(base_hash) = 64") == 1
    finally:
        stack.close()


HOOK = """
from pathlib import Path

from agentrl.workflow.hooks import Hook


class Diary(Hook):
    def _note(self, place):
        with Path(__file__).with_name("diary").open("a") as file:
            file.write(place + "\\n")

    def on_run_start(self, run, config): self._note("run_start")
    def on_rollout_start(self, episode): self._note("rollout_start")
    def on_trace_start(self, episode): self._note("trace_start")
    def on_trace_end(self, episode): self._note("trace_end")
    def on_update_start(self, run, iteration): self._note("update_start")
    def on_update_end(self, run, iteration, metrics): self._note("update_end")
    def on_eval_end(self, run, version, metrics): self._note(f"eval_of_{version}_{metrics['episodes']}_episodes")
    def on_run_end(self, run, status): self._note(f"run_{status}")

    def on_rollout_end(self, episode):
        self._note("rollout_end")
        if episode.sample == 3:
            raise ValueError("no third one")
        return {"turns": float(len(episode.steps))}
"""


def diary_of_an_ended_run(folder: Path, after: int = 0) -> list[str]:
    """What it has noted behind so many words, once a run has ended: the hooks are told after the commit."""
    deadline = time.monotonic() + 30
    while "run_done" not in (noted := (folder / "diary").read_text().split()[after:]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return noted


def test_hooks_add_reward_parts_and_exception_fails_episode(
    short_folder: Path, forks: Nursery, migrated_file: Path, model: Path
) -> None:
    (short_folder / "diary_hook.py").write_text(HOOK)
    asked = ("--dataset", "arithmetic", "--model", str(model), "--max-tasks", "4", "--epochs", "1", "--group-size", "4")
    with forked_stack(short_folder, forks, migrated_file, PYTHONPATH=str(short_folder)) as stack:
        stack.agentrl("submit", *asked, "--max-new-tokens", "12", "-s", "hooks=[diary_hook:Diary]", "--wait")
        noted = diary_of_an_ended_run(short_folder)
        steps = count(stack.database, "SELECT count(*) FROM steps")
        assert {place: noted.count(place) for place in set(noted)} == {
            "run_start": 1,
            "rollout_start": 16,
            "trace_start": steps,
            "trace_end": steps,
            "rollout_end": 16,
            "update_start": 1,
            "update_end": 1,
            "run_done": 1,
        }
        assert count(stack.database, "SELECT count(*) FROM rewards WHERE part = 'turns' AND value >= 1") == 12
        assert (
            count(stack.database, "SELECT count(*) FROM episodes WHERE status = 'failed' AND error LIKE '%no third one%'") == 4
        )
        assert count(stack.database, "SELECT count(*) FROM episodes WHERE status = 'done' AND reward >= 1") == 12
        (run,) = (row["name"] for row in json.loads(stack.agentrl("sql", "SELECT name FROM runs", "--json")))
        stack.agentrl("eval", "--policy", f"{run}@1", "--dataset", "arithmetic", "-n", "2")
        measured = diary_of_an_ended_run(short_folder, len(noted))
    assert {"eval_of_1_2_episodes", "run_start", "run_done"} <= set(measured)
    assert "update_start" not in measured


def test_runs_sharing_a_folder_keep_their_checkpoints(stack: Stack, model: Path) -> None:
    asked = ("--dataset", "arithmetic", "--model", str(model), "--max-tasks", "8", "--output-dir", str(stack.home / "out"))
    for seed in ("0", "1"):
        stack.agentrl("submit", *asked, *SMALL, "--seed", seed, "--name", f"seed-{seed}", "--wait")
    with stack.database.read() as tx:
        trained = list(tx.execute(text("SELECT path, sha256 FROM policies WHERE kind = 'trained'")).all())
    assert len({row.path for row in trained}) == 4
    assert all(sealed_folder.sha256_file(sealed_folder.weights_of(Path(row.path))) == row.sha256 for row in trained)
    said = json.loads(stack.agentrl("eval", "--policy", "seed-0@2", "-n", "2", "--json"))
    assert said["episodes"] == 2


def test_stack_without_redis_is_one_process(short_folder: Path, model: Path) -> None:
    stack = Stack(short_folder / "home", AGENTRL_REDIS_SERVER="none", AGENTRL_IDLE_STOP_SECONDS="3600")
    try:
        stack.agentrl("submit", "--dataset", "arithmetic", "--model", str(model), "--max-tasks", "8", *SMALL, "--wait")
        assert_whole(stack.database, iterations=2, episodes=32)
        assert "in-memory broker" in (stack.settings.stack_dir / "supervisor.log").read_text()
    finally:
        stack.close()
