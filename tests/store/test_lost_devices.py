"""Claims of workers whose GPU failed: handed back, and bounded by the run's progress."""

import pytest

from agentrl.workflow.store import leases, planning, rollout_claims, train_claims
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.leases import MAX_DEVICE_LOSSES, hand_back_claims, record_cpu_after_loss
from tests.support.played_runs import play, start, submission, values

REASON = "CUDA error: unspecified launch failure"


def lose(db: Database, group: int, pid: int, times: int) -> None:
    """So many workers claim the group and lose their device."""
    for number in range(times):
        assert rollout_claims.claim_group(db, group, f"host:{pid + number}/1", 60) is not None
        hand_back_claims(db, f"host:{pid + number}", "rollout", REASON)


@pytest.fixture
def ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that lose their device have ended when their claims are handed back."""
    monkeypatch.setattr(leases, "EXIT_MS", -1)


def test_hand_back_claims_keeps_them_until_the_process_has_ended(database: Database) -> None:
    first, _ = start(database, submission())
    lose(database, first, 7, 1)
    assert rollout_claims.claim_group(database, first, "host:8/1", 60) is None
    database.write(lambda tx: tx.exec_driver_sql(f"UPDATE groups SET lease_until = lease_until - {leases.EXIT_MS + 1}"))
    assert rollout_claims.claim_group(database, first, "host:8/1", 60) is not None


@pytest.mark.usefixtures("ends_at_once")
def test_hand_back_claims_frees_groups_and_counts_nothing(database: Database) -> None:
    first, second = start(database, submission())
    assert rollout_claims.claim_group(database, second, "host:77/1", 60) is not None
    lose(database, first, 7, 1)
    assert rollout_claims.claim_group(database, first, "host:8/1", 60) is not None
    assert rollout_claims.claim_group(database, second, "host:8/2", 60) is None  # 77 begins with 7, and is another process
    assert values(database, "SELECT losses + failures FROM groups") == [0, 0]
    assert values(database, "SELECT kind FROM events WHERE kind IN ('device_lost', 'worker_lost')") == ["device_lost"]
    (said,) = values(database, "SELECT detail FROM events WHERE kind = 'device_lost'")
    assert said == f"the worker rollout ended because its device failed ({REASON}); it held 1 group"


@pytest.mark.usefixtures("ends_at_once")
def test_hand_back_claims_frees_an_iteration_without_a_loss(database: Database) -> None:
    for group in start(database, submission()):
        play(database, group)
    (iteration,) = values(database, "SELECT id FROM iterations")
    assert train_claims.claim_iteration(database, iteration, "host:7/1", 60) is not None
    hand_back_claims(database, "host:7", "train", REASON)
    assert train_claims.claim_iteration(database, iteration, "host:8/1", 60) is not None
    assert values(database, "SELECT losses FROM iterations") == [0]


@pytest.mark.usefixtures("ends_at_once")
def test_devices_lost_by_one_run_do_not_fail_another(database: Database) -> None:
    first, _ = start(database, submission())
    other, _ = start(database, submission(name="other"))
    assert rollout_claims.claim_group(database, other, "host:99/1", 60) is not None
    lose(database, first, 10, MAX_DEVICE_LOSSES)
    assert values(database, "SELECT status FROM runs ORDER BY id") == ["failed", "running"]


@pytest.mark.usefixtures("ends_at_once")
def test_devices_lost_before_a_resume_are_not_counted(database: Database) -> None:
    first, _ = start(database, submission())
    lose(database, first, 10, MAX_DEVICE_LOSSES)
    (run,) = values(database, "SELECT name FROM runs")
    planning.resume(database, run)
    lose(database, first, 20, MAX_DEVICE_LOSSES - 1)
    assert values(database, "SELECT status FROM runs") == ["running"]


@pytest.mark.usefixtures("ends_at_once")
@pytest.mark.parametrize("progress", [False, True])
def test_devices_lost_without_progress_fail_the_run(database: Database, progress: bool) -> None:
    first, second = start(database, submission())
    lose(database, first, 10, MAX_DEVICE_LOSSES - 1)
    if progress:
        database.write(lambda tx: tx.exec_driver_sql("UPDATE events SET created_at = '2001-01-01 00:00:00'"))  # long before
        play(database, second)
    lose(database, first, 20, 1)
    assert values(database, "SELECT status FROM runs") == ["running" if progress else "failed"]
    (reason,) = values(database, "SELECT reason FROM runs")
    assert (f"failed {MAX_DEVICE_LOSSES} times" in reason and REASON in reason) is not progress


def test_cpu_worker_reports_that_device_of_run_failed(database: Database) -> None:
    first, _ = start(database, submission())
    assert record_cpu_after_loss(database, 1, "host:7") == ""
    assert values(database, "SELECT count(*) FROM events WHERE kind = 'on_cpu'") == [0]
    lose(database, first, 7, 1)
    said = record_cpu_after_loss(database, 1, "host:8")
    assert "uses the CPU" in said
    assert values(database, "SELECT detail FROM events WHERE kind = 'on_cpu' AND subject = 'host:8'") == [said]
