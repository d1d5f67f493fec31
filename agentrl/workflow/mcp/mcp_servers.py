"""The processes of Model Context Protocol servers in a tools worker: one process for each COMMAND, shared by all threads."""

import asyncio
import atexit
import json
import os
import shlex
import threading
from logging import getLogger
from typing import TYPE_CHECKING, Any

from agentrl.workflow.config import ServedTool
from agentrl.workflow.errors import ConfigError, InfraError, ToolFailure, UnknownOutcome
from agentrl.workflow.installation import install_command
from agentrl.workflow.runtime.once_per_process import Once

if TYPE_CHECKING:
    from mcp import Client, StdioServerParameters
    from mcp_types import CallToolResult

log = getLogger("agentrl.mcp")
PREFIX = "mcp:"
START_SECONDS = 60.0
"""The longest time in which a server must start and list its tools, in seconds. `npx` and `uvx` may have to download the server
first.
"""

STOP_SECONDS = 5.0


def check_sdk() -> None:
    """Check that the SDK is installed. Raise ConfigError if the SDK is not installed in this process's environment."""
    try:
        import mcp  # noqa: F401 - slow, and needed only where a server is named
    except ModuleNotFoundError as error:
        raise ConfigError(f"Tools of MCP servers need the SDK: {error}.", install_command("mcp")) from error


def parameters(name: str) -> "StdioServerParameters":
    """Return the SDK's parameters for starting the server of this name."""
    from mcp import StdioServerParameters

    first, *others = command(name)
    return StdioServerParameters(command=first, args=others)


def command(name: str) -> list[str]:
    """Split the command in a server's name into words. Raise ConfigError if the command is empty, or a quote is not closed."""
    try:
        args = shlex.split(name.removeprefix(PREFIX))
    except ValueError as error:
        raise ConfigError(f"{name!r} is not a command: {error}.", "Close the quotes.") from error
    if not args or "\0" in name:
        raise ConfigError(f"Missing command after `mcp:` in {name!r}.", "Write --tools 'mcp:COMMAND ARGUMENTS'.")
    return args


def describe_error(error: BaseException) -> str:
    """Return the message of an error. For an exception group, return the message of the error inside it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".removesuffix(": ")


class McpServer:
    """The process of a server, shared by all threads. `started` is the number of times that the process was started."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = 0
        self._life: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._end = asyncio.Event()
        self._turn = asyncio.Lock()
        self._over = False

    def open(self) -> None:
        """Start the process if it is not running. Raise InfraError if the process does not start."""
        asyncio.run_coroutine_threadsafe(self._connect(), _loop()).result()

    def call(self, tool: ServedTool, arguments: dict[str, Any], seconds: float) -> str:
        """Call a tool; see `McpTool.call`. The server is told to cancel the call one second after the caller has stopped
        waiting for it.
        """
        return asyncio.run_coroutine_threadsafe(self._call(tool, arguments, seconds + 1.0), _loop()).result()

    def stop(self) -> None:
        """Stop the process permanently. A call that is interrupted by the stop does not start another process."""
        self._over = True
        asyncio.run_coroutine_threadsafe(self._stop(), _loop()).result()

    async def _call(self, tool: ServedTool, arguments: dict[str, Any], seconds: float) -> str:
        for _ in range(2):
            client = await self._connect()
            try:
                async with asyncio.timeout(seconds):
                    return _text(tool.name, await client.call_tool(tool.name, arguments))
            except (TimeoutError, ToolFailure):
                raise
            except Exception as error:
                if not _may_be_gone(error) or not await self._has_died(client):
                    raise _refusal(tool.name, error) from error
                if tool.effects == "once":
                    message = (
                        f"The server died during {tool.name}; the call may or may not have taken effect, and is not run again."
                    )
                    raise UnknownOutcome(message) from error
        raise InfraError(f"The server {self.name!r} ended twice while {tool.name!r} ran.", "Its output is in the worker's log.")

    async def _connect(self) -> "Client":
        async with self._turn:
            if self._over:
                raise InfraError(f"The server {self.name!r} is being stopped.")
            if self._client is None:
                ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
                self._end = asyncio.Event()
                self._life = asyncio.create_task(self._run_process(ready, self._end))
                self._client = await ready
            return self._client

    async def _run_process(self, ready: "asyncio.Future[Client]", end: asyncio.Event) -> None:
        """Run the process from its start to its end, in one task, as the SDK requires."""
        from mcp import Client, stdio_client

        try:
            with os.fdopen(2, "w", closefd=False) as stderr:
                process = stdio_client(parameters(self.name), stderr)
                async with asyncio.timeout(START_SECONDS) as starting, Client(process) as client:
                    starting.reschedule(None)
                    self.started += 1
                    ready.set_result(client)
                    await end.wait()
        except BaseException as error:  # noqa: BLE001 - the SDK's exception groups too; the waiting call or the log gets it
            if ready.done():
                log.warning("the server %s ended: %s", self.name, describe_error(error))
                return
            failed = InfraError(
                f"The server {self.name!r} did not start: {describe_error(error)}.", "Run the command yourself to see why."
            )
            failed.__cause__ = error
            ready.set_exception(failed)

    async def _has_died(self, client: "Client") -> bool:
        async with self._turn:
            if client is not self._client:
                return True
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await client.list_tools(cache_mode="refresh")
            except Exception as error:  # noqa: BLE001 - a server that does not answer, for whatever reason, is of no use
                log.warning("the server %s is gone: %s", self.name, describe_error(error))
                await self._stop()
                return True
            return False

    async def _stop(self) -> None:
        self._end.set()
        self._client = None
        if self._life is not None:
            await asyncio.wait([self._life], timeout=2 * STOP_SECONDS)


def _may_be_gone(error: Exception) -> bool:
    """Return True if the error may mean that the process has ended. A server may send the same error code for other reasons."""
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED

    return error.code == CONNECTION_CLOSED if isinstance(error, MCPError) else isinstance(error, RuntimeError)


def _refusal(name: str, error: Exception) -> Exception:
    from mcp import MCPError

    return ToolFailure(f"{name}: {error.message}") if isinstance(error, MCPError) else error


def _text(name: str, result: "CallToolResult") -> str:
    parts = [_block(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    if result.is_error:
        raise ToolFailure(text or f"{name} failed")
    return text


def _block(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and "text" in type(block.resource).model_fields:
        return str(block.resource.text)
    return f"[{block.type} that cannot be shown]"


_servers: dict[str, McpServer] = {}
_servers_lock = threading.Lock()


def server(name: str) -> McpServer:
    """Return the server of this name in this process. The first use creates the object, but does not start the server's
    process. Raise ConfigError if the SDK is not installed in this process's environment.
    """
    check_sdk()
    with _servers_lock:
        if name not in _servers:
            _servers[name] = McpServer(name)
        return _servers[name]


@Once
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that communicates with all servers of this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    atexit.register(stop_servers)
    return loop


def stop_servers() -> None:
    """End all servers of this process."""
    with _servers_lock:
        for mcp_server in _servers.values():
            mcp_server.stop()
        _servers.clear()
