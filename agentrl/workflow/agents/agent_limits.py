"""Checks that this machine can run an agent in the sandbox, and finds the agent's command."""

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from agentrl.workflow.config import AgentConfig
from agentrl.workflow.errors import ConfigError, SandboxUnavailable
from agentrl.workflow.settings import settings

FUNCTION = "agentrl.workers.agents.function"
"""The module that runs an agent function as a program."""
SYSTEM_PYTHON = "/usr/bin/python3"
TRIAL = ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev")
"""The options of bubblewrap that every agent's sandbox needs. A trial with them shows whether bubblewrap works."""
NOBODY = "65534"
TRIAL_SECONDS = 20.0
MAX_READ_BYTES = 2**20
"""The largest size, in bytes, of an agent's file that is compared with the worker's copy of the file."""
_INTERPRETERS = re.compile(r"(ba|da|z)?sh|(python|node|perl|ruby)[0-9.]*")


def check_held(agent: AgentConfig) -> None:
    """Check that this machine has the agent's program and can run the agent's sandbox.

    Raises:
        ConfigError: the program does not exist, or this machine cannot run the sandbox.
    """
    if agent.sandboxed and not bubblewrap_works(agent):
        _check_landlock(agent)
    if agent.sandboxed or agent.command:
        command_of(agent)


def bubblewrap_works(agent: AgentConfig) -> bool:
    """Return True if bubblewrap can start the agent's sandbox here; False in agentrl's own container image if bubblewrap does
    not work there; Landlock then confines agents.

    Raises:
        ConfigError: bubblewrap is missing or cannot start a sandbox, and this process does not run in agentrl's own container
            image.
    """
    program = shutil.which("bwrap")
    reason = "" if program is None else _refusal(program, agent.network == "endpoint")
    if program is not None and not reason:
        return True
    if settings().image:
        return False
    if program is None:
        hint = "Install it (apt-get install bubblewrap), or pass --agent-unsafe on a machine where nothing else can be harmed."
        raise ConfigError("The agent needs bubblewrap, which is not installed here.", hint)
    raise ConfigError(
        f"The agent needs bubblewrap, which cannot start a sandbox here: {reason}.",
        "Allow user namespaces (a container's seccomp profile forbids them), or pass --agent-unsafe on a machine where "
        "nothing else can be harmed.",
    )


def _check_landlock(agent: AgentConfig) -> None:
    from agentrl.workflow.sandbox import landlock

    hint = "Pass --agent-unsafe: the agents service itself is a sandbox, shared by all its agents."
    if agent.network != "endpoint":
        raise ConfigError("In this container, a sandboxed agent can reach only the endpoint.", hint)
    try:
        landlock.check()
    except SandboxUnavailable as error:
        raise ConfigError(error.message, hint) from error


@cache
def _refusal(program: str, alone: bool) -> str:
    """Return the error message of bubblewrap if it cannot create a sandbox; else an empty text.

    Args:
        program: the path of bubblewrap.
        alone: True if the sandbox has its own network.
    """
    user = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
    command = [*(user if os.geteuid() == 0 else []), program, *TRIAL, *(["--unshare-net"] if alone else []), "true"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TRIAL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    text = " ".join(done.stderr.decode("utf-8", "replace").split())[:300]
    return (text or f"exit code {done.returncode}").rstrip(".") if done.returncode else ""


def command_of(agent: AgentConfig) -> list[str]:
    """Return the words of the agent's command. Files of the working directory get absolute paths, because the program runs in
    another folder.

    Raises:
        ConfigError: the program is not found, or the user of the sandbox cannot read a file that the program needs.
    """
    if not agent.command:
        args = [sys.executable, "-P", "-m", FUNCTION, agent.name]
    else:
        files = _files_of(agent)
        args = [str(files.get(arg, arg)) for arg in agent.command]
        args[0] = _find_program(args[0], agent.sandboxed)
        _check_script(args)
    if agent.sandboxed:
        for folder in sorted(folders_of(args)):
            if not may_read(folder):
                raise ConfigError(
                    f"The sandbox's user cannot read {str(folder)!r}, which the agent needs.",
                    "Make it readable for every user, use another program (cmd:/usr/bin/python3 agent.py), "
                    "or pass --agent-unsafe on a machine that has nothing else to harm.",
                )
    return args


def _files_of(agent: AgentConfig) -> dict[str, Path]:
    """Return the words of the agent's command that are files of the working directory, each with its path."""
    paths = {word: Path.cwd() / word for word in agent.command if not word.startswith("-")}
    return {word: path for word, path in paths.items() if path.is_file()}


def read_program(agent: AgentConfig | None) -> str:
    """Return the contents of the files in the working directory that the agent's command names, as one text; empty if the agent
    is a function.

    Raises:
        OSError: a file cannot be read.
    """
    if agent is None:
        return ""
    small = [
        path
        for word, path in _files_of(agent).items()
        if not Path(word).is_absolute() and path.stat().st_size <= MAX_READ_BYTES
    ]
    return "".join(path.read_text(errors="replace") for path in small)


def _check_script(args: list[str]) -> None:
    """Raise ConfigError if an interpreter is to run a script that does not exist."""
    if len(args) < 2 or args[1].startswith("-") or not _INTERPRETERS.fullmatch(Path(args[0]).name):
        return
    if not Path(args[1]).is_file():
        raise ConfigError(
            f"The agent's script {args[1]!r} is not found in {str(Path.cwd())!r}.", "Write --agent 'cmd:PROGRAM SCRIPT'."
        )


def _find_program(name: str, sandboxed: bool) -> str:
    folders = [folder for folder in os.get_exec_path() if not sandboxed or (Path(folder).is_dir() and may_read(Path(folder)))]
    program = shutil.which(name, path=os.pathsep.join(folders))
    if program is None and sandboxed and name in ("python", "python3") and Path(SYSTEM_PYTHON).exists():
        return SYSTEM_PYTHON
    if program is None:
        where = " where the sandbox's user can read it" if sandboxed and shutil.which(name) else ""
        raise ConfigError(
            f"The agent's program {name!r} is not found on PATH{where}.", "Write --agent 'cmd:PROGRAM ARGUMENTS'."
        )
    return program


def folders_of(args: list[str]) -> set[Path]:
    """Return the folders of the files in a command. For a link, the folder of the link and that of its target are both
    included.
    """
    paths = [Path(arg) for arg in args if arg.startswith("/") and Path(arg).exists()]
    return {folder for path in paths for folder in (path.parent, path.resolve().parent)}


def may_read(folder: Path) -> bool:
    """Return True if the user of the sandbox can read the folder. If this process runs as root, the sandbox has another
    user.
    """
    if os.geteuid() != 0:
        return os.access(folder, os.R_OK | os.X_OK)
    return all(path.stat().st_mode & 0o001 for path in (folder, *folder.parents)) and bool(folder.stat().st_mode & 0o004)
