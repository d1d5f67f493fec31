"""`agentrl tools`: lists the tools that a model may call, and serves them."""

import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.console import Json, say, show, show_json, show_table

if TYPE_CHECKING:
    import socket

    from agentrl.workflow.tools import Tool

HOST = "127.0.0.1"
PORT = 8750
TOKEN_CHARACTERS = re.compile(r"[\w.~+/=-]+", re.ASCII)

tools = typer.Typer(help="List the tools that a model may call, or serve them over HTTP.", rich_markup_mode=None)


@tools.callback(invoke_without_command=True)
def list_tools(ctx: typer.Context, as_json: Json = False) -> None:
    """List all tools; --json adds the schemas of their arguments."""
    if ctx.invoked_subcommand is not None:
        if as_json:
            raise typer.BadParameter("--json works only with the list.")
        return
    from agentrl.workflow.plugins import find, names

    envs = {name: find("envs", name).toolset() for name in names("envs")}
    rows = [{"tool": name, **_tool_row(find("tools", name), envs)} for name in names("tools")]
    if as_json:
        show_json(rows)
        return
    show_table(("tool", "called", "arguments", "effects", "seconds", "works_here"), map(_table_cells, rows))
    for row in rows:
        if row["lacks"]:
            brought = f" Not needed in the env {' or '.join(row['works_in'])}, which has its own." if row["works_in"] else ""
            say(f"{row['tool']}: {row['lacks']}{brought}")
    say("Tools can also be package.module:name or mcp:COMMAND.")


def _tool_row(tool: "Tool", envs: "Mapping[str, Mapping[str, Tool]]") -> dict[str, Any]:
    from dataclasses import asdict

    from agentrl.workers.requests.tool_selection import Description

    own = {name: tools[tool.name] for name, tools in envs.items() if tools.get(tool.name, tool) is not tool}
    works_in = [name for name, brought in own.items() if _find_lack(brought) is None]
    return {**asdict(Description.of(tool)), "lacks": _find_lack(tool), "works_in": works_in}


def _find_lack(tool: "Tool") -> str | None:
    from agentrl.workflow.errors import AgentRLError

    try:
        tool.check()
    except AgentRLError as error:
        return str(error)
    return None


def _table_cells(row: dict[str, Any]) -> list[Any]:
    arguments = row["parameters"].get("properties", {})
    parameters = ", ".join(f"{name}: {spec.get('type', json.dumps(spec))}" for name, spec in arguments.items())
    works = f"in {', '.join(row['works_in'])}" if row["lacks"] and row["works_in"] else row["lacks"] is None
    return [row["tool"], row["name"], parameters, row["effects"], row["timeout_seconds"], works]


@tools.command("serve")
def serve(
    env: Annotated[str | None, typer.Option(metavar="NAME", help="All tools of an env.", show_default=False)] = None,
    tool_names: Annotated[
        list[str] | None,
        typer.Option("--tools", metavar="NAME,...", help="Tools to serve; mcp:COMMAND too. Repeatable.", show_default=False),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; one beyond this machine needs AGENTRL_TOOLS_TOKEN.")] = HOST,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = PORT,
    path: Annotated[
        Path | None, typer.Option("--socket", metavar="PATH", help="Unix socket to listen at instead.", show_default=False)
    ] = None,
) -> None:
    """Serve tools over HTTP until SIGTERM, for agents of any kind.

    The routes are GET /tools, GET /tools/NAME and POST /tools/NAME/call with {"arguments": {...}}. Each request needs the
    header `Authorization: Bearer TOKEN`. The token is AGENTRL_TOOLS_TOKEN, or a random one that is printed. POST /sessions
    opens a session: calls to POST /sessions/SESSION/tools/NAME/call share the variables of python_session. DELETE
    /sessions/SESSION ends it. /openapi.json describes all routes.
    """
    from agentrl.workers.requests.tool_selection import select_tools
    from agentrl.workers.serving import tool_server
    from agentrl.workers.stack.worker import set_up_logging
    from agentrl.workflow.errors import ConfigError

    token, own = _read_token()
    if path is not None and (host, port) != (HOST, PORT):
        raise ConfigError("--socket excludes --host and --port.", "Pass --socket alone, or --host and --port.")
    offer = select_tools(env, [name for option in tool_names or () for name in _tool_names(option)])
    where: AbstractContextManager[socket.socket]
    where = (
        tool_server.listen_at_path(path.expanduser().absolute())
        if path is not None
        else tool_server.listen_at_address(host, port, own)
    )
    with where as listener:
        show(f"{', '.join(offer)} at {_format_address(listener)}")
        if not own:
            show(f"token {token}")
        set_up_logging()
        tool_server.serve(offer, listener, token)


def _read_token() -> tuple[str, bool]:
    """Return the token of the settings, or else a new random token."""
    from secrets import token_urlsafe

    from agentrl.workflow.errors import ConfigError
    from agentrl.workflow.settings import settings

    token = settings().tools_token
    if token and not TOKEN_CHARACTERS.fullmatch(token):
        raise ConfigError(
            "AGENTRL_TOOLS_TOKEN has characters that an HTTP header cannot carry.", "Use only letters, digits and -._~+/=."
        )
    return token or token_urlsafe(24), bool(token)


def _tool_names(text: str) -> list[str]:
    return [text] if text.startswith("mcp:") else [name for name in map(str.strip, text.split(",")) if name]


def _format_address(listener: "socket.socket") -> str:
    name = listener.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host, port = name[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
