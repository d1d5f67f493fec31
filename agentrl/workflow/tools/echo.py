"""echo: returns its argument. The smallest tool there is, for trying out an env, a template or a stack of workers."""

from agentrl.workflow.tools import Tool


@Tool
def echo(text: str) -> str:
    """Returns the text as it is."""
    return text
