"""Selects and describes tools for use outside of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.config import RunConfig
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.mcp import mcp_tool
from agentrl.workflow.tools import Effects, Tool
from agentrl.workflow.tools.python import keeps_session

_TOOLS_HINT = "`agentrl tools` lists the tools. Pass one with --tools, or an env with --env."


@dataclass(frozen=True, slots=True)
class Description:
    """A tool's description for callers.

    `parameters` is the JSON schema of the tool's arguments. If `keeps_session` is true, variables last from one call to the
    next within an episode, or within a session of the tool server. See `Tool` for the other fields.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    effects: Effects
    timeout_seconds: float
    max_characters: int
    memory_mb: int | None
    keeps_session: bool

    @classmethod
    def of(cls, tool: Tool) -> "Description":
        spec = tool.schema["function"]
        limits = (tool.timeout_seconds, tool.max_characters, tool.memory_mb)
        return cls(tool.name, spec["description"], spec["parameters"], tool.effects, *limits, keeps_session(tool))


def select_tools(env: str | None, names: Sequence[str]) -> Mapping[str, Tool]:
    """Return the tools of the env together with the named tools, as a run of that env with these `tools` would offer them.
    Raise ConfigError if there are no tools, a name belongs to no tool or to two tools, or this machine lacks something that a
    tool needs.
    """
    servers = {mcp_tool.absolute_name(name): None for name in names if mcp_tool.is_server(name)}
    others = dict.fromkeys(name for name in names if not mcp_tool.is_server(name))
    served = tuple(server_tool for name in servers for server_tool in mcp_tool.list_tools(name))
    tools = Experiment(RunConfig(env=env or None, tools=(*others, *servers), served_tools=served)).tools
    if not tools:
        raise ConfigError(f"The env {env!r} has no tool." if env else "No tools to serve.", _TOOLS_HINT)
    for tool in tools.values():
        tool.check()
    return tools
