"""The tool python: what a program prints, what it did wrong, what the system did, and whose limits hold."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from agentrl.workers.jobs.tool_call import run_tool
from agentrl.workers.requests.submit import prepare
from agentrl.workflow.config import build
from agentrl.workflow.errors import CodeFailure, InfraError, SandboxUnavailable, ToolFailure
from agentrl.workflow.sandbox import CodeResult, Limits
from agentrl.workflow.sandbox.boxed import Boxed
from agentrl.workflow.settings import settings
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.tool_calls import CallWork
from agentrl.workflow.tools.python import LEFT_RUNNING_TEXT, CodeTool, Notebook, observation, python, sandbox
from agentrl.workflow.tools.python_session import python_session
from agentrl.workflow.trajectory import ToolResult
from tests.support.sandbox_fixtures import machine
from tests.support.small_models import tiny_random


@pytest.fixture(scope="module")
def box() -> None:
    """A machine that can hold the process's sandbox."""
    machine()


def told(code: str, tool: CodeTool = python) -> ToolResult:
    """What the model reads of a call."""
    return run_tool(tool, CallWork(1, "code", tool.name, {"code": code}, tool.effects))


def test_python_tool_returns_output_and_keeps_nothing(box: None) -> None:
    assert told("x = 6\nprint(x * 7)").content == "42"
    assert told("print(x)").error_class == "code_error"
    assert told("open('/tmp/note', 'w').write('x')").content == "(no output)"
    assert told("print(open('/tmp/note').read())").content.splitlines()[-1].startswith("FileNotFoundError")


def test_python_tool_schema_names_code_argument() -> None:
    function = python.schema["function"]
    assert function["name"] == "python"
    assert list(function["parameters"]["properties"]) == ["code"]


@pytest.mark.parametrize(
    ("code", "error_class", "said"),
    [
        ("print('before')\n1 / 0", "code_error", "before\nTraceback"),
        ("1 / 0", "code_error", "line 1, in <module>"),
        ("def f(:", "code_error", "SyntaxError"),
        ("import sys; sys.exit(3)", "code_error", "(exit code 3)"),
        ("raise SystemExit('no')", "code_error", "no"),
        ("print('so far')\nwhile True: pass", "timeout_cpu", "so far\n[stopped: it used up its 0.5 s of processor time]"),
        ("x = bytearray(10**9)", "oom", "[stopped: it needs more than 96 MB of memory]"),
        ("while True: print('x' * 1000)", "output_cap", "[stopped: it printed more than 65536 bytes]"),
        ("import os; os.abort()", "killed", "[stopped: it crashed the interpreter]"),
        ("a\0b", "code_error", "null bytes"),
        ("'\ud800'", "tool_error", "half a surrogate pair"),
        ("input()", "code_error", "EOFError"),
    ],
)
def test_python_tool_shows_error_of_code(box: None, code: str, error_class: str, said: str) -> None:
    result = told(code, replace(python, cpu_seconds=0.5, memory_mb=96, max_characters=100_000))
    if error_class == "oom" and result.error_class == "code_error":
        assert "MemoryError" in result.content  # the machine gives no memory cgroup
        return
    assert result.error_class == error_class
    assert said in result.content


def test_python_tool_cuts_output(box: None) -> None:
    assert told("print('y' * 50)", replace(python, max_characters=10)).content == "y" * 10 + "\n[cut: 40 more characters]"


def result(status: str, cpu_seconds: float = 0.0) -> CodeResult:
    """What a sandbox says."""
    return CodeResult(status, "said", None, cpu_seconds, 30.0, "bwrap")  # type: ignore[arg-type]


def test_python_tool_reports_ended_leftovers_of_cell(box: None) -> None:
    notebook = Notebook()
    sleeps = "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()"
    said = [notebook.run(python_session, {"code": code}) for code in (sleeps, f"{sleeps}\n1 / 0", "2")]
    notebook.close()
    assert said[0].content == f"(no output)\n{LEFT_RUNNING_TEXT}"
    assert said[1].content.endswith(f"ZeroDivisionError: division by zero\n{LEFT_RUNNING_TEXT}")
    assert said[2].content == "2"


def test_python_tool_makes_no_observation_of_system_failure() -> None:
    limits = Limits(cpu_seconds=5)
    for failed in (result("sandbox_fault"), result("starved", 2.0)):
        with pytest.raises(InfraError, match=failed.status):
            observation(failed, limits)


@pytest.mark.parametrize("cpu_seconds", [0.01, 2.0])
def test_python_tool_says_that_program_slept(cpu_seconds: float) -> None:
    with pytest.raises(CodeFailure, match=r"said\n.*it slept or waited") as slept:
        observation(result("timeout_wall", cpu_seconds), Limits(cpu_seconds=5))
    assert slept.value.error_class == "timeout_wall"
    assert isinstance(slept.value, ToolFailure)


def test_python_tool_call_on_busy_machine_is_resent(box: None) -> None:
    entered = threading.Event()

    def slow(code: str) -> str:
        """Is not served."""
        entered.wait(60)
        return code

    with pytest.raises(InfraError, match=r"slow was not served within 0\.05 s"):
        told("", CodeTool(slow, timeout_seconds=0.05))
    entered.set()


@pytest.fixture
def taken(box: None) -> Iterator[Callable[[], None]]:
    """All turns of the process's sandbox, and what gives them back."""
    made = sandbox()
    assert isinstance(made, Boxed)
    with ExitStack() as turns:
        for _ in range(os.cpu_count() or 1):
            turns.enter_context(made._turns.hold())
        yield turns.close


def test_python_tool_call_time_excludes_queueing(taken: Callable[[], None]) -> None:
    threading.Timer(1.5, taken).start()
    waited = told("print(1)", replace(python, timeout_seconds=1.0))
    assert waited.content == "1"
    assert waited.seconds < 1


def test_python_tool_call_given_up_takes_no_turn(taken: Callable[[], None]) -> None:
    def late(code: str) -> str:
        """Comes too late to ask for its turn."""
        given_up.wait(60)
        return code

    class Late(CodeTool):
        def run(self, arguments: Mapping[str, Any]) -> ToolResult:
            try:
                return super().run(arguments)
            except InfraError as error:
                said.put(error.message)
                raise

    given_up, said = threading.Event(), SimpleQueue[str]()
    with pytest.raises(InfraError, match="not served"):
        told("print(1)", Late(late, timeout_seconds=0.05))
    given_up.set()
    assert said.get(timeout=60) == "The call was cancelled while it waited."


def test_python_tool_without_sandbox_refuses_run_with_remedy(
    own_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = sandbox() if sandbox.made else None
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("AGENTRL_SANDBOX", "bwrap")
    settings.cache_clear()
    sandbox.forget()
    asked = {"dataset.name": "arithmetic", "model.path": str(tiny_random(tmp_path / "model")), "tools": "python"}
    try:
        with pytest.raises(SandboxUnavailable, match=r"bubblewrap is not installed\. apt-get install bubblewrap"):
            prepare(own_database, build(asked))
    finally:
        settings.cache_clear()
    if made is not None:
        made.close()
