"""A server of the Model Context Protocol for the tests: `python mcp_server.py FOLDER`; what it does it writes down there."""

import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp_types import ImageContent, TextContent, ToolAnnotations

FOLDER = Path(sys.argv[1])
READS, REPEATS = ToolAnnotations(read_only_hint=True), ToolAnnotations(idempotent_hint=True)
server = MCPServer("tests", log_level="ERROR")


def noted(name: str) -> int:
    """How often that has happened, this time included."""
    with (FOLDER / name).open("a") as notes:
        notes.write("x")
    return len((FOLDER / name).read_text())


@server.tool(annotations=READS)
def add(a: int, b: int) -> str:
    """Adds two
    whole numbers."""
    return str(a + b)


@server.tool(annotations=READS)
def process() -> str:
    """Says which process this is."""
    return str(os.getpid())


@server.tool(annotations=REPEATS)
def stumble() -> str:
    """Dies the first time."""
    if noted("stumbled") == 1:
        os._exit(1)
    return "up again"


@server.tool(annotations=READS)
def doomed() -> str:
    """Dies every time."""
    os._exit(1)


@server.tool()
def charge() -> str:
    """Dies in the middle of what must not be done twice."""
    noted("charged")
    os._exit(1)


@server.tool(annotations=READS)
def slow() -> str:
    """Takes its time."""
    noted("slow")
    time.sleep(60)
    return "late"


@server.tool(annotations=READS)
def refuse() -> list[TextContent]:
    """Cannot do it."""
    raise ValueError("not today")


@server.tool(annotations=READS)
def mixed() -> list[TextContent | ImageContent]:
    """Says and shows something."""
    return [TextContent(type="text", text="a\x00b"), ImageContent(type="image", data="", mime_type="image/png")]


@server.tool(annotations=READS)
def long() -> str:
    """Says much."""
    return "x" * 100_000


@server.tool(annotations=READS)
def secret(name: str) -> str:
    """A variable of its environment."""
    return os.environ.get(name, "unknown")


if __name__ == "__main__":
    server.run()
