"""Judges values that model-written code returned, in a process that can be killed and that never runs model-written code.

The process is a session of the sandbox that has only `sandbox.function_tests` and `program_tests`. There is one session per
core. Each request runs in a fork of a session, with limits on processor time and memory, and the fork ends with the request. A
value that uses up these limits fails its test. If the process is lost in another way, the system has failed, and the value is
not judged.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from agentrl.workflow.errors import InfraError
from agentrl.workflow.runtime.warm_processes import Warm
from agentrl.workflow.sandbox import CodeResult, Limits, Session, exact_json, function_tests, program_tests
from agentrl.workflow.tools.python import sandbox, system_failed

LIMITS = Limits(cpu_seconds=2.0)
"""The limits of one request. A million characters of ordinary data use a tenth of the processor time."""

WHOLE_CPU_SECONDS = 6.0
"""The longest processor time of all requests for one answer, in seconds. Values that are not judged within this time count as
wrong.
"""

ATTEMPTS = 2
MAX_ROUNDS = 8
"""The longest chain of calls in which the arguments of a call depend on values of earlier calls. Calls beyond this number count
as failed.
"""


def passed(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Return True or False for each pair: whether the value passes the case. A pair is a case and the value that a function
    returned for this case, both as text. Raise SandboxUnavailable if this machine has no working sandbox. Raise InfraError if
    the system failed.
    """
    verdicts: list[bool] = []
    waiting = list(_batches(pairs))[::-1]
    used = 0.0
    while waiting:
        batch = waiting.pop()
        if used >= WHOLE_CPU_SECONDS:
            verdicts += [False] * len(batch)
            continue
        result = asked("verdicts", json.dumps([list(map(list, batch))]))
        used += result.cpu_seconds
        if result.status == "ok":
            verdicts += (verdict is True for verdict in json.loads(result.value))
        elif len(batch) == 1:
            verdicts.append(False)
        else:  # one of the pairs takes too much: find out which
            waiting += [[pair] for pair in reversed(batch)]
    return verdicts


def relayed(reference: str, test: str, function: str, call: Callable[[str], str | None]) -> list[bool]:
    """Return True or False for each test of a test program: whether the model's function passes it.

    The list is empty if a value of the model's function made the tests fail as a whole.

    Args:
        reference: the program that runs before the tests; it defines the correct function.
        call: calls the model's function. It takes the arguments and returns the value, both as text; it returns None if the
            call failed.

    Raises:
        ValueError: these tests cannot judge any answer.
        SandboxUnavailable, InfraError: see `passed`.
    """
    known_calls: list[tuple[str, str | None]] = []
    for turn in range(MAX_ROUNDS + 1):
        final = turn == MAX_ROUNDS
        result = asked("outcome", json.dumps([reference, test, function, known_calls, final]))
        reply: dict[str, Any] = json.loads(result.value) if result.status == "ok" else {"unjudged": _describe(result)}
        if "unjudged" in reply:
            if turn:  # a value of the model's function
                return []
            raise ValueError(f"the tests cannot be judged: {reply['unjudged']}")
        if not reply["asked"]:
            return [held is True for held in reply["passed"]]
        known_calls = [*known_calls[: reply["known"]], *((args, call(args)) for args in reply["asked"])]
    return []


def _describe(result: CodeResult) -> str:
    return f"{result.status} {result.output.strip()[-300:]}".strip()


def _batches(pairs: Sequence[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    for pair in pairs:
        if batch and sum(len(case) + len(value) for case, value in [*batch, pair]) > exact_json.MAX_CHARACTERS:
            yield batch
            batch = []
        batch.append(pair)
    if batch:
        yield batch


def asked(function: str, args: str, warm: Warm[Session] | None = None, limits: Limits = LIMITS) -> CodeResult:
    """Call a function of agentrl in a judging session, with arguments as text.

    The status of the result is `ok`, or says which limit the call used up.

    Args:
        warm: the pool of sessions that define the function; None: the sessions with `sandbox.function_tests` and
            `program_tests`.
        limits: the limits of the call.

    Raises:
        SandboxUnavailable, InfraError: see `passed`.
    """
    for _ in range(ATTEMPTS):
        with (warm or judges).one() as session:
            result = session.call(function, args, limits, keeps=False)
            if session.alive and not system_failed(result):
                return result
    raise InfraError(f"The sandbox ({result.kind}) failed while it ran a judge: {result.status}: {result.output[:300]}")


def _open_session() -> Session:
    session = sandbox().session(LIMITS)
    for module in (function_tests, program_tests):
        result = session.run(_source(module))
        if result.status != "ok":
            session.close()
            raise InfraError(f"A judge did not start ({result.kind}): {result.status}: {result.output[-300:]}")
    return session


def _source(module: ModuleType) -> str:
    return inspect.getsource(module)


judges = Warm(_open_session)
