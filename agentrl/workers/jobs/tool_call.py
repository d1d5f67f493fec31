"""The `tools` job: run the tool calls of a message side by side, record each result, and wake the episode that waits. The
questions to an episode's judges are such calls too.

- An error that a tool raises for the model's mistake is the call's result.
- Any other error counts as the tool's own fault. The model is told so, and the error is counted.
- If the system failed, not the tool, the call stays without a result and is sent again. After too many sends, its group's
    attempt fails.
- If this process lacks something that the tool needs, the process tells the rollout worker at once, and the rollout worker
    continues to wait. No output of the model can cause this case.
- If a call must not run twice, its start is committed before it runs.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from logging import getLogger
from typing import Any, TypeVar

from agentrl.workers.jobs.interpreters import Sessions
from agentrl.workers.stack.celery_app import app, own_queue, row_id
from agentrl.workers.stack.dispatch import MAX_CALLS, NO_REPLY, send_calls
from agentrl.workers.stack.process import claim_name, database, stopping, worker_name
from agentrl.workers.stack.replies import Waker
from agentrl.workflow import emitters
from agentrl.workflow.annotations import Annotation
from agentrl.workflow.errors import (
    AgentRLError,
    ConfigError,
    InfraError,
    SandboxUnavailable,
    ServiceError,
    ToolFailure,
    Unready,
)
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.plugins import find
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.runtime.log_fields import log_fields
from agentrl.workflow.runtime.once_per_process import Once
from agentrl.workflow.runtime.wait_budget import Patience
from agentrl.workflow.settings import settings
from agentrl.workflow.store import tool_calls
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.tool_calls import UNKNOWN_OUTCOME, CallWork
from agentrl.workflow.store.tool_sessions import SessionKey
from agentrl.workflow.tools import Tool, failure
from agentrl.workflow.tools.python import CodeTool, Notebook
from agentrl.workflow.trajectory import ToolResult

log = getLogger("agentrl.tools")
Answer = TypeVar("Answer")
RESTART_HINT = "Restart that worker with what it needs (embedded: agentrl down, then agentrl resume RUN)."
GRACE_SECONDS = 5.0
"""The time after the tool's time limit within which a call's result must be recorded, in seconds. After that, a call that must
not run twice is lost.
"""
LOOKS_PER_LIMIT = 8
"""How often the clock is read within the time limit of a call."""

_slots = threading.Semaphore(MAX_CALLS)
_running: set[int] = set()
_running_lock = threading.Lock()


@app.task(name="agentrl.calls", throws=(ServiceError, InfraError), bind=True)
def calls(self: Any, call_ids: Sequence[int], reply_to: str) -> None:
    """Run the tool calls of a message, each in a thread of its own, so that no call waits for another one or fails with it.

    If the message was delivered before, one of its calls may have ended that worker. The calls are then sent again, each alone.

    Raises:
        ServiceError, InfraError: some calls have no result; the first error.
        ConfigError: the message is malformed.
    """
    if not isinstance(call_ids, list) or not 0 < len(call_ids) <= MAX_CALLS:
        raise ConfigError(f"A message must contain 1 to {MAX_CALLS} tool calls, not {call_ids!r:.100}.")
    outcomes: dict[int, Future[None]] = {row_id(call_id): Future() for call_id in call_ids}
    if len(outcomes) > 1 and (self.request.delivery_info or {}).get("redelivered"):
        for call_id in outcomes:
            send_calls([call_id], reply_to)
        return
    first, *others = [(outcome, partial(_call, call_id, reply_to)) for call_id, outcome in outcomes.items()]
    for other in others:
        threading.Thread(target=_settle, args=other, name="call").start()
    _settle(*first)
    errors = {call_id: error for call_id, outcome in outcomes.items() if (error := outcome.exception())}
    for call_id, error in list(errors.items())[1:]:  # Celery logs only the one that is raised
        log.error("call %d has no result: %s", call_id, error)
    for error in errors.values():
        raise error


def limit_calls(count: int) -> None:
    """Set the number of calls that this process runs at once."""
    global _slots
    _slots = threading.Semaphore(count)


def _call(call_id: int, reply_to: str) -> None:
    """Run the tool call when a slot is free. If this process stops meanwhile, send the call to another worker instead."""
    with _slots:
        if stopping.is_set():
            send_calls([call_id], reply_to)
        else:
            _run_call(call_id, reply_to)


def _run_call(call_id: int, reply_to: str) -> None:
    """Run the tool call unless it has a result, record the result, and wake the rollout worker at `reply_to`."""
    work = tool_calls.find_call(database(), call_id)
    try:
        if work is not None:
            with log_fields(run_id=work.run, episode=work.episode, attempt=work.attempt):
                if not _answer_call(work, reply_to):
                    return
    except Unready as error:
        with suppress(ConfigError):  # a malformed address must not hide the call's own failure
            _wake_waiter(reply_to, call_id, " ".join(str(error).split()))
        raise
    faultpoint("wake.before")
    _wake_waiter(reply_to, call_id)
    faultpoint("call.end")


def _wake_waiter(reply_to: str, call_id: int, reason: str = "") -> None:
    if reply_to != NO_REPLY:
        _waker().wake(reply_to, call_id, reason)


def _answer_call(work: CallWork, reply_to: str) -> bool:
    """Run the call and record its result, or forward it to the worker that has its session.

    Returns:
        False if another thread or worker has the call: it was forwarded, a thread of this process runs it, or it must not run
            twice and another worker may be running it. Otherwise True.
    """
    started = datetime.now(UTC)
    tool = _load_tool(work)
    if isinstance(tool, CodeTool) and tool.keeps:
        owner = _sessions().answer(SessionKey(work.episode, work.attempt, work.tool), work.id, tool)
        if owner != own_queue():
            send_calls([work.id], reply_to, owner)
        return owner == own_queue()
    with _hold_call(work.id) as alone:
        result = _run_or_skip(tool, work) if alone else None
        if result is None:
            return False
        faultpoint("run_tool.after")
        tool_calls.record_result(database(), work.id, result, started, worker_name())
    return True


@contextmanager
def _hold_call(call: int) -> Iterator[bool]:
    """Yield whether no other thread of this process runs the call. A repeated message must not queue the same call twice."""
    with _running_lock:
        alone = call not in _running
        _running.add(call)
    try:
        yield alone
    finally:
        if alone:
            with _running_lock:
                _running.discard(call)


def _load_tool(work: CallWork) -> Tool:
    """Load the call's tool. Raise Unready if this process cannot load it; the rollout worker could."""
    try:
        tool: Tool = find("rewards", work.tool) if work.kind == "grade" else load_toolset(database(), work.run)[work.tool]
    except ServiceError:
        raise
    except (Exception, SystemExit) as error:
        log.exception("tool %s of env %s cannot be loaded", work.tool, work.env)
        reason = str(error) if isinstance(error, AgentRLError) else f"{type(error).__name__}: {error}"
        raise Unready(f"The tools worker {worker_name()} cannot load {work.tool}: {reason[:1000]}", RESTART_HINT) from error
    return tool


def _run_or_skip(tool: Tool, work: CallWork) -> ToolResult | None:
    """Return the call's result. Return None if the call must not run twice and another worker may be running it."""
    if work.effects == "once":
        unopened = _open_tool(tool)
        if unopened is not None:  # and the call was not started
            return _unopened_result(tool, unopened)
        start = tool_calls.start_once(database(), work.id, claim_name(), tool.timeout_seconds + GRACE_SECONDS)
        if start != "ours":
            return UNKNOWN_OUTCOME if start == "lost" else None
    return run_tool(tool, work)


def run_tool(tool: Tool, work: CallWork) -> ToolResult:
    """Run the tool within its time limit. An error of the tool becomes its result. Raise InfraError if the system failed the
    tool. Raise Unready if this process lacks what the tool needs.
    """
    faultpoint("run_tool.before")
    unopened = _open_tool(tool)
    if unopened is not None:
        return _unopened_result(tool, unopened)
    patience, answer = Patience(), Future[ToolResult]()
    # A thread for each call, so that a call that never ends takes no other call's place.
    attempt = (answer, partial(_run_timed, tool, work, patience))
    threading.Thread(target=_settle, args=attempt, name=f"tool-{tool.name}", daemon=True).start()
    error = _wait_for_answer(answer, tool, patience)
    result = answer.result() if error is None else _failure_result(tool, error)
    return replace(result, seconds=patience.own_seconds)


def _wait_for_answer(answer: "Future[ToolResult]", tool: Tool, patience: Patience) -> BaseException | None:
    """Wait for the call within its tool's time limit. Return the exception of the call, or None if it succeeded.

    Time in the tool's queue does not count. Time in which this process is suspended does not count either: frequent reads of
    the clock show how long the suspension was.
    """
    wait = 0.0
    while (left := tool.timeout_seconds - patience.look(wait)) > 0:
        wait = min(left, tool.timeout_seconds / LOOKS_PER_LIMIT)
        with suppress(TimeoutError):
            error = answer.exception(wait)
            patience.look(wait)
            return error
    patience.end()
    return tool.overdue()


def run_cell(tool: CodeTool, notebook: Notebook, arguments: Mapping[str, Any]) -> ToolResult:
    """Run the notebook's next cell with a tool that has a session. An error of the tool becomes its result.

    Only the sandbox enforces the time limit. If another limit ended the wait here, the cell could still be running when the
    next cell starts. Raise InfraError if the system failed the tool.
    """
    patience = Patience()
    try:
        with patience.hold():
            result = notebook.run(tool, arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's tool; failures of the system are raised again
        result = _failure_result(tool, error)
    return replace(result, seconds=patience.own_seconds)


def _run_timed(tool: Tool, work: CallWork, patience: Patience) -> ToolResult:
    annotations: list[Annotation] = []
    try:
        with patience.hold(), emitters.collected(annotations, "tool", f"call:{work.id}"):
            result = tool.run(work.arguments)
    except ToolFailure as error:
        result = failure(tool, error)
    result = replace(result, annotations=tuple(annotations)) if annotations else result
    return result if result.exit else replace(result, cpu_seconds=time.thread_time())


def _settle(answer: "Future[Answer]", work: Callable[[], Answer]) -> None:
    try:
        answer.set_result(work())
    except BaseException as error:  # noqa: BLE001 - a user's code, even `exit()`; recorded as the call's result
        answer.set_exception(error)


def _open_tool(tool: Tool) -> BaseException | None:
    """Open the resources that all calls of the tool share. Return the exception of a failure, else None."""
    opened: Future[object] = Future()
    if tool.opens is None:
        return None
    _settle(opened, tool.opens)
    return opened.exception()


def _unopened_result(tool: Tool, error: BaseException) -> ToolResult:
    """Return the result of a call whose tool could not open its resources."""
    if isinstance(error, AgentRLError) and not isinstance(error, ToolFailure):
        raise _unready_error(tool, error) from error
    return _failure_result(tool, error)


def _unready_error(tool: Tool, error: AgentRLError) -> Unready:
    log.error("tool %s cannot run here: %s", tool.name, error)
    return Unready(f"{tool.name} cannot run on {worker_name()}: {error.message}", f"{error.hint} {RESTART_HINT}".strip())


def _failure_result(tool: Tool, error: BaseException) -> ToolResult:
    """Return the result of a call that raised an exception. Raise Unready if a resource of this process is missing, which a
    model cannot cause. Raise InfraError if the system failed the tool.
    """
    if isinstance(error, ConfigError | SandboxUnavailable):
        raise _unready_error(tool, error) from error
    if isinstance(error, AgentRLError) and not isinstance(error, ToolFailure):
        log.error("the system failed tool %s: %s", tool.name, error)
        raise InfraError(f"{tool.name} cannot run on {worker_name()}: {error.message}", error.hint) from error
    result = failure(tool, error)
    if result.error_class == "tool_crash":
        log.error("tool %s raised", tool.name, exc_info=error)
    return result


@lru_cache(maxsize=64)
def load_toolset(db: Database, run: int) -> Mapping[str, Tool]:
    """Return the tools of the run and of its env, by the names that the model uses."""
    return Experiment.load(tool_calls.load_config(db, run)).tools


@Once
def _sessions() -> Sessions:
    sessions = Sessions(database(), own_queue(), settings().lease_seconds, _failure_result)
    sessions.start()
    return sessions


@Once
def _waker() -> Waker:
    return Waker(settings())
