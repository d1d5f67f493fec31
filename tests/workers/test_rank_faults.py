"""Runs whose updates two ranks make: with the ranks undisturbed, killed, stopped, and fenced."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bench.faults import record
from bench.faults.cluster import Crew
from bench.faults.fork_server import Child, Nursery
from tests.support import gate
from tests.support.gate import arrivals, open_gate
from tests.support.real_stack import children_of

pytestmark = [pytest.mark.slow]
RUN = {"update__devices": 2, "algorithm__name": f"{gate.__name__}:held_update"}
END_SECONDS = 5.0


def made(folder: Path, forks: Nursery, world_model: Path, migrated_file: Path) -> Crew:
    return Crew(folder, forks, world_model, migrated_file, AGENTRL_DEVICE="cpu", AGENTRL_LEASE_SECONDS="3")


@pytest.fixture
def crew(short_folder: Path, forks: Nursery, world_model: Path, migrated_file: Path) -> Iterator[Crew]:
    with closing(made(short_folder, forks, world_model, migrated_file)) as crew:
        yield crew


@pytest.fixture(scope="module")
def undisturbed(forks: Nursery, world_model: Path, migrated_file: Path) -> record.Record:
    """What the run comes to on two ranks that nobody disturbs."""
    with (
        tempfile.TemporaryDirectory(prefix="arl-", dir="/tmp") as folder,
        closing(made(Path(folder), forks, world_model, migrated_file)) as crew,
    ):
        open_gate(crew.home, "update")
        workers = crew.fork_all()
        crew.submit(**RUN)
        crew.wait_for()
        assert len(ranks_of(workers["train"])) == 2, "the ranks did not stay warm"
        crew.assert_whole()
        assert crew.count("SELECT count(*) FROM events WHERE kind = 'update_failed'") == 0
        return record.read(crew.home)


def ranks_of(worker: Child) -> list[int]:
    """The ranks of a worker: its children that lead a session."""
    return [pid for pid in children_of(worker.pid) if os.getsid(pid) == pid]


def are_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + END_SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def at_update(crew: Crew) -> tuple[dict[str, Child], list[int]]:
    """The workers, and the two ranks in the middle of an update."""
    workers = crew.fork_all()
    crew.submit(**RUN)
    crew.wait(lambda: arrivals(crew.home, "update") == 2, "two ranks in an update")
    ranks = ranks_of(workers["train"])
    assert len(ranks) == 2
    return workers, ranks


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "ended in the update with signal 9"), (signal.SIGSTOP, "did not respond for")]
)
def test_update_is_made_again_after_lost_rank(
    crew: Crew, undisturbed: record.Record, number: signal.Signals, reason: str
) -> None:
    _, ranks = at_update(crew)
    os.kill(ranks[1], number)
    crew.wait(lambda: crew.count("SELECT count(*) FROM events WHERE kind = 'update_failed'") == 1, "a failed update")
    assert are_gone(ranks)
    open_gate(crew.home, "update")
    crew.assert_whole()
    assert record.violations(record.read(crew.home), undisturbed, "") == []
    ((said,),) = crew.rows("SELECT detail FROM events WHERE kind = 'update_failed'")
    assert reason in said


def test_ranks_end_with_killed_worker(crew: Crew, undisturbed: record.Record) -> None:
    _, ranks = at_update(crew)
    crew.kill_worker("train")
    assert are_gone(ranks)
    open_gate(crew.home, "update")
    crew.assert_whole()
    assert record.violations(record.read(crew.home), undisturbed, "") == []


def test_ranks_of_fenced_trainer_are_killed(crew: Crew, undisturbed: record.Record) -> None:
    """The trainer was asleep for longer than its lease, and another has its claim."""
    workers, ranks = at_update(crew)
    workers["train"].kill(signal.SIGSTOP)
    crew.fork("train")
    crew.wait(lambda: arrivals(crew.home, "update") == 4, "two more ranks, of the other trainer")
    workers["train"].kill(signal.SIGCONT)
    assert are_gone(ranks)
    open_gate(crew.home, "update")
    crew.assert_whole()
    assert record.violations(record.read(crew.home), undisturbed, "") == []


def end_waiting_leader(crew: Crew, train: Child) -> None:
    """Send SIGTERM to a train worker that waits for another host. It ends soon, and releases its claim."""
    crew.wait(lambda: crew.count("SELECT count(*) FROM rank_meetings") == 1, "a train worker that waits for a host")
    began = time.monotonic()
    train.kill(signal.SIGTERM)
    assert train.end() == 0
    assert time.monotonic() - began < END_SECONDS
    assert crew.count("SELECT count(*) FROM rank_meetings") == 0
    assert crew.count("SELECT count(*) FROM iterations WHERE worker <> '' AND status <> 'done'") == 0


@pytest.mark.parametrize("lost", ["ranks", "train"])
def test_update_is_made_again_after_lost_host(lost: str, crew: Crew, undisturbed: record.Record) -> None:
    """The rows and weights are those of a run on two devices of one host."""
    crew.environment["AGENTRL_RANKS_HOST"] = "127.0.0.1"
    workers = crew.fork_all()
    crew.submit(**{**RUN, "update__devices": 1, "update__hosts": 2})
    if lost == "train":
        end_waiting_leader(crew, workers["train"])
        workers["train"] = crew.fork("train")
    workers["ranks"] = crew.fork("ranks")
    crew.wait(lambda: arrivals(crew.home, "update") == 2, "two ranks in an update")
    ranks = [*ranks_of(workers["train"]), *ranks_of(workers["ranks"])]
    assert len(ranks) == 2
    crew.kill_worker(lost)
    assert are_gone(ranks)
    open_gate(crew.home, "update")
    crew.assert_whole()
    assert record.violations(record.read(crew.home), undisturbed, "") == []
    failures = crew.rows("SELECT detail FROM events WHERE kind = 'update_failed'")
    assert len(failures) == (lost == "ranks")
    assert all("was lost in the update" in detail for (detail,) in failures)
    assert crew.count("SELECT count(*) FROM rank_meetings") == 0
