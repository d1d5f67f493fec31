"""Neighbours change no reward: processor time is the model's limit, the clock is the system's."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest

from agentrl.workers.jobs.tool_call import run_tool
from agentrl.workflow.errors import InfraError
from agentrl.workflow.plugins import find
from agentrl.workflow.rewards import Judge, tests_passed, verdicts
from agentrl.workflow.sandbox import Limits
from agentrl.workflow.sandbox.fair_semaphore import FairSemaphore
from agentrl.workflow.store.tool_calls import CallWork
from agentrl.workflow.tools.python import sandbox
from tests.rewards.test_code import ADD, answered
from tests.rewards.test_code import box as box

ANSWERS = {
    "def add(a, b): return a + b": 1.0,
    "def add(a, b): return 10": 1 / 3,
    "def add(a, b): return a - b": 0.0,
    "def add(a, b):\n    if a == 1: raise ValueError\n    return a + b": 2 / 3,
    "def add(a, b):\n    deadline = __import__('time').process_time() + 0.4\n"
    "    while __import__('time').process_time() < deadline: pass\n    return a + b": 1.0,
    "def add(a, b):\n    while a == 5: pass\n    return a + b": 2 / 3,
    "import os\ndef add(a, b):\n    if a == 5: os.abort()\n    return a + b": 2 / 3,
    "import time\ndef add(a, b):\n    time.sleep(0.2)\n    return a + b": 1.0,
}
"""Eight answers and what each earns: at once, by computing, by too much of it, by dying, by waiting."""


def earned(answer: str) -> float:
    """What the tools worker's judge gives; asked again where the system failed it, as a rollout does."""
    judge: Judge = find("rewards", "tests_passed")
    question = judge.asks(answered(ADD, answer))
    assert not isinstance(question, float)
    while True:
        try:
            told = run_tool(judge, CallWork(1, "code", "tests_passed", question, "none", kind="grade"))
        except InfraError:
            continue
        return verdicts({"tests_passed": judge}, {"tests_passed": told})["tests_passed"]


@contextmanager
def nobody() -> Iterator[None]:
    """No neighbours."""
    yield


@contextmanager
def on_the_machine() -> Iterator[None]:
    """Eight busy loops that no sandbox knows of."""
    with ExitStack() as stack:
        for _ in range(8):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


@contextmanager
def in_the_sandbox() -> Iterator[None]:
    """Eight busy loops of other episodes, which take their turns in the same sandbox."""
    over = threading.Event()

    def loop() -> None:
        while not over.is_set():
            sandbox().run("import time\nwhile time.process_time() < 0.1: pass")

    with ThreadPoolExecutor(8) as pool:
        loops = [pool.submit(loop) for _ in range(8)]
        try:
            yield
        finally:
            over.set()
        for one in loops:
            one.result()


@pytest.mark.parametrize("neighbours", [nobody, on_the_machine, in_the_sandbox])
@pytest.mark.slow
def test_rewards_are_unchanged_by_busy_neighbours(
    box: None, neighbours: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tests_passed, "LIMITS", Limits(cpu_seconds=1.0))
    tests_passed._judged.cache_clear()
    with neighbours(), ThreadPoolExecutor(len(ANSWERS)) as pool:
        assert dict(zip(ANSWERS, pool.map(earned, ANSWERS), strict=True)) == pytest.approx(ANSWERS)
    tests_passed._judged.cache_clear()  # judged by limits of this test's own


def test_fair_semaphore_serves_in_order_of_asking() -> None:
    turns, came = FairSemaphore(1), []

    def wait_in_line() -> None:
        with turns.hold():
            came.append("patient")

    with turns.hold():
        patient = threading.Thread(target=wait_in_line)
        patient.start()
        while not turns._waiting:
            time.sleep(0.01)
    with turns.hold():
        came.append("greedy")
    patient.join()
    assert came == ["patient", "greedy"]
    assert turns.running() == 0


def test_fair_semaphore_removes_waiter_that_stops() -> None:
    turns = FairSemaphore(1)
    with turns.hold():
        turns._release(turns._enqueue())
    with turns.hold():
        assert turns.running() == 1
    assert turns.running() == 0
