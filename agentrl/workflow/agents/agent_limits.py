"""Checks that this machine can sandbox an agent, and the agent's command here."""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from agentrl.workflow.config import AgentConfig
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.settings import settings

FUNCTION = "agentrl.workers.agents.function"
"""The module that runs a function as a program."""
SYSTEM_PYTHON = "/usr/bin/python3"
TRIAL = ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev")
"""What the sandbox of any agent asks bubblewrap for."""
NOBODY = "65534"
TRIAL_SECONDS = 20.0


def check_held(asked: AgentConfig) -> None:
    """Check that this machine has the agent's program and its sandbox.

    Raises:
        ConfigError: it has not.
    """
    if asked.sandboxed:
        program = shutil.which("bwrap")
        if program is None:
            hint = (
                "Install it (apt-get install bubblewrap), or pass --agent-unsafe on a machine where nothing else can be harmed."
            )
            if settings().image:
                hint = "Pass --agent-unsafe: the agents service itself is a sandbox, shared by all its agents."
            raise ConfigError("The agent needs bubblewrap, which is not installed here.", hint)
        if said := _refusal(program, asked.network == "endpoint"):
            raise ConfigError(
                f"The agent needs bubblewrap, which cannot start a sandbox here: {said}.",
                "Allow user namespaces (a container's seccomp profile forbids them), or say --agent-unsafe where nothing else "
                "can be harmed.",
            )
    if asked.sandboxed or asked.command:
        command_of(asked)


@cache
def _refusal(program: str, alone: bool) -> str:
    """What bubblewrap says where it makes no sandbox; empty where it does.

    Args:
        alone: whether the sandbox has a network of its own.
    """
    user = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
    command = [*(user if os.geteuid() == 0 else []), program, *TRIAL, *(["--unshare-net"] if alone else []), "true"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TRIAL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = " ".join(done.stderr.decode("utf-8", "replace").split())[:300]
    return (said or f"exit code {done.returncode}").rstrip(".") if done.returncode else ""


def command_of(asked: AgentConfig) -> list[str]:
    """Return the agent's command, with absolute paths for files in this folder: the program runs in another folder.

    Raises:
        ConfigError: the program is not found, or the sandbox's user cannot read what it needs.
    """
    if not asked.command:
        words = [sys.executable, "-P", "-m", FUNCTION, asked.name]
    else:
        here = Path.cwd()
        words = [str(here / word) if not word.startswith("-") and (here / word).is_file() else word for word in asked.command]
        words[0] = _find_program(words[0], asked.sandboxed)
    if asked.sandboxed:
        for folder in sorted(folders_of(words)):
            if not may_read(folder):
                raise ConfigError(
                    f"The sandbox's user cannot read {str(folder)!r}, which the agent needs.",
                    "Make it readable for every user, use another program (cmd:/usr/bin/python3 agent.py), "
                    "or pass --agent-unsafe on a machine where nothing else can be harmed.",
                )
    return words


def _find_program(name: str, sandboxed: bool) -> str:
    folders = [folder for folder in os.get_exec_path() if not sandboxed or (Path(folder).is_dir() and may_read(Path(folder)))]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None and sandboxed and name in ("python", "python3") and Path(SYSTEM_PYTHON).exists():
        return SYSTEM_PYTHON
    if found is None:
        where = " where the sandbox's user can read it" if sandboxed and shutil.which(name) else ""
        raise ConfigError(
            f"The agent's program {name!r} is not found on PATH{where}.", "Write --agent 'cmd:PROGRAM ARGUMENTS'."
        )
    return found


def folders_of(words: list[str]) -> set[Path]:
    """Return the folders of the files in a command, and of the targets of links."""
    paths = [Path(word) for word in words if word.startswith("/") and Path(word).exists()]
    return {folder for path in paths for folder in (path.parent, path.resolve().parent)}


def may_read(folder: Path) -> bool:
    """Return whether the sandbox's user may read the folder (another user than this one if root starts the sandbox)."""
    if os.geteuid() != 0:
        return os.access(folder, os.R_OK | os.X_OK)
    return all(path.stat().st_mode & 0o001 for path in (folder, *folder.parents)) and bool(folder.stat().st_mode & 0o004)
