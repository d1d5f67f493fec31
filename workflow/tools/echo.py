"""echo: gives back what it was given. The smallest tool there is: for trying out an env, a template, a stack of workers."""

from agentrl.workflow.tools import Tool


@Tool
def echo(text: str) -> str:
    """Returns the text as it is."""
    return text
