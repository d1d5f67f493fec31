"""The server of tools over HTTP, for other programs: `agentrl tools serve`.

`GET /tools` lists the tools, and `GET /tools/NAME` describes one. `POST /tools/NAME/call` with `{"arguments": {...}}` runs a
tool like a `tools` job, with the same limits. The response has status 200 if a model would read its content: a result, an error
about wrong arguments, or a timeout. `error_class` says which of these it is. The statuses 401, 404, 408, 413 and 422 are errors
of the client. Status 503 means that the system failed, and that the client may retry. Requests need `Authorization: Bearer
TOKEN`, except those for `/openapi.json`, which names no tool.

`POST /sessions` opens a session, for tools whose variables last from one call to the next. `POST
/sessions/SESSION/tools/NAME/call` runs a call in the session, and `DELETE /sessions/SESSION` ends it. Status 404 means that the
session has ended, 429 that too many sessions are open.

The server uses plain HTTP and stores nothing. A tool that must run `once` runs at each call.
"""

import asyncio
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from logging import getLogger
from math import ceil
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl import __version__
from agentrl.workers.http.api_errors import ApiError
from agentrl.workers.http.calls import MAX_HEAD_BYTES, Call, ClientGone
from agentrl.workers.http.http_server import make_server
from agentrl.workers.http.http_server import serve as serve_http
from agentrl.workers.jobs.tool_call import GRACE_SECONDS, run_cell, run_tool
from agentrl.workers.requests.tool_selection import Description
from agentrl.workers.serving.caller_sessions import ServedSessions
from agentrl.workflow.agent import refusal
from agentrl.workflow.config import RolloutConfig
from agentrl.workflow.errors import ConfigError, InfraError, NotFoundError, ServiceError, StateError, did_you_mean, locate_error
from agentrl.workflow.store.tool_calls import CallWork
from agentrl.workflow.tools import Tool
from agentrl.workflow.tools.python import Notebook, keeps_session
from agentrl.workflow.trajectory import ToolCall, ToolResult, storable

log = getLogger("agentrl.tool_server")
MAX_BYTES = 1_000_000
"""The largest body of a request, in bytes. The largest arguments of a tool fit into this size, even if all characters are
escaped.
"""
BODY_SECONDS = 60.0
"""The time limit for receiving a request's body, in seconds."""

BACKLOG = 128


class ToolCallBody(BaseModel):
    """The body of a call."""

    model_config = ConfigDict(extra="forbid")

    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallResult:
    """The tool's result as a model would read it; `error_class` is null for success. `seconds` is the duration of the call."""

    result: str
    error_class: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session: its name, the tools whose variables last in it, and the seconds without a call after which it ends."""

    session: str
    tools: list[str]
    idle_seconds: float


_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": ToolCallBody.model_json_schema()}}}}
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    401: {"description": "No token, or a wrong one"},
    404: {"description": "Unknown tool, or unknown or closed session"},
}
_CALL_PROBLEMS: dict[int | str, dict[str, Any]] = {
    408: {"description": f"The body did not arrive within {BODY_SECONDS:.0f} s"},
    413: {"description": f"More than {MAX_BYTES} bytes"},
    422: {"description": "Not the expected JSON object"},
    503: {"description": "Internal failure; the call may be sent again"},
}
_SESSION_PROBLEMS: dict[int | str, dict[str, Any]] = {409: {"description": "The tool is called in a session"}}
_SESSION_HINT = "POST /sessions opens one, POST /sessions/SESSION/tools/NAME/call calls in it."


def application(tools: Mapping[str, Tool], token: str, sessions: ServedSessions) -> FastAPI:
    """Return the ASGI application with the routes for these tools."""
    guard = Depends(_token_check(token))
    app = FastAPI(title="agentrl tools", version=__version__, docs_url=None, redoc_url=None, dependencies=[guard])

    app.add_exception_handler(Exception, _report)
    app.add_exception_handler(NotFoundError, _problem_handler(404))
    app.add_exception_handler(StateError, _problem_handler(429))
    session_tools = [name for name, tool in tools.items() if keeps_session(tool)]

    async def require_tool(name: str) -> Tool:
        if name not in tools:
            raise HTTPException(404, f"No tool is called {name[:100]!r}. {did_you_mean(name[:100], tools)}")
        return tools[name]

    @app.get("/tools", responses={401: _PROBLEMS[401]})
    async def list_tools() -> list[Description]:
        """Return all tools."""
        return [Description.of(tool) for tool in tools.values()]

    @app.post("/tools/{name:path}/call", responses=_PROBLEMS | _CALL_PROBLEMS | _SESSION_PROBLEMS, openapi_extra=_BODY)
    async def call_tool(tool: Annotated[Tool, Depends(require_tool)], request: Request) -> CallResult:
        """Run the tool. If the arguments are wrong, the tool's error message is the response."""
        if tool.name in session_tools:
            raise HTTPException(409, f"{tool.name!r} needs a session. {_SESSION_HINT}")
        return await run_in_threadpool(_call_answer, tool, await _arguments(request))

    @app.get("/tools/{name:path}", responses=_PROBLEMS)
    async def describe_tool(tool: Annotated[Tool, Depends(require_tool)]) -> Description:
        """Return one tool: its schema, effects and limits."""
        return Description.of(tool)

    @app.post("/sessions", status_code=201, responses={401: _PROBLEMS[401], 429: {"description": "Too many sessions are open"}})
    async def open_session() -> SessionInfo:
        """Open a session."""
        return SessionInfo(sessions.open(), session_tools, sessions.idle_seconds)

    @app.post("/sessions/{session}/tools/{name:path}/call", responses=_PROBLEMS | _CALL_PROBLEMS, openapi_extra=_BODY)
    async def call_in_session(session: str, tool: Annotated[Tool, Depends(require_tool)], request: Request) -> CallResult:
        """Run the tool after all earlier calls of the session. The tool's state lasts until the session ends."""
        return await sessions.run(session, partial(_call_answer, tool, await _arguments(request)))

    @app.delete("/sessions/{session}", status_code=204, responses=_PROBLEMS)
    async def close_session(session: str) -> None:
        """End a session after the call that is running in it. Calls that still wait in the session fail with status 404."""
        await sessions.close(session)

    return app


def _problem_handler(status: int) -> Callable[[Request, Exception], Awaitable[JSONResponse]]:
    async def answer_problem(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": storable(str(error))}, status)

    return answer_problem


async def _report(request: Request, error: Exception) -> JSONResponse:
    """Log the place of a bug, without a traceback."""
    log.error("a request failed: %s in %s", type(error).__name__, locate_error(error))
    return JSONResponse({"detail": "The server failed; the reason is in its log."}, 500)


def _token_check(token: str) -> Callable[..., Awaitable[None]]:
    scheme = HTTPBearer(auto_error=False)

    async def check(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(scheme)]) -> None:
        if credentials is None or not secrets.compare_digest(credentials.credentials.encode(), token.encode()):
            raise HTTPException(401, "The token is missing or wrong.", {"WWW-Authenticate": "Bearer"})

    return check


async def _arguments(request: Request) -> dict[str, Any]:
    call = Call(request.scope, request.receive, _send_nothing)
    try:
        return ToolCallBody.model_validate_json(await call.read(MAX_BYTES, BODY_SECONDS)).arguments
    except ApiError as error:
        await call.drain()  # a client that is cut off while it sends reads no answer
        raise HTTPException(error.status, error.message) from error
    except ClientGone as error:
        raise HTTPException(400, "The body ends too early.") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:100]
        raise HTTPException(422, f'{where or "body"}: {first["msg"][:300]}. Send {{"arguments": {{...}}}}.') from error


async def _send_nothing(message: object) -> None:
    """Send nothing: FastAPI sends the response."""


def _call_answer(tool: Tool, arguments: dict[str, Any], notebook: Notebook | None = None) -> CallResult:
    refused = refusal(ToolCall(tool.name, arguments), 0, {tool.name: tool}, RolloutConfig())
    try:
        result = refused or _run_tool(tool, arguments, notebook)
    except InfraError as error:
        log.error("%s cannot run now: %.500s", tool.name, storable(str(error)))
        raise HTTPException(503, f"{tool.name} cannot run now; the reason is in the server's log.") from error
    return CallResult(storable(result.content), result.error_class, result.seconds)


def _run_tool(tool: Tool, arguments: dict[str, Any], notebook: Notebook | None) -> ToolResult:
    if notebook is not None and keeps_session(tool):
        return run_cell(tool, notebook, arguments)
    return run_tool(tool, CallWork(0, "", tool.name, arguments, tool.effects))


# listening


@contextmanager
def listen_at_address(host: str, port: int, guarded: bool) -> Iterator[socket.socket]:
    """Return a socket that listens on the address. Port 0 selects a free port. `guarded` says whether the user chose the token.

    Raises:
        ConfigError: other machines can reach the address, but the user chose no token.
        ServiceError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not guarded and not ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise ConfigError(
                f"Cannot listen at {host!r} without a token: other machines can reach it.", "Set AGENTRL_TOOLS_TOKEN."
            )
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise _cannot_serve_error(host, error) from error
    with listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            raise _cannot_serve_error(f"{host} port {port}", error) from error
        yield listener


@contextmanager
def listen_at_path(path: Path) -> Iterator[socket.socket]:
    """Return a Unix socket that listens at the path and that only this user can open. A socket that a killed server left there
    is replaced.

    Raises:
        ServiceError: the path cannot be used, or another server listens there.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            _remove_stale_socket(path)
            listener.bind(str(path))
            path.chmod(0o600)  # nobody can connect before it listens
            listener.listen(BACKLOG)
        except OSError as error:
            raise _cannot_serve_error(str(path), error) from error
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _remove_stale_socket(path: Path) -> None:
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as caller:
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def _cannot_serve_error(where: str, error: Exception) -> ServiceError:
    return ServiceError(f"Cannot serve tools at {where}: {error}.", "Pass another --port N, or --socket PATH.")


def serve(tools: Mapping[str, Tool], listener: socket.socket, token: str) -> None:
    """Serve the tools until SIGTERM. Then finish the calls that have begun, and end all sessions."""
    sessions = ServedSessions()
    longest = max(tool.timeout_seconds for tool in tools.values())
    server = make_server(application(tools, token, sessions), MAX_HEAD_BYTES, ceil(longest + GRACE_SECONDS))

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    # Uvicorn raises the signal again when it is done, which must not end the process as killed by SIGTERM.
    signal.signal(signal.SIGTERM, stop)
    try:
        asyncio.run(serve_http(server, listener))
    finally:
        sessions.end()
