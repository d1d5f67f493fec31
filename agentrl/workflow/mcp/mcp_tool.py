"""Tools of a Model Context Protocol server: `--tools 'mcp:COMMAND'`, through the official SDK (the extra `mcp`).

The server lists its tools once, when a run is submitted. The list is part of the run's config, so every episode sees the same
tools. A tools worker starts one process per COMMAND at the first call and keeps it running. If the process ends, the worker
starts another. COMMAND is split into words as in a shell; other shell syntax is not supported. The process gets only HOME, PATH
and similar variables of the environment. If a server needs a secret, start it by a script that reads the secret.

A tool's `effects` follow from the server's hints: `none` for readOnlyHint, `repeatable` for idempotentHint, and `once` for
other tools.
"""

import asyncio
import json
import os
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from agentrl.workflow.config import ServedTool
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.mcp.mcp_servers import PREFIX, START_SECONDS, check_sdk, command, describe_error, parameters, server
from agentrl.workflow.runtime.process_output import last_line, read_end
from agentrl.workflow.tools import Effects, Tool, clip, function_schema

if TYPE_CHECKING:
    from mcp import StdioServerParameters
    from mcp import Tool as Offered
    from mcp_types import ToolAnnotations

CALL_SECONDS = 30.0
MAX_TOOLS = 128


def is_server(name: str) -> bool:
    """Return True if `name`, an entry of a config's `tools`, names an MCP server."""
    return name.startswith(PREFIX)


def absolute_name(name: str) -> str:
    """Make the paths of files in the name absolute, because a tools worker starts the server in another folder."""
    if not is_server(name):
        return name
    # Links are not resolved: an interpreter behaves differently under another name.
    args = [os.path.abspath(arg) if {"/", "."} & set(arg) and Path(arg).is_file() else arg for arg in command(name)]
    return PREFIX + shlex.join(args)


@dataclass(frozen=True)
class McpTool(Tool):
    """A tool that an MCP server runs. `served_tool` is the server's description of the tool."""

    served_tool: ServedTool = field(kw_only=True)

    @classmethod
    def of(cls, served_tool: ServedTool) -> "McpTool":
        """Create the tool from its description in a run's config."""
        return cls(
            _nothing,
            served_tool.effects,
            CALL_SECONDS,
            opens=lambda: server(served_tool.server).open(),
            served_tool=served_tool,
        )

    @property
    def name(self) -> str:
        """The name that the model writes."""
        return self.served_tool.name

    @property
    def title(self) -> str:
        """The tool's name in error messages."""
        return f"{super().title} of {self.served_tool.server!r}"

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The tool's schema from the server, in the format of chat templates."""
        return function_schema(self.served_tool.name, self.served_tool.description, self.served_tool.parameters)

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Call the tool on the server.

        Raises:
            ToolFailure: the server refused the arguments, or the tool failed.
            UnknownOutcome: the server ended during a call that must not run twice.
            InfraError: the server does not start, or ended twice during the call.
            ConfigError: the SDK is not installed in this process's environment.
        """
        return clip(
            server(self.served_tool.server).call(self.served_tool, dict(arguments), self.timeout_seconds), self.max_characters
        )


def _nothing() -> str:
    raise AssertionError("a tool of an MCP server has no Python function to call")


# listing a server's tools


def list_tools(name: str) -> tuple[ServedTool, ...]:
    """Start the server of this name, list its tools, and stop the server. Raise ConfigError if the SDK is not installed, the
    command does not exist, or the command is not a server with tools.
    """
    check_sdk()
    with tempfile.TemporaryFile("w+") as log:
        try:
            offered = asyncio.run(_list(parameters(name), log))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit | ConfigError):
                raise
            with open(log.fileno(), "rb", closefd=False) as output:
                last = last_line(read_end(output), describe_error(error))
            raise ConfigError(
                f"{name!r} did not list its tools: {last[:500]}.", "Run the command yourself to see why."
            ) from error
    if not 0 < len(offered) <= MAX_TOOLS:
        raise ConfigError(f"{name!r} offers {len(offered)} tools.", f"A server may offer 1 to {MAX_TOOLS}.")
    return tuple(_served_tool(name, tool) for tool in offered)


async def _list(parameters: "StdioServerParameters", log: TextIO) -> "list[Offered]":
    from mcp import Client, stdio_client

    tools: list[Offered] = []
    async with asyncio.timeout(START_SECONDS), Client(stdio_client(parameters, log)) as client:
        page = await client.list_tools()
        tools += page.tools
        while page.next_cursor and len(tools) <= MAX_TOOLS:
            page = await client.list_tools(cursor=page.next_cursor)
            tools += page.tools
    return tools


def _served_tool(name: str, tool: "Offered") -> ServedTool:
    text = json.dumps(tool.input_schema, ensure_ascii=False) + (tool.description or "") + tool.name
    if "\0" in text or "\\u0000" in text:
        raise ConfigError(f"{name!r} offers a tool with a NUL character in its description.", "Correct the server.")
    return ServedTool(
        server=name,
        name=tool.name,
        description=" ".join((tool.description or "").split()),
        parameters=tool.input_schema,
        effects=_effects(tool.annotations),
    )


def _effects(hints: "ToolAnnotations | None") -> Effects:
    if hints is not None and hints.read_only_hint:
        return "none"
    return "repeatable" if hints is not None and hints.idempotent_hint else "once"
