"""Workers that are killed, or cut off: the events of the runs that they worked for name them, and say what goes on."""

import signal
import socket
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from agentrl.workers.stack import supervisor
from agentrl.workers.stack.supervisor import SupervisedProcess, Supervisor
from agentrl.workflow.errors import AgentRLError, DeviceLost, RankLost
from agentrl.workflow.settings import Settings
from agentrl.workflow.store import blocked_runs, rollout_claims, steps, train_claims
from agentrl.workflow.store.connect import Database
from tests.support.played_runs import CALL, EXPIRED, claim, play, sampled, start, submission, values


def killed(role: str, number: int) -> SupervisedProcess:
    """A worker's process that a signal has ended."""
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(number)
        process.wait()
    return SupervisedProcess(role, process, started=time.monotonic())


def lost_events(db: Database) -> list[tuple[str, str]]:
    """Who was lost, and what is told of it."""
    with db.read() as tx:
        found = tx.execute(text("SELECT subject, detail FROM events WHERE kind = 'worker_lost' ORDER BY id")).all()
    return [(row.subject, row.detail) for row in found]


def test_lost_worker_event_names_signal_and_claims(tmp_path: Path, own_database: Database) -> None:
    groups = start(own_database, submission())
    died = {role: killed(role, signal.SIGKILL) for role in ("rollout,train", "tools", "control")}
    here = {role: f"{socket.gethostname()}:{child.process.pid}" for role, child in died.items()}
    for group in groups:
        work = rollout_claims.claim_group(own_database, group, f"{here['rollout,train']}/{group}", 60)
        assert work is not None
    steps.commit_sampled(own_database, work.fence, [sampled(work, calls=(CALL,))])
    watching = Supervisor(Settings(home=tmp_path))
    for child in died.values():
        watching._restart_ended(child)
    watching.news.join()
    told = "the worker {} was killed by SIGKILL, and is started again; it held {}"
    assert lost_events(own_database) == [
        (here["rollout,train"], told.format("rollout,train", f"{len(groups)} groups")),
        (here["tools"], told.format("tools", "1 tool call")),
        (here["control"], told.format("control", "nothing")),
    ]
    for _ in range(3):  # it does not come up
        again = killed("control", signal.SIGKILL)
        watching._restart_ended(again)
    watching.news.join()
    assert len(lost_events(own_database)) == 3


@pytest.mark.parametrize(("error", "events"), [(DeviceLost, 0), (RankLost, 1)])
def test_supervisor_records_no_loss_of_worker_with_failed_device(
    tmp_path: Path, own_database: Database, monkeypatch: pytest.MonkeyPatch, error: type[AgentRLError], events: int
) -> None:
    """Only a worker with a failed device has recorded its end itself."""
    start(own_database, submission())
    with subprocess.Popen(["sh", "-c", f"exit {error.exit_code}"]) as process:
        process.wait()
    watching, started = Supervisor(Settings(home=tmp_path)), list[str]()
    monkeypatch.setattr(watching, "_start", lambda role: (started.append(role), process)[1])
    lived_long = SupervisedProcess("rollout,train", process, started=-1e9)
    watching._restart_ended(lived_long)  # at once
    watching.news.join()
    assert started == ["rollout,train"]
    assert len(lost_events(own_database)) == events


@pytest.mark.parametrize("of_memory", [False, True])
def test_lost_worker_claims_continue_before_lease_ends(own_database: Database, of_memory: bool) -> None:
    first, second = start(own_database, submission())
    host = socket.gethostname()
    for group, pid in ((first, 7), (second, 77)):
        assert rollout_claims.claim_group(own_database, group, f"{host}:{pid}/1", 60) is not None
    assert rollout_claims.claim_group(own_database, first, f"{host}:8/1", 60) is None
    supervisor._record_loss("rollout,train", 7, -signal.SIGKILL, of_memory)
    assert rollout_claims.claim_group(own_database, first, f"{host}:8/1", 60) is not None
    assert rollout_claims.claim_group(own_database, second, f"{host}:8/2", 60) is None
    assert values(own_database, "SELECT losses FROM groups ORDER BY id") == [1, 0]


def test_supervisor_restarts_process_without_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watching, answers, order = Supervisor(Settings(home=tmp_path)), threading.Event(), list[str]()
    new = killed("control", signal.SIGKILL)

    def away(*said: object) -> None:
        answers.wait(10)
        order.append("told")

    monkeypatch.setattr(supervisor, "record_loss", away)
    monkeypatch.setattr(watching, "_start", lambda role: (order.append("started"), new.process)[1])
    died = replace(killed("control", signal.SIGKILL), started=-1e9)  # it lived long
    watching._restart_ended(died)
    answers.set()
    watching.news.join()
    assert order == ["started", "told"]


def test_lost_worker_of_same_name_is_reported_again(own_database: Database) -> None:
    group, *_ = start(own_database, submission())
    for claimant in ("far:7/1", "near:8/2"):
        rollout_claims.claim_group(own_database, group, claimant, EXPIRED)
    own_database.write(lambda tx: tx.execute(text("UPDATE events SET created_at = '2001-01-01 00:00:00'")))
    for claimant in ("far:7/3", "near:8/4"):
        rollout_claims.claim_group(own_database, group, claimant, EXPIRED)
    assert [who for who, _ in lost_events(own_database)] == ["far:7", "near:8", "far:7"]


def test_lost_remote_worker_is_named_once_after_its_lease(own_database: Database) -> None:
    groups = start(own_database, submission())
    for group in groups:
        rollout_claims.claim_group(own_database, group, f"far:7/{group}", EXPIRED)
    for group in groups:
        assert rollout_claims.claim_group(own_database, group, f"near:8/{group}", 60) is not None
    ((who, told),) = lost_events(own_database)
    assert who == "far:7"
    assert f"group {groups[0]}" in told
    assert "near:8 continues" in told


def test_takeover_by_a_restarted_container_names_no_other_worker(own_database: Database) -> None:
    """A process that is started again in a container has the host and the pid of the one that was killed."""
    group, *_ = start(own_database, submission())
    for claimant in ("box:1/1", "box:1/2"):
        rollout_claims.claim_group(own_database, group, claimant, EXPIRED)
    ((who, detail),) = lost_events(own_database)
    assert who == "box:1"
    assert "the same worker continues" in detail


def test_lost_event_is_not_written_for_returned_claim(own_database: Database) -> None:
    group, *_ = start(own_database, submission())
    work = claim(own_database, group)
    rollout_claims.hand_back(own_database, work.fence)
    claim(own_database, group)
    assert lost_events(own_database) == []


def test_lost_trainer_is_named_by_its_successor(own_database: Database) -> None:
    for group in start(own_database, submission()):
        play(own_database, group)
    (iteration,) = values(own_database, "SELECT id FROM iterations")
    assert train_claims.claim_iteration(own_database, iteration, "far:7/1", EXPIRED) is not None
    assert train_claims.claim_iteration(own_database, iteration, "near:8/2", 60) is not None
    ((who, told),) = lost_events(own_database)
    assert (who, "iteration 1" in told, "near:8 continues" in told) == ("far:7", True, True)


def test_waiting_run_still_waits_after_lost_worker(own_database: Database) -> None:
    group, *_ = start(own_database, submission())
    run = values(own_database, "SELECT id FROM runs")[0]
    blocked_runs.wait_for(own_database, run, "The server is away.")
    rollout_claims.claim_group(own_database, group, "far:7/1", EXPIRED)
    rollout_claims.claim_group(own_database, group, "near:8/2", 60)
    assert blocked_runs.find_wait_reason(own_database, run) == "The server is away."
    blocked_runs.wait_for(own_database, run, "The server is away.")
    assert values(own_database, "SELECT count(*) FROM events WHERE kind = 'waiting'") == [1]
