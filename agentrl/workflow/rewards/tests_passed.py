"""tests_passed: the share of the task's hidden tests that the function in the answer passes.

The answer is the last ```python block of the final turn, else the whole text of that turn. This reward is a `Judge`: the
answer's code runs in a session of the sandbox, and each test calls the function there. The returned value is plain data, which
another session compares (`judging.code_judge`). So the answer's code knows neither the expected values nor the number of tests.

If a call exceeds its time or memory, that test fails. If the answer has used up the time for all of its tests, the remaining
tests count as failed. If the system fails, the answer is judged again.
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
"""The longest processor time of one judgement, in seconds, over all cells and calls."""

WHOLE_IDLE_SECONDS = 20.0
"""The longest time that the code of one judgement may sleep, in seconds, over all cells and calls."""

SERVED_SECONDS = 0.1
"""The time that this process needs at most to notice the end of a call, in seconds. It does not count as sleep of the code."""

MAX_TOLD = 4 * exact_json.MAX_CHARACTERS
"""The most characters of all values that a function may return for its tests. Once they are exceeded, further calls fail."""

MAX_LATE = 2
"""The most tests that may exceed their processor time. After so many, or after one test that slept until its timeout, the
remaining tests are not run and count as failed.
"""

JUDGE_SECONDS = 180.0
"""The time limit for a judgement, in seconds, without waits for a free sandbox. It is longer than the limits of the judged code
taken together, so only a failure of the system exceeds it.
"""

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def asked(episode: Episode) -> Mapping[str, Any] | float:
    """Return the judge's arguments, or 0.0 if the answer has no code. Raise ValueError if the task has no hidden test."""
    final_answer = episode.final_answer
    # A reference's docstring may hold a block.
    answer = final_answer if final_answer == episode.task.reference else read_code(final_answer)
    asking = question(episode.task, answer)
    return asking if episode.stop_reason == "answered" and writable(answer) else 0.0


def question(task: Task, answer: str) -> dict[str, Any]:
    """Return the arguments of the job that scores an answer to a task: a tools worker calls `tests_passed` with them.

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
    """Return the code that the text gives as its answer."""
    blocks = BLOCK.findall(text)
    return str(blocks[-1] if blocks else text).strip()


def writable(code: str) -> bool:
    """Return True if the code is not empty and can be encoded in UTF-8."""
    try:
        return bool(code.encode())
    except UnicodeEncodeError:
        return False


def _tests_passed(setup: str, answer: str, function: str, hidden: list[str], test: str = "", reference: str = "") -> ToolResult:
    """Return the share of tests that the answer's function passes."""
    return verdict_result(*_judged(setup, answer, function, tuple(hidden), test, reference)())


def verdict_result(verdict: object, cpu_seconds: float) -> ToolResult:
    """Return the tool result that is stored for a call of the judge. `verdict` is its verdict, any JSON value."""
    return ToolResult(json.dumps(verdict), cpu_seconds=cpu_seconds, exit=Exit(sandbox().kind, "ok", None))


@lru_cache(maxsize=4096)
def _judged(
    setup: str, answer: str, function: str, hidden: tuple[str, ...], test: str, reference: str
) -> Once[tuple[float, float]]:
    """Return a cached function for equal answers: the share of passed tests, and the processor time in seconds."""

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
    """Yield a sandbox session for judging, and close it afterwards. Raise SandboxUnavailable if this machine has no sandbox for
    model-written code. Raise InfraError if the session did not start.
    """
    session = sandbox().session(LIMITS)
    try:
        yield session
    finally:
        session.close()


class Budget:
    """The processor time and the idle time that the code of one judgement may use, both in seconds."""

    def __init__(self, cpu_seconds: float) -> None:
        self._most = cpu_seconds
        self._idle = self.used = 0.0

    @property
    def spent(self) -> bool:
        """True if the budget is used up. Then no further cell or call may start."""
        return self.used >= self._most or self._idle >= WHOLE_IDLE_SECONDS

    def pay(self, result: CodeResult) -> None:
        """Subtract the time that a cell or a call has used."""
        self.used += result.cpu_seconds
        self._idle += max(0.0, result.wall_seconds - result.cpu_seconds - result.waited_seconds - SERVED_SECONDS)


class Calls:
    """Calls of the function in a session, limited by the budget and by the total size of the returned values. `budget` is the
    budget for the cells and all calls. A call that would start after the budget is used up fails.
    """

    def __init__(self, session: Session, function: str, budget: Budget) -> None:
        self._session, self._function, self._budget = session, function, budget
        self._late = self._told = 0

    def begun(self, cells: Sequence[str]) -> bool:
        """Run the cells that are not empty. Return True if all of them succeeded. Raise InfraError if the sandbox failed, or
        the machine was too busy.
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
        """Call the function with encoded arguments (`checks.KnownCalls`). Return the encoded result; None if the call failed.
        Raise InfraError if the sandbox failed, or the machine was too busy.
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
    """Run the cells, and return the share of the cases that the function passes, from 0 to 1.

    The cases are texts, as in the task. The cells are run first; they are the code that the cases need. If a cell fails, the
    share is 0.0. A case that would start after the budget is used up counts as failed. Raise InfraError if the sandbox failed,
    or the machine was too busy.
    """
    calls = Calls(session, function, budget)
    if not calls.begun(cells):
        return 0.0
    case_values = [(case, value) for case in cases if (value := calls(args_of(case))) is not None]
    return sum(code_judge.passed(case_values)) / len(cases)


def _ended(result: CodeResult) -> CodeResult:
    if system_failed(result):
        raise InfraError(f"The sandbox ({result.kind}) failed while it ran a test: {result.status}: {result.output[:300]}")
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
