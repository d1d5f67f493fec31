"""agentrl: reinforcement learning for tool-calling language models, over a trajectory database that forgets nothing.

Its packages lie at the top of the checkout and are linked here, so that each has one name wherever it is installed:
`agentrl.workflow` (the library), `agentrl.workers` (the processes), `agentrl.cli` (the commands), `agentrl.migrations`.
"""

from pathlib import Path

from agentrl import old_names

if not (Path(__file__).parent / "workflow").is_dir():
    raise ImportError(
        "agentrl/workflow should be a link to a folder and is a text file: clone anew with `git clone -c core.symlinks=true`, "
        "or install a wheel of agentrl."
    )

__version__ = "0.1.0"

old_names.install()
