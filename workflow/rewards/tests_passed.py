"""tests_passed: the share of the task's hidden tests that the answered function passes.

The answer is the last ```python block of the final turn, else all of it. A `Judge`: its code runs where the tools run, in a
session of the sandbox; each test is a call there, and the value that comes out is compared as plain data in another, which
never ran anything of a model's (`workflow.judging`). What runs inside knows neither the expected values nor how many tests
there are, and nothing that it prints, patches or exits with is a verdict.

A function that fails a test by its time or memory fails that test; once an answer has used up its processor time for all of
them, the others count as failed. Where the system fails, the reward is not 0: the answer is judged again.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from workflow import judging
from workflow.errors import InfraError
from workflow.once import Once
from workflow.rewards import Judge
from workflow.sandbox import Limits, Result, Session
from workflow.sandbox.cases import args_of
from workflow.tools.python import sandbox, system_failed
from workflow.trajectory import Episode, Exit, ToolResult

LIMITS = Limits(cpu_seconds=3.0)
WHOLE_CPU_SECONDS = 12.0
"""Processor time for all that is judged at once."""

MOST_LATE = 2
"""After so many tests that used up their processor time, or one that slept, the others are not tried, and count as failed."""

JUDGE_SECONDS = 120.0
"""How long judging may take on the clock, which is the system's limit: more than all of the code's own."""

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def asked(episode: Episode) -> Mapping[str, Any] | float:
    """What is judged; 0.0 where there is no answer to run.

    Raises:
        ValueError: the task has no hidden test.
    """
    metadata = episode.task.metadata
    if not metadata["hidden"]:
        raise ValueError(f"task {episode.task.key!r} has no hidden test")
    answer = read_code(episode.final_answer)
    if episode.stop_reason != "answered" or not writable(answer):
        return 0.0
    question = {name: metadata[name] for name in ("setup", "function", "hidden")}
    return {**question, "answer": answer}


def read_code(text: str) -> str:
    """The code that a text gives as its answer."""
    blocks = BLOCK.findall(text)
    return str(blocks[-1] if blocks else text).strip()


def writable(code: str) -> bool:
    """Whether it is text that a file can hold, and not empty."""
    try:
        return bool(code.encode())
    except UnicodeEncodeError:
        return False


def _tests_passed(setup: str, answer: str, function: str, hidden: list[str]) -> ToolResult:
    """The share of the tests that the answer's function passes."""
    return told(*_judged(setup, answer, function, tuple(hidden))())


def told(found: object, cpu_seconds: float) -> ToolResult:
    """A verdict, as its row takes it."""
    return ToolResult(json.dumps(found), cpu_seconds=cpu_seconds, exit=Exit(sandbox().kind, "ok", None))


@lru_cache(maxsize=4096)
def _judged(setup: str, answer: str, function: str, hidden: tuple[str, ...]) -> Once[tuple[float, float]]:
    """The share, and the processor time; of an answer once, since siblings often give the same, and at the same time."""

    def judge() -> tuple[float, float]:
        with opened() as session:
            return share(session, (setup, answer), function, hidden, WHOLE_CPU_SECONDS)

    return Once(judge)


@contextmanager
def opened() -> Iterator[Session]:
    """A session to judge in.

    Raises:
        SandboxUnavailable: nothing here can hold it.
        InfraError: it did not come up.
    """
    session = sandbox().session(LIMITS)
    try:
        yield session
    finally:
        session.close()


def share(
    session: Session, cells: Sequence[str], function: str, cases: Sequence[str], cpu_seconds: float
) -> tuple[float, float]:
    """The share of the cases that the function passes once the cells have run, and the processor time that it took.

    The cases are texts, as a task has them. 0.0 where a cell fails; those that would begin after `cpu_seconds` count as failed.

    Raises:
        InfraError: the sandbox failed, or the machine was too busy.
    """
    used = 0.0
    for cell in filter(None, cells):
        result = _ended(session.run(cell))
        used += result.cpu_seconds
        if result.status != "ok":
            return 0.0, used
    late = 0
    given: list[tuple[str, str]] = []
    for case in cases:
        if late >= MOST_LATE or used >= cpu_seconds:
            break
        result = _ended(session.call(function, args_of(case)))
        if result.status == "ok":
            given.append((case, result.value))
        used += result.cpu_seconds
        late += {"timeout_cpu": 1, "timeout_wall": MOST_LATE}.get(result.status, 0)
    return sum(judging.passed(given)) / len(cases), used


def _ended(result: Result) -> Result:
    if system_failed(result, LIMITS):
        raise InfraError(f"The sandbox ({result.kind}) failed a test: {result.status}: {result.output[:300]}")
    return result


_tests_passed.__name__ = "tests_passed"
tests_passed = Judge(_tests_passed, timeout_seconds=JUDGE_SECONDS, needs=sandbox, opens=sandbox, asks=asked)
