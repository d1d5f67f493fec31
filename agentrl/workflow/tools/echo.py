"""echo: returns its argument. The smallest tool, for trying out an env, a template or a set of workers."""

from agentrl.workflow.tools import Tool


@Tool
def echo(text: str) -> str:
    """Returns the text as it is."""
    return text
