"""A function agent has its user's rights, and still neither reads what its worker knows nor ends who watches it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.workers.agents import domain

ROOT = Path(__file__).parents[2]
SECRET = "s3cr3t-of-the-worker"
CODE = """
import json, os, sys
from dataclasses import asdict
from agentrl.workers.agents import processes
from agentrl.workers.agents.guardian import Order
name, metadata, options = json.load(sys.stdin)
task = {"key": "k", "messages": [], "metadata": metadata}
llm = {"base_url": "http://127.0.0.1:9/v1", "api_key": "key", "model": "run"}
bounds = {"timeout_seconds": 60, "memory_mb": 2048, "processes": 256, "output_bytes": 100_000} | options
order = Order([], processes.clean_environment(), os.getcwd(), "", "", task, llm, **bounds)
print(json.dumps(asdict(processes.run(order, f"tests.agents.curious_agents:{name}", lambda: False))))
processes.servers.close()
"""
"""A worker, in a process of its own."""
AS_USER = (
    *("setpriv", "--reuid", "231997", "--regid", "231997", "--clear-groups"),
    *(f"--{which}=-all,+dac_read_search" for which in ("inh-caps", "ambient-caps", "bounding-set")),
)
"""An ordinary user, who may read the files of root's interpreter."""


def run(name: str, metadata: dict[str, Any], who: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    """How the agent of a worker that has a secret in its environment ended."""
    environment = {**os.environ, "AGENTRL_DATABASE_URL": SECRET, "PYTHONDONTWRITEBYTECODE": "1"}
    asked = json.dumps([name, metadata, options])
    command = [*who, sys.executable, "-c", CODE]
    made = subprocess.run(command, cwd=ROOT, env=environment, input=asked, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    end: dict[str, Any] = json.loads(made.stdout)
    return end


@pytest.mark.parametrize("who", [(), AS_USER], ids=["this user", "an ordinary user"])
def test_agent_cannot_read_or_signal_worker_processes(who: tuple[str, ...]) -> None:
    if domain._libc.syscall(domain.CREATE_RULESET, None, 0, domain.VERSION) < domain.SCOPING_ABI:
        pytest.skip("a kernel before 6.12 scopes no signals")
    if who and (os.geteuid() != 0 or shutil.which("setpriv") is None):
        pytest.skip("only root becomes another user")
    end = run("looks_around", {"secret": SECRET}, who)
    assert (end["error_class"], end["answer"]) == ("", "[]"), end


def test_agent_function_whose_process_exits_has_not_returned() -> None:
    end = run("vanishes", {})
    assert (end["error_class"], end["error"]) == ("exit", "its process ended before it returned")


def test_shared_memory_of_forks_counts_once() -> None:
    end = run("shares", {}, memory_mb=200)
    assert (end["error_class"], end["rewards"]) == ("", {"agent": 4.0}), end
