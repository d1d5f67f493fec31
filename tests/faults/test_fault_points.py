"""A fault point: it counts its hits, and kills, stops or interrupts its process at the hit that was asked for."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.workflow.runtime import faults
from agentrl.workflow.runtime.faults import InjectedFault, faultpoint


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which points count their hits."""
    monkeypatch.setenv("AGENTRL_FAULT_DIR", str(tmp_path))
    faults._plan.cache_clear()
    yield tmp_path
    faults._plan.cache_clear()


def test_fault_point_without_folder_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_FAULT_DIR", raising=False)
    monkeypatch.setenv("AGENTRL_FAULT", "here:1:raise")
    faults._plan.cache_clear()
    faultpoint("here")
    faults._plan.cache_clear()


def test_fault_point_acts_at_requested_hit_only(counting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_FAULT", "here:2:raise,there:1:raise")
    faultpoint("here")
    with pytest.raises(InjectedFault, match="here, hit 2"):
        faultpoint("here")
    faults._plan.cache_clear()  # as in a process that was started again
    faultpoint("here")
    with pytest.raises(InjectedFault, match="there, hit 1"):
        faultpoint("there")
    assert {file.name: file.stat().st_size for file in counting.iterdir()} == {"here": 3, "there": 1}


@pytest.mark.parametrize(("action", "exit_code"), [("kill", -9), ("sleep", 0)])
def test_fault_point_kills_or_suspends_process(tmp_path: Path, action: str, exit_code: int) -> None:
    script = "from agentrl.workflow.runtime.faults import faultpoint; faultpoint('here'); print('alive')"
    asked = {"AGENTRL_FAULT_DIR": str(tmp_path), "AGENTRL_FAULT": f"here:1:{action}", "AGENTRL_FAULT_SLEEP": "0.1"}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | asked, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (exit_code, "alive\n" if exit_code == 0 else "")
