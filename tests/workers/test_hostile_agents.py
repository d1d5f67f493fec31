"""An agent that does to the endpoint whatever it can: it is answered each time, and no other agent notices anything."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.faults.agent_kills import RUN, prepare, record
from tests.support.hostile_agent import LOG, attacks
from tests.support.real_stack import Stack, embedded_stack
from tests.support.small_models import tiny_random

pytestmark = pytest.mark.usefixtures("forked_programs_of_module")

ANSWERS = {0, 200, 400, 401, 404, 405, 413, 415, 431}
"""0: what never becomes a request is cut."""
HOSTILE = ("--agent", "tests.support.hostile_agent:solve", "-s", "agent.max_calls=100000", "--max-new-tokens", "24")
A_KEY = re.compile(r"agentrl-[A-Za-z0-9_-]{40}")


@pytest.fixture
def stack(short_folder: Path) -> Iterator[Stack]:
    with embedded_stack(short_folder, idle_seconds="600") as made:
        prepare(made)
        (short_folder / "tmp").mkdir()
        made.environment |= {"TMPDIR": str(short_folder / "tmp")}
        yield made


@pytest.mark.slow
def test_hostile_agent_is_answered_and_others_are_undisturbed(stack: Stack, short_folder: Path) -> None:
    model = str(tiny_random(short_folder / "model"))
    few = ("--max-tasks", "4", "--model", model, "--detach")
    stack.agentrl("submit", *RUN, *few, "--name", "calm")
    stack.wait_for("calm")
    one = ("--dataset", "arithmetic", "--epochs", "1", "--group-size", "2", "--tasks-per-iteration", "1", "--max-tasks", "1")
    stack.agentrl("submit", *one, *HOSTILE, "--model", model, "--name", "hostile", "--detach")
    stack.agentrl("submit", *RUN, *few, "--name", "beside")
    for run in ("hostile", "beside"):
        stack.wait_for(run)
    assert record(stack, "beside") == record(stack, "calm")
    told = [json.loads(line) for line in (short_folder / "tmp" / LOG).read_text().splitlines()]
    assert [answer for answer in told if answer[1] not in ANSWERS] == []
    names = [name for name, _ in attacks()]
    assert sorted(answer[0] for answer in told) == sorted([*names, "the end"] * 2)
    assert [answer[1] for answer in told if answer[0] == "the end"] == [200, 200]
    logs = [file.read_text(errors="replace") for file in stack.home.rglob("*.log")]
    assert logs
    assert not any(A_KEY.search(log) for log in logs)
