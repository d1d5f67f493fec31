"""The `tools` job: run one tool call, record its result, wake the episode that waits.

What a tool raises for the model's mistakes is its result; anything else it raises is its own fault, told to the model as
such and counted. A call that must not run twice commits its start first.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import UTC, datetime
from functools import cache
from logging import getLogger

from workers.app import app
from workers.process import database, worker_name
from workers.replies import Waker
from workflow.envs import Env
from workflow.errors import ToolFailure
from workflow.plugins import find
from workflow.settings import settings
from workflow.store import calls
from workflow.store.calls import UNKNOWN_OUTCOME, CallWork
from workflow.tools import Tool
from workflow.trajectory import ToolResult

log = getLogger("agentrl.tools")
MAX_RESULT_CHARACTERS = 65536
GRACE_SECONDS = 5.0
"""How much longer than its tool's limit a call may take to be recorded."""


@app.task(name="agentrl.call")
def call(call_id: int, reply_to: str) -> None:
    """Runs the call unless it is answered already."""
    work = calls.find_call(database(), call_id)
    if work is not None:
        started = datetime.now(UTC)
        result = _result(work)
        if result is None:
            return
        calls.record_result(database(), call_id, result, started, worker_name())
    _waker().wake(reply_to, call_id)


def _result(work: CallWork) -> ToolResult | None:
    """What the call came to; None while another worker may still be running it, and it must not run twice."""
    tool = toolset(work.env)[work.tool]
    if work.effects == "once":
        start = calls.start_once(database(), work.id, worker_name(), tool.timeout_seconds + GRACE_SECONDS)
        if start != "ours":
            return UNKNOWN_OUTCOME if start == "lost" else None
    return run_tool(tool, work)


def run_tool(tool: Tool, work: CallWork) -> ToolResult:
    """The tool's answer within its time limit; never raises for what the tool did."""
    start = time.perf_counter()

    def result(content: str, error_class: str | None = None) -> ToolResult:
        return ToolResult(content[:MAX_RESULT_CHARACTERS], error_class, time.perf_counter() - start)

    future = _threads().submit(tool.call, work.arguments)
    try:
        return result(future.result(timeout=tool.timeout_seconds))
    except FutureTimeout:
        return result(f"{tool.name} took longer than {tool.timeout_seconds:g} s", "timeout")
    except ToolFailure as error:
        return result(str(error), "tool_error")
    except Exception as error:
        log.exception("tool %s raised", tool.name)
        return result(f"{tool.name} failed: {type(error).__name__}: {error}", "tool_crash")


@cache
def toolset(env: str) -> dict[str, Tool]:
    """The tools of the run's env, by the name the model writes."""
    found: Env = find("envs", env)
    return found.toolset()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=64, thread_name_prefix="tool")


_lock = threading.Lock()


def _waker() -> Waker:
    with _lock:
        return _make_waker()


@cache
def _make_waker() -> Waker:
    return Waker(settings())
