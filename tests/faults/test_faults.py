"""Whatever process dies at whatever point, the run ends as if nothing had happened: see `bench.faults`.

`make faults` tries every hit of every point; here is one hit of each, the first, a middle or the last.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.workers.stack import broker
from agentrl.workflow.runtime import faults
from agentrl.workflow.runtime.faults import InjectedFault, faultpoint
from agentrl.workflow.settings import Settings
from tests.conftest import missing

MUST_BE_MET = {
    "submit.after",
    "send_chord.after",
    "claim_group.before",
    "generate.sent",
    "commit_sampled.before",
    "send_call.before",
    "start_once.after",
    "run_tool.after",
    "record_result.after",
    "wake.before",
    "call.end",
    "commit_observed.before",
    "commit_asked.before",
    "commit_asked.after",
    "finish_episodes.after",
    "send_train.before",
    "rollout.end",
    "claim_iteration.after",
    "sampled_on.end",
    "update.after",
    "checkpoint.written",
    "checkpoint.sealed",
    "checkpoint.renamed",
    "commit_update.before",
    "commit_update.after",
    "rivals.removed",
    "optimizer.dropped",
    "train.end",
    "control.before",
    "send_rollouts.after",
}
"""Some of those that must have been met: the loop would be glad to test nothing."""

IN_SANDBOX = {
    "run_tool.before",
    "program.begun",
    "run_tool.after",
    "record_result.before",
    "record_result.after",
    "wake.before",
    "call.end",
}
"""Those where the tool was a program in the sandbox."""

IN_TRAINER = {
    "claim_iteration.after",
    "update.before",
    "update.after",
    "checkpoint.written",
    "checkpoint.renamed",
    "commit_update.before",
    "commit_update.after",
    "optimizer.dropped",
    "train.end",
}
"""Those where the run learned by PPO."""


OF_AGENTS = {
    *(f"agent.{name}" for name in ("claimed", "started", "over", "ended", "rewarded")),
    *(f"agent_call.{name}" for name in ("in", "sampled", "committed", "released")),
    *(f"endpoint.{name}" for name in ("in", "forwarded", "released")),
    *(f"{name}.{side}" for name in ("send_agent", "claim_agent", "finish_agent") for side in ("before", "after")),
    *(f"{name}.{side}" for name in ("open_attempts", "publish_address", "commit_calls") for side in ("before", "after")),
    *(f"{name}.{side}" for name in ("lose_agent", "restart_episode") for side in ("before", "after")),
}
"""Those where agents decided the turns, which called the endpoint."""


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which points count their hits."""
    monkeypatch.setenv("AGENTRL_FAULT_DIR", str(tmp_path))
    faults._plan.cache_clear()
    yield tmp_path
    faults._plan.cache_clear()


def test_without_a_folder_a_point_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_FAULT_DIR", raising=False)
    monkeypatch.setenv("AGENTRL_FAULT", "here:1:raise")
    faults._plan.cache_clear()
    faultpoint("here")
    faults._plan.cache_clear()


def test_a_point_acts_at_the_hit_that_was_asked_for_and_never_again(counting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_process_is_killed_or_stands_still_and_goes_on(tmp_path: Path, action: str, exit_code: int) -> None:
    script = "from agentrl.workflow.runtime.faults import faultpoint; faultpoint('here'); print('alive')"
    asked = {"AGENTRL_FAULT_DIR": str(tmp_path), "AGENTRL_FAULT": f"here:1:{action}", "AGENTRL_FAULT_SLEEP": "0.1"}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | asked, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (exit_code, "alive\n" if exit_code == 0 else "")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_fault_at_every_point_changes_nothing(tmp_path: Path) -> None:
    if broker.find_server(Settings(home=tmp_path)) is None:
        missing("a Redis server")
    answer = tmp_path / "faults.json"
    command = [sys.executable, "-m", "bench.faults", "--sample", "--json", str(answer)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.exists(), done.stdout + done.stderr
    rows = json.loads(answer.read_text())
    assert [row for row in rows if row["outcome"] == "violated"] == []
    assert {row["fault"] for row in rows if row["outcome"] == "recovered"} >= MUST_BE_MET
    assert {row["fault"] for row in rows if row["env"] == "critic" and row["outcome"] == "recovered"} >= IN_TRAINER
    assert {row["fault"] for row in rows if row["env"] == "agent" and row["outcome"] == "recovered"} >= OF_AGENTS
    boxed = {row["fault"] for row in rows if row["env"] == "boxed" and row["outcome"] == "recovered"}
    if not boxed:
        missing("a sandbox")
    assert boxed >= IN_SANDBOX
