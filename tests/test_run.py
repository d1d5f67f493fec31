"""Whole runs through real workers, a real Redis and a real database, with a small random model that really samples and
trains.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.conftest import missing
from tests.models import tiny_random
from tests.stack import SMALL, Stack
from workers import broker
from workers.app import broker_url
from workflow.settings import Settings
from workflow.store import observe
from workflow.store.connect import Database


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers."""
    return tiny_random(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture
def stack(short_folder: Path) -> Iterator[Stack]:
    """The embedded stack, started by the first submit."""
    if broker.find_server(Settings(home=short_folder)) is None:
        missing("a Redis server")
    made = Stack(short_folder / "home", AGENTRL_IDLE_STOP_SECONDS="3600")
    yield made
    made.close()


def count(database: Database, query: str) -> int:
    """One number from the rows."""
    with database.read() as tx:
        return int(tx.execute(text(query)).scalar_one())


def assert_whole(database: Database, iterations: int, episodes: int) -> None:
    """What every finished run owes: each planned episode ended once, was consumed at most once, each version is there."""
    assert count(database, "SELECT count(*) FROM iterations WHERE status = 'done'") == iterations
    assert count(database, "SELECT count(*) FROM episodes") == episodes
    assert count(database, "SELECT count(*) FROM episodes WHERE status = 'done'") == episodes
    assert count(database, "SELECT count(*) FROM policies") == iterations + 1
    assert count(database, "SELECT count(*) FROM (SELECT episode_id FROM consumptions GROUP BY 1 HAVING count(*) > 1) x") == 0
    assert count(database, "SELECT count(*) FROM steps WHERE id NOT IN (SELECT step_id FROM step_tokens)") == 0
    unanswered = "SELECT count(*) FROM tool_calls WHERE result IS NULL AND episode_id IN"
    assert count(database, f"{unanswered} (SELECT id FROM episodes WHERE stop_reason = 'answered')") == 0


def test_a_run_rolls_out_trains_and_ends_as_planned_and_its_rows_can_be_asked_about(stack: Stack, model: Path) -> None:
    name = stack.agentrl("submit", "--dataset", "arithmetic", "--model", str(model), "--max-samples", "8", *SMALL, "--wait")
    run = name.strip()
    assert_whole(stack.database, iterations=2, episodes=32)
    assert observe.describe_run(stack.database, run)["status"] == "done"
    rows = json.loads(stack.agentrl("sql", "SELECT iteration, episodes, policy_version FROM v_iterations ORDER BY 1", "--json"))
    assert [(row["iteration"], row["episodes"], row["policy_version"]) for row in rows] == [(0, 16, 0), (1, 16, 1)]
    listed = json.loads(stack.agentrl("episodes", run, "--json"))
    assert len(listed) == 32
    assert "reward" in stack.agentrl("replay", str(listed[0]["id"]))


def test_submitting_the_same_name_twice_makes_one_run(stack: Stack, model: Path) -> None:
    asked = ("submit", "--dataset", "arithmetic", "--model", str(model), "--max-samples", "4", "--name", "twice", *SMALL)
    assert stack.agentrl(*asked) == stack.agentrl(*asked, "--wait") == "twice\n"
    assert_whole(stack.database, iterations=1, episodes=16)
    stack.agentrl(*asked, "--seed", "7", code=3)


def test_a_rollout_worker_killed_in_the_middle_costs_no_episode(stack: Stack, model: Path) -> None:
    run = stack.agentrl(
        "submit", "--dataset", "arithmetic", "--model", str(model), "--max-samples", "24", *SMALL, "--max-new-tokens", "64"
    ).strip()
    sampled = "SELECT count(*) FROM steps"
    stack.wait(lambda: count(stack.database, sampled) > 8, "the first steps")
    stack.kill_worker("rollout,train")
    before = count(stack.database, sampled)
    stack.wait(lambda: count(stack.database, sampled) > before, "going on")
    stack.kill_worker("rollout,train")
    stack.wait_for(run)
    assert_whole(stack.database, iterations=6, episodes=96)


def test_a_paused_run_stands_still_until_it_is_resumed(stack: Stack, model: Path) -> None:
    run = stack.agentrl("submit", "--dataset", "arithmetic", "--model", str(model), "--max-samples", "16", *SMALL).strip()
    stack.agentrl("pause", run)
    stack.agentrl("pause", run)
    assert observe.describe_run(stack.database, run)["status"] == "paused"
    stack.agentrl("resume", run)
    stack.wait_for(run)
    assert_whole(stack.database, iterations=4, episodes=64)
    stack.agentrl("resume", run, code=6)


def test_a_cancelled_run_stays_cancelled(stack: Stack, model: Path) -> None:
    run = stack.agentrl("submit", "--dataset", "arithmetic", "--model", str(model), "--max-samples", "64", *SMALL).strip()
    stack.agentrl("cancel", run)
    stack.agentrl("cancel", run)
    stack.agentrl("resume", run, code=6)
    assert count(stack.database, "SELECT count(*) FROM episodes WHERE status IN ('planned', 'running')") == 0


def test_workers_started_by_hand_run_on_postgres_and_redis_by_url(
    redis_server: Settings, postgres: Database, model: Path, tmp_path: Path
) -> None:
    stack = Stack(
        tmp_path / "home",
        AGENTRL_DATABASE_URL=postgres.url.render_as_string(hide_password=False),
        AGENTRL_BROKER_URL=broker_url(redis_server),
    )
    try:
        for role in ("rollout", "train", "tools", "control"):
            stack.worker(role)
        run = stack.agentrl("submit", "--dataset", "arithmetic", "--model", str(model), "--max-samples", "8", *SMALL, "--wait")
        assert_whole(stack.database, iterations=2, episodes=32)
        assert "done" in stack.agentrl("runs")
        assert json.loads(stack.agentrl("sql", f"SELECT status FROM v_runs WHERE run = '{run.strip()}'", "--json"))
    finally:
        stack.close()


def test_an_evaluation_is_a_run_of_its_own_with_an_interval(stack: Stack, model: Path) -> None:
    said = json.loads(
        stack.agentrl("eval", "--policy", str(model), "--dataset", "arithmetic", "--split", "test", "-n", "6", "--json")
    )
    assert said["episodes"] == 6
    assert said["low"] <= said["mean_reward"] <= said["high"]
    assert count(stack.database, "SELECT count(*) FROM policies") == 1
