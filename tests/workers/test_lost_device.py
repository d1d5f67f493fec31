"""A GPU that fails under a worker: the process ends, another goes on, and the run comes to what it would have come to."""

import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch

from agentrl.workers.jobs import lost_device
from agentrl.workflow.errors import DeviceLost
from bench.faults import record
from bench.faults.cluster import Crew
from bench.faults.cluster import crew as crew
from bench.faults.fork_server import Nursery
from tests.support import broken_device

FRAGILE = {
    "rollout__engine": f"{broken_device.__name__}:fragile_engine",
    "update__trainer": f"{broken_device.__name__}:fragile_trainer",
}
PARTS = ("sampler", "trainer")


def never_fails(crew: Crew, *parts: str) -> None:
    for part in parts:
        (crew.folder / f"failed-{part}").touch()


@pytest.fixture(scope="module")
def undisturbed(forks: Nursery, world_model: Path, migrated_file: Path) -> record.Record:
    """What the run comes to on a device that does not fail."""
    with (
        tempfile.TemporaryDirectory(prefix="arl-", dir="/tmp") as folder,
        closing(Crew(Path(folder), forks, world_model, migrated_file)) as crew,
    ):
        never_fails(crew, *PARTS)
        crew.fork_each()
        crew.submit(**FRAGILE)
        crew.assert_whole()
        return record.read(crew.home)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_worker_with_failed_device_ends_and_costs_no_attempt(crew: Crew, undisturbed: record.Record, part: str) -> None:
    never_fails(crew, *(other for other in PARTS if other != part))
    workers = crew.fork_each()
    crew.submit(**FRAGILE)
    crew.fork_after("rollout,train", DeviceLost.exit_code)
    crew.assert_whole()
    assert record.violations(record.read(crew.home), undisturbed, "") == []
    assert crew.rows("SELECT DISTINCT failures, losses FROM groups") == {(0, 0)}
    assert crew.rows("SELECT DISTINCT losses FROM iterations") == {(0,)}
    ((worker, said),) = crew.rows("SELECT subject, detail FROM events WHERE kind = 'device_lost'")
    assert worker.endswith(f":{workers['rollout,train'].pid}")
    assert said.startswith(
        "the worker rollout,train ended because its device failed (CUDA error: device-side assert triggered)"
    )
    assert crew.count("SELECT count(*) FROM events WHERE kind IN ('group_failed', 'update_failed', 'worker_lost')") == 0


def test_device_failure_does_not_end_a_persons_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the strategy "threads" the run fails with the error instead."""
    monkeypatch.setattr(lost_device, "threaded", threading.Event())
    lost_device.threaded.set()
    lost = lost_device.end_if_device_lost(torch.AcceleratorError("CUDA error: unspecified launch failure"), "train")
    assert isinstance(lost, DeviceLost)
    assert lost_device.end_if_device_lost(ValueError("CUDA"), "train") is None
