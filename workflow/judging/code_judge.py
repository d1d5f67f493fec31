"""Judging: what model-written code returned is decoded and compared in a process that may be killed, and that never ran any.

Such a process is a session of the sandbox that knows `sandbox.cases` and `checks`, and nothing of a model. As many as
there are cores last; each question is a call in a fork of one, limited in its processor time and memory, and gone afterwards. A
value that uses these up fails its test. Where the process is lost otherwise, the system has failed, and nothing is said of the
value.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from agentrl.workflow.errors import InfraError
from agentrl.workflow.runtime.warm_processes import Warm
from agentrl.workflow.sandbox import Limits, Result, Session, cases, checks, exact_json
from agentrl.workflow.tools.python import sandbox, system_failed

LIMITS = Limits(cpu_seconds=2.0)
"""Limits of one question. A million characters of the most usual data take a tenth of it."""

WHOLE_CPU_SECONDS = 6.0
"""Limit of all questions about one function: what is left after that counts as wrong."""

ATTEMPTS = 2
MOST_ROUNDS = 8
"""Calls whose arguments depend on what as many calls before them gave have failed."""


def passed(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Whether the value passes, for each pair of a case's text and the text of the value that a function gave for it.

    Raises:
        SandboxUnavailable: nothing here can hold it.
        InfraError: the system failed.
    """
    found: list[bool] = []
    waiting = list(_batches(pairs))[::-1]
    used = 0.0
    while waiting:
        batch = waiting.pop()
        if used >= WHOLE_CPU_SECONDS:
            found += [False] * len(batch)
            continue
        result = asked("verdicts", json.dumps([list(map(list, batch))]))
        used += result.cpu_seconds
        if result.status == "ok":
            found += (verdict is True for verdict in json.loads(result.value))
        elif len(batch) == 1:
            found.append(False)
        else:  # one of them is too much: which one?
            waiting += [[pair] for pair in reversed(batch)]
    return found


def relayed(reference: str, test: str, function: str, call: Callable[[str], str | None]) -> list[bool]:
    """Whether the answer's function passes each test of a program of tests.

    Args:
        reference: the program that the tests run after; it defines the function as it should be.
        call: the text of arguments -> that of the value which the answer's function gives for them; None: it gives none.

    Raises:
        ValueError: these tests cannot be judged, whatever the answer.
        SandboxUnavailable, InfraError: as `passed`.
    """
    told: list[tuple[str, str | None]] = []
    for turn in range(MOST_ROUNDS + 1):
        final = turn == MOST_ROUNDS
        result = asked("outcome", json.dumps([reference, test, function, told, final]))
        found: dict[str, Any] = json.loads(result.value) if result.status == "ok" else {"unjudged": _describe(result)}
        if "unjudged" in found:
            if turn:  # it is what the answer gave
                return []
            raise ValueError(f"the tests cannot be judged: {found['unjudged']}")
        if not found["asked"]:
            return [held is True for held in found["passed"]]
        told = [*told[: found["known"]], *((args, call(args)) for args in found["asked"])]
    return []


def _describe(result: Result) -> str:
    return f"{result.status} {result.output.strip()[-300:]}".strip()


def _batches(pairs: Sequence[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """The pairs in order, no more characters at once than one value may have, save where one alone has more."""
    batch: list[tuple[str, str]] = []
    for pair in pairs:
        if batch and sum(len(case) + len(value) for case, value in [*batch, pair]) > exact_json.MAX_CHARACTERS:
            yield batch
            batch = []
        batch.append(pair)
    if batch:
        yield batch


def asked(function: str, args: str, warm: Warm[Session] | None = None, limits: Limits = LIMITS) -> Result:
    """What a function of ours came to inside, for arguments as the text of plain data: `ok`, or that they took too much.

    Args:
        warm: the sessions that know the function; those of this file where None.
        limits: of the call.

    Raises:
        SandboxUnavailable, InfraError: as `passed`.
    """
    for _ in range(ATTEMPTS):
        with (warm or judges).one() as session:
            result = session.call(function, args, limits, keeps=False)
            if session.alive and not system_failed(result):
                return result
    raise InfraError(f"The sandbox ({result.kind}) failed a judge: {result.status}: {result.output[:300]}")


def _open_session() -> Session:
    session = sandbox().session(LIMITS)
    for module in (cases, checks):
        result = session.run(_source(module))
        if result.status != "ok":
            session.close()
            raise InfraError(f"A judge did not start ({result.kind}): {result.status}: {result.output[-300:]}")
    return session


def _source(module: ModuleType) -> str:
    return inspect.getsource(module)


judges = Warm(_open_session)
