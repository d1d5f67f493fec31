"""A landlock sandbox as an ordinary user has it, without user ids and control groups of its own, for tests that root runs.

A process that gave up root serves it; the client below is a `Sandbox` to whoever holds it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl.workflow.errors import AgentRLError
from agentrl.workflow.sandbox import DEFAULTS, CodeResult, Limits, Session, landlock, payload
from agentrl.workflow.sandbox.boxed import Boxed

PYTHON = "/usr/bin/python3"
ROOT = Path(__file__).parents[2]


class OrdinarySession:
    """A `Session`."""

    def __init__(self, sandbox: "Ordinary", number: int, limits: Limits) -> None:
        self._sandbox = sandbox
        self._number = number
        self._limits = limits
        self.alive = True

    def run(self, code: str, limits: Limits | None = None) -> CodeResult:
        return self._sandbox.result(ask="cell", session=self._number, code=code, limits=asdict(limits or self._limits))

    def call(
        self, function: str, args: Sequence[object] | str, limits: Limits | None = None, *, keeps: bool = True
    ) -> CodeResult:
        given = args if isinstance(args, str) else list(args)
        request = {"session": self._number, "code": function, "args": given, "keeps": keeps}
        return self._sandbox.result(ask="call", **request, limits=asdict(limits or self._limits))

    def close(self) -> None:
        self._sandbox.ask(ask="close", session=self._number)


class Ordinary:
    """A `Sandbox`."""

    kind = "landlock"

    def __init__(self, uid: int) -> None:
        command = [sys.executable, "-m", "tests.support.unprivileged", str(uid)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, code: str, stdin: str = "", limits: Limits = DEFAULTS) -> CodeResult:
        return self.result(ask="run", code=code, stdin=stdin, limits=asdict(limits))

    def session(self, limits: Limits = DEFAULTS, reads: Sequence[str] = ()) -> OrdinarySession:
        return OrdinarySession(self, self.ask(ask="open", limits=asdict(limits), reads=list(reads))["session"], limits)

    def close(self) -> None:
        with self.process, suppress(BrokenPipeError):
            self.process.stdin.close()  # type: ignore[union-attr]

    def result(self, **request: Any) -> CodeResult:
        return CodeResult(**self.ask(**request))

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def answer(sandbox: Boxed, sessions: list[Session], request: dict[str, Any]) -> Any:
    limits = Limits(**request["limits"]) if "limits" in request else DEFAULTS
    if request["ask"] == "run":
        return asdict(sandbox.run(request["code"], request["stdin"], limits))
    if request["ask"] == "open":
        sessions.append(sandbox.session(limits, request["reads"]))
        return {"session": len(sessions) - 1}
    session = sessions[request["session"]]
    if request["ask"] == "cell":
        return asdict(session.run(request["code"], limits))
    if request["ask"] == "call":
        return asdict(session.call(request["code"], request["args"], limits, keeps=request["keeps"]))
    return session.close()


def main(uid: int) -> None:
    for scripts in (("runner",), ("runner", "exact_json", "cells")):
        payload.sources(*scripts)  # read while our own files can be
    landlock.keeper_source()
    landlock.check()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    sandbox = Boxed(landlock.launch(PYTHON, (), range(1)))
    sessions: list[Session] = []
    for line in sys.stdin:
        try:
            print(json.dumps(answer(sandbox, sessions, json.loads(line))), flush=True)
        except AgentRLError as error:
            print(json.dumps({"error": str(error)}), flush=True)
    sandbox.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
