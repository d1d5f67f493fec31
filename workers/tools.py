"""The `tools` job: run one tool call, record its result, wake the episode that waits.

What a tool raises for the model's mistakes is its result; anything else it raises is its own fault, told to the model as
such and counted. A call that must not run twice commits its start first.
"""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import cache
from logging import getLogger
from typing import Any

from workers.app import app, row_id
from workers.process import Once, claim_name, database, worker_name
from workers.replies import Waker
from workflow.envs import Env
from workflow.errors import ServiceError, ToolFailure
from workflow.faults import faultpoint
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


@app.task(name="agentrl.call", throws=(ServiceError,))
def call(call_id: int, reply_to: str) -> None:
    """Runs the call unless it is answered already."""
    work = calls.find_call(database(), row_id(call_id))
    if work is not None:
        started = datetime.now(UTC)
        result = _result(work)
        if result is None:
            return
        faultpoint("run_tool.after")
        calls.record_result(database(), call_id, result, started, worker_name())
    faultpoint("wake.before")
    _waker().wake(reply_to, call_id)
    faultpoint("call.end")


def _result(work: CallWork) -> ToolResult | None:
    """What the call came to; None while another worker may still be running it, and it must not run twice."""
    try:
        tool = toolset(work.env)[work.tool]
    except (Exception, SystemExit) as error:
        # Told to the model: unanswered, the call would be sent again and again to a worker that cannot import it.
        log.exception("tool %s of env %s cannot be loaded", work.tool, work.env)
        return ToolResult(f"{work.tool} cannot be loaded: {type(error).__name__}: {str(error)[:1000]}", "tool_crash")
    if work.effects == "once":
        start = calls.start_once(database(), work.id, claim_name(), tool.timeout_seconds + GRACE_SECONDS)
        if start != "ours":
            return UNKNOWN_OUTCOME if start == "lost" else None
    return run_tool(tool, work)


def run_tool(tool: Tool, work: CallWork) -> ToolResult:
    """The tool's answer within its time limit; never raises for what the tool did."""
    faultpoint("run_tool.before")
    start = time.perf_counter()

    def result(content: str, error_class: str | None = None) -> ToolResult:
        return ToolResult(content[:MAX_RESULT_CHARACTERS], error_class, time.perf_counter() - start)

    answer: Future[str] = Future()
    # A thread of its own for each call: one that never ends takes nobody else's place.
    threading.Thread(target=_answer, args=(answer, tool, work.arguments), name=f"tool-{tool.name}", daemon=True).start()
    try:
        error = answer.exception(tool.timeout_seconds)
    except TimeoutError:
        return result(f"{tool.name} took longer than {tool.timeout_seconds:g} s", "timeout")
    if error is None:
        return result(answer.result())
    if isinstance(error, ToolFailure):
        return result(str(error), "tool_error")
    log.error("tool %s raised", tool.name, exc_info=error)
    return result(f"{tool.name} failed: {type(error).__name__}: {error}", "tool_crash")


def _answer(answer: "Future[str]", tool: Tool, arguments: Mapping[str, Any]) -> None:
    try:
        answer.set_result(str(tool.call(arguments)))
    except BaseException as error:  # noqa: BLE001 - anybody's code, and `exit()` in it; it is recorded as the call's result
        answer.set_exception(error)


@cache
def toolset(env: str) -> dict[str, Tool]:
    """The tools of the run's env, by the name the model writes."""
    found: Env = find("envs", env)
    return found.toolset()


@Once
def _waker() -> Waker:
    return Waker(settings())
