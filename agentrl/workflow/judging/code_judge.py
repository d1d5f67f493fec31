"""Judging of values that model-written code returned, in a process that can be killed and that never ran such code.

The process is a session of the sandbox that has only `sandbox.function_tests` and `program_tests`. There is one session per
core. Each request is a call in a fork of a session, with limits on processor time and memory, and the fork ends with the
request. A value that uses up these limits fails its test. If the process is lost in another way, it is a system failure, and
the value is not judged.
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
"""The limits of one request. A million characters of ordinary data use a tenth of them."""

WHOLE_CPU_SECONDS = 6.0
"""The processor time of all requests about one function, in seconds. Values that are not judged by then count as wrong."""

ATTEMPTS = 2
MAX_ROUNDS = 8
"""The longest chain of calls whose arguments depend on earlier values; calls beyond it count as failed."""


def passed(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Return for each pair of a case and the value that a function returned for it, both as text, whether the value passes.

    Raises:
        SandboxUnavailable: no sandbox works here.
        InfraError: the system failed.
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
    """Return for each test of a test program whether the model's function passes it; empty if a value of the function broke the
    tests.

    Args:
        reference: the program that runs before the tests; it defines the correct function.
        test: the tests.
        function: the name of the function.
        call: arguments -> the value of the model's function, both as text; None if the call failed.

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
    """Yield the pairs in order, in batches of at most as many characters as one value may have; a longer pair is a batch of its
    own.
    """
    batch: list[tuple[str, str]] = []
    for pair in pairs:
        if batch and sum(len(case) + len(value) for case, value in [*batch, pair]) > exact_json.MAX_CHARACTERS:
            yield batch
            batch = []
        batch.append(pair)
    if batch:
        yield batch


def asked(function: str, args: str, warm: Warm[Session] | None = None, limits: Limits = LIMITS) -> CodeResult:
    """Call one of our functions inside, with arguments as text. The result is `ok`, or says which limit the call used up.

    Args:
        warm: the sessions that have the function; None for those of this file.
        limits: the call's limits.

    Raises:
        SandboxUnavailable, InfraError: see `passed`.
    """
    for _ in range(ATTEMPTS):
        with (warm or judges).one() as session:
            result = session.call(function, args, limits, keeps=False)
            if session.alive and not system_failed(result):
                return result
    raise InfraError(f"The sandbox ({result.kind}) failed a judge: {result.status}: {result.output[:300]}")


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
