"""Whether this machine can hold an agent as its run wants it."""

import shutil

from agentrl.workflow.config import AgentConfig
from agentrl.workflow.errors import ConfigError


def check_held(asked: AgentConfig) -> None:
    """Checks that this machine has what holds the agent.

    Raises:
        ConfigError: it has not.
    """
    if asked.sandboxed and shutil.which("bwrap") is None:
        raise ConfigError(
            "The agent runs in bubblewrap, which is not installed here.",
            "Install it (apt-get install bubblewrap), or say --agent-unsafe where nothing else can be harmed.",
        )
