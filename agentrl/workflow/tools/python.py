"""python: runs a program in the sandbox and returns its output. Each call starts a new interpreter.

If the code fails (an exception, too much time, memory or output), the model reads the failure and the output so far. If a
program waited too long for a core, or if the sandbox failed, there is no observation, and the call is sent again. If no sandbox
works, a run that offers this tool is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

from agentrl.workflow.errors import AgentRLError, CodeFailure, ConfigError, InfraError, ToolFailure
from agentrl.workflow.runtime.once_per_process import Once
from agentrl.workflow.sandbox import MIB, CodeResult, Limits, Sandbox, Session
from agentrl.workflow.sandbox.find import find_sandbox
from agentrl.workflow.settings import settings
from agentrl.workflow.tools import Tool, clip, failure, run_within
from agentrl.workflow.trajectory import Exit, ToolResult

CPU_SECONDS = 5.0
MEMORY_MB = 512
MAX_CHARACTERS = 8000
OUTPUT_BYTES = 64 * 1024
CALL_SECONDS = 60.0
LEFT_RUNNING_TEXT = "[ended: processes and threads that were left running; they do not outlast their cell]"
SANDBOX = ("AGENTRL_SANDBOX", "AGENTRL_SANDBOX_PYTHON", "AGENTRL_SANDBOX_IMAGE")
"""The environment variables that select the sandbox."""


@Once
def sandbox() -> Sandbox:
    """Return the sandbox of this process. The first call selects it."""
    return find_sandbox(settings())


@dataclass(frozen=True)
class CodeTool(Tool):
    """A tool whose function returns a program. The program runs in the sandbox.

    Args:
        cpu_seconds: the processor time of one call, in seconds. A call exceeds `timeout_seconds` only if the machine is too
            busy, so that timeout is not the model's failure.
        keeps: True to run the programs of an episode as cells of one session, so names last from one call to the next.
    """

    cpu_seconds: float = CPU_SECONDS
    keeps: bool = False

    @property
    def limits(self) -> Limits:
        """The sandbox's limits for one call."""
        return Limits(self.cpu_seconds, memory_bytes=(self.memory_mb or MEMORY_MB) * MIB, output_bytes=OUTPUT_BYTES)

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Run the program, and return the text that the model reads.

        Raises:
            ToolFailure: the arguments have wrong names or types, or the program failed.
            InfraError: the system failed.
            ConfigError: the tool needs a session, and this process has none for it.
        """
        return self._observation(self._run_program(arguments))

    def run(self, arguments: Mapping[str, Any]) -> ToolResult:
        """See `Tool.run`. The failure of a program is a result, not an exception."""
        return self._tool_result(self._run_program(arguments))

    def open(self) -> Session:
        """Start a Python session in the sandbox that this process uses, with this tool's limits.

        Raises:
            InfraError: the session did not start.
        """
        return sandbox().session(self.limits)

    def cell(self, session: Session, arguments: Mapping[str, Any]) -> ToolResult:
        """Run the program as the session's next cell.

        Raises:
            ToolFailure: the arguments have wrong names or types; nothing was sent to the session.
            InfraError: the system failed.
        """
        return self._tool_result(session.run(self._program(arguments)))

    def _run_program(self, arguments: Mapping[str, Any]) -> CodeResult:
        if self.keeps:
            message = f"The tool {self.name!r} keeps a session for each episode, and this call has no session."
            raise ConfigError(message, "Use the tool python instead.")
        return sandbox().run(self._program(arguments), limits=self.limits)

    def _program(self, arguments: Mapping[str, Any]) -> str:
        program = self.answer(arguments)
        try:
            program.encode()
        except UnicodeEncodeError as error:
            raise ToolFailure("the code contains half a surrogate pair, which cannot be written to a file") from error
        return program

    def _observation(self, result: CodeResult) -> str:
        return clip(observation(result, self.limits), self.max_characters)

    def _tool_result(self, result: CodeResult) -> ToolResult:
        try:
            tool_result = ToolResult(self._observation(result))
        except CodeFailure as error:
            tool_result = failure(self, error)
        seen = Exit(result.kind, result.status, result.exit_code)
        return replace(tool_result, cpu_seconds=result.cpu_seconds, exit=seen)

    def overdue(self) -> AgentRLError:
        """See `Tool.overdue`. For this tool, a timeout is a failure of the system."""
        return InfraError(f"{self.name} was not served within {self.timeout_seconds:g} s.")


class Notebook:
    """The sessions of a conversation that runs in this process, without workers: one for each tool that keeps a session."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def run(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        """Run the tool and return its result. A mistake of the model is a result, not an exception.

        Raises:
            InfraError: the system failed.
        """
        try:
            return tool.cell(self._session(tool), arguments) if keeps_session(tool) else tool.run(arguments)
        except ToolFailure as error:
            return failure(tool, error)

    def call(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        """Run the tool in a separate thread and within its time limit. Every exception becomes a result for the model."""
        limit = None if keeps_session(tool) else tool.timeout_seconds  # a session has its own limit
        return run_within(tool, partial(self.run, tool, arguments), limit)

    def _session(self, tool: CodeTool) -> Session:
        if tool.name not in self._sessions:
            self._sessions[tool.name] = tool.open()
        return self._sessions[tool.name]

    @property
    def alive(self) -> bool:
        """True if all interpreters still exist, with the names that their cells defined."""
        return all(session.alive for session in self._sessions.values())

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()


def keeps_session(tool: object) -> TypeGuard[CodeTool]:
    """Return True if the tool runs its calls as cells of one session, which lasts as long as the episode."""
    return isinstance(tool, CodeTool) and tool.keeps


def observation(result: CodeResult, limits: Limits) -> str:
    """Return the text that the model reads about a program that succeeded.

    Raises:
        CodeFailure: the program failed. The error has the program's output and, if it was killed, the reason.
        InfraError: the system failed.
    """
    if system_failed(result):
        raise InfraError(f"The sandbox ({result.kind}) failed while it ran a program: {result.status}: {result.output[:300]}")
    left = LEFT_RUNNING_TEXT if result.left else ""
    if result.status == "ok":
        return "\n".join(filter(None, (result.output.rstrip("\n") or "(no output)", left)))
    output = result.output.rstrip("\n")
    reason = reasons(limits).get(result.status, "")
    if not reason and (not output or result.exit_code != 1):  # 1 is a traceback's, which says more
        reason = f"(exit code {result.exit_code})"
    raise CodeFailure("\n".join(filter(None, (output, reason, left))), status=result.status)


def system_failed(result: CodeResult) -> bool:
    """Return True if the sandbox failed or the machine was too busy. The result then says nothing about the code."""
    return result.status in ("sandbox_fault", "starved")


def reasons(limits: Limits) -> dict[str, str]:
    """Return, for each status of a sandbox result, the reason that the model reads. A status that a traceback explains has no
    reason.
    """
    return {
        "timeout_cpu": f"[stopped: it used up its {limits.cpu_seconds:g} s of processor time]",
        "timeout_wall": "[stopped: it slept or waited for too long]",
        "oom": f"[stopped: it needs more than {limits.memory_bytes // MIB} MB of memory]",
        "output_cap": f"[stopped: it printed more than {limits.output_bytes} bytes]",
        "pids": f"[stopped: it started more than {limits.processes} processes and threads]",
        "disk": f"[stopped: it wrote more than {limits.tmp_bytes // MIB} MB of files, or too many of them]",
        "killed": "[stopped: it crashed the interpreter]",
    }


def _python(code: str) -> str:
    """Runs a Python program and returns what it prints. Nothing is kept between calls."""
    return code


_python.__name__ = "python"
python = CodeTool(
    _python,
    timeout_seconds=CALL_SECONDS,
    max_characters=MAX_CHARACTERS,
    memory_mb=MEMORY_MB,
    needs=sandbox,
    opens=sandbox,
    variables=SANDBOX,
)
