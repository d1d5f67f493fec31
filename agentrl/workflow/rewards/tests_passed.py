"""tests_passed: the share of the task's hidden tests that the answered function passes.

The answer is the last ```python block of the final turn, else all of it. A `Judge`: its code runs where the tools run, in a
session of the sandbox; each test is a call there, and the value that comes out is compared as plain data in another, which
never ran anything of a model's (`judging.code_judge`). What runs inside knows neither the expected values nor how many tests
there are, and nothing that it prints, patches or exits with is a verdict.

A function that fails a test by its time or memory fails that test; once an answer has used up its processor time for all of
them, or has slept for too long, the others count as failed. Where the system fails, the reward is not 0: the answer is judged
again.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from agentrl.workflow.errors import InfraError
from agentrl.workflow.judging import code_judge
from agentrl.workflow.rewards import Judge
from agentrl.workflow.runtime.once_per_process import Once
from agentrl.workflow.sandbox import CodeResult, Limits, Session, exact_json
from agentrl.workflow.sandbox.function_tests import args_of
from agentrl.workflow.sandbox.program_tests import CALLER, WITH_SOURCE
from agentrl.workflow.tools.python import SANDBOX, sandbox, system_failed
from agentrl.workflow.trajectory import Episode, Exit, Task, ToolResult

LIMITS = Limits(cpu_seconds=3.0)
WHOLE_CPU_SECONDS = 12.0
"""Processor time for all that is judged at once."""

WHOLE_IDLE_SECONDS = 20.0
"""On the clock, for all that is judged at once: how long it may sleep."""

SERVED_SECONDS = 0.1
"""On the clock: what it may take this process to see the end of a call."""

MAX_TOLD = 4 * exact_json.MAX_CHARACTERS
"""Characters of all values that a function gives for its tests; the calls after that have failed."""

MAX_LATE = 2
"""After so many tests that used up their processor time, or one that slept, the others are not tried, and count as failed."""

JUDGE_SECONDS = 180.0
"""How long judging may take on the clock, turns that it waits for left out, which is the system's limit: more than all of the
code's own."""

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def asked(episode: Episode) -> Mapping[str, Any] | float:
    """Return the arguments of the judge; 0.0 without an answer to run.

    Raises:
        ValueError: the task has no hidden test.
    """
    given = episode.final_answer
    answer = given if given == episode.task.reference else read_code(given)  # a reference's docstring may hold a block
    asking = question(episode.task, answer)
    return asking if episode.stop_reason == "answered" and writable(answer) else 0.0


def question(task: Task, answer: str) -> dict[str, Any]:
    """Return the arguments of `tests_passed` for an answer to a task.

    Raises:
        ValueError: the task has no hidden test.
    """
    metadata = task.metadata
    if not metadata["hidden"] and not metadata.get("test"):
        raise ValueError(f"task {task.key!r} has no hidden test")
    asking = {name: metadata[name] for name in ("setup", "function", "hidden")}
    if metadata.get("test"):
        whole = metadata["setup"] in task.reference
        asking |= {"test": metadata["test"], "reference": f"{'' if whole else metadata['setup']}\n{task.reference}"}
    return {**asking, "answer": answer}


def read_code(text: str) -> str:
    """Return the code that a text gives as its answer."""
    blocks = BLOCK.findall(text)
    return str(blocks[-1] if blocks else text).strip()


def writable(code: str) -> bool:
    """Return whether it is text that a file can hold, and not empty."""
    try:
        return bool(code.encode())
    except UnicodeEncodeError:
        return False


def _tests_passed(setup: str, answer: str, function: str, hidden: list[str], test: str = "", reference: str = "") -> ToolResult:
    """The share of the tests that the answer's function passes: of the hidden cases, or those of a program of tests."""
    return verdict_result(*_judged(setup, answer, function, tuple(hidden), test, reference)())


def verdict_result(verdict: object, cpu_seconds: float) -> ToolResult:
    """Return a verdict in the format of its row."""
    return ToolResult(json.dumps(verdict), cpu_seconds=cpu_seconds, exit=Exit(sandbox().kind, "ok", None))


@lru_cache(maxsize=4096)
def _judged(
    setup: str, answer: str, function: str, hidden: tuple[str, ...], test: str, reference: str
) -> Once[tuple[float, float]]:
    """The share, and the processor time; of an answer once, since siblings often give the same, and at the same time."""

    def judge() -> tuple[float, float]:
        budget = Budget(WHOLE_CPU_SECONDS)
        with opened() as session:
            if not test:
                return share(session, (setup, answer), function, hidden, budget), budget.used
            calls = Calls(session, function, budget)
            passed = code_judge.relayed(reference, test, function, calls) if calls.begun((setup, answer)) else []
            return sum(passed) / max(1, len(passed)), budget.used

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


class Budget:
    """What all that is judged at once may use: processor time, and time on the clock in which it does not want a core."""

    def __init__(self, cpu_seconds: float) -> None:
        self._most = cpu_seconds
        self._idle = self.used = 0.0

    @property
    def spent(self) -> bool:
        """Whether nothing may begin any more."""
        return self.used >= self._most or self._idle >= WHOLE_IDLE_SECONDS

    def pay(self, result: CodeResult) -> None:
        """Take what a cell or call has used."""
        self.used += result.cpu_seconds
        self._idle += max(0.0, result.wall_seconds - result.cpu_seconds - result.waited_seconds - SERVED_SECONDS)


class Calls:
    """Calls of a session's function, as many as its budget and what it may hand out in all allow.

    Args:
        budget: for the cells and all calls; what would begin once it is spent fails.
    """

    def __init__(self, session: Session, function: str, budget: Budget) -> None:
        self._session, self._function, self._budget = session, function, budget
        self._late = self._told = 0

    def begun(self, cells: Sequence[str]) -> bool:
        """Run what is not empty of the cells; whether all of them ended well.

        Raises:
            InfraError: the sandbox failed, or the machine was too busy.
        """
        for cell in filter(None, cells):
            if self._budget.spent:
                return False
            result = _ended(self._session.run(cell))
            self._budget.pay(result)
            if result.status != "ok":
                return False
        return True

    def __call__(self, args: str) -> str | None:
        """Return the text of the value that the function gives for such a text of arguments (`checks.KnownCalls`); None where
        it
        gives none.

        Raises:
            InfraError: as `begun`.
        """
        if self._late >= MAX_LATE or self._budget.spent or self._told > MAX_TOLD:
            return None
        function = self._function
        if args.startswith(WITH_SOURCE):
            call = json.loads(args)
            if not self.begun((call["source"],)):
                return None
            function, args = CALLER, call["args"]
        result = _ended(self._session.call(function, args))
        self._budget.pay(result)
        self._late += {"timeout_cpu": 1, "timeout_wall": MAX_LATE}.get(result.status, 0)
        self._told += len(result.value)
        return result.value if result.status == "ok" else None


def share(session: Session, cells: Sequence[str], function: str, cases: Sequence[str], budget: Budget) -> float:
    """Return the share of the cases that the function passes once the cells have run.

    The cases are texts, as a task has them. 0.0 where a cell fails; those that would begin once the budget is spent count as
    failed.

    Raises:
        InfraError: the sandbox failed, or the machine was too busy.
    """
    calls = Calls(session, function, budget)
    if not calls.begun(cells):
        return 0.0
    given = [(case, value) for case in cases if (value := calls(args_of(case))) is not None]
    return sum(code_judge.passed(given)) / len(cases)


def _ended(result: CodeResult) -> CodeResult:
    if system_failed(result):
        raise InfraError(f"The sandbox ({result.kind}) failed a test: {result.status}: {result.output[:300]}")
    return result


_tests_passed.__name__ = "tests_passed"
tests_passed = Judge(
    _tests_passed,
    timeout_seconds=JUDGE_SECONDS,
    needs=sandbox,
    opens=sandbox,
    asks=asked,
    reference_form="{}",
    variables=SANDBOX,
)
