"""Prepares the start of an agent: a function in the worker's folder, or a program in a sandbox with its own folder.

A program executes text that the model wrote. In bubblewrap, the program can read the system and the folders of the files that
its command names. It can write only to its own folder. The only network address that it reaches leads to the endpoint.
`network: all` gives it the complete network, and `unsafe: true` runs it without the sandbox. In a container of agentrl's image,
where bubblewrap cannot run, Landlock confines the program (`agents.confinement`).
"""

import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentrl.workers.agents import agent_bridge, confinement, relay
from agentrl.workers.agents.guardian import Order
from agentrl.workers.agents.processes import clean_environment
from agentrl.workflow.agents import CLOCK, LLM, AgentTask
from agentrl.workflow.agents.agent_limits import FUNCTION, bubblewrap_works, check_held, command_of, folders_of, may_read
from agentrl.workflow.config import AgentConfig
from agentrl.workflow.datasets import split_mixture
from agentrl.workflow.emitters import emit_variables
from agentrl.workflow.sandbox import uid_pool
from agentrl.workflow.settings import settings

INSIDE = "/agent"
"""The path of the program's own folder inside the sandbox."""
SOCKET = "/run/endpoint"
BRIDGE = "/run/bridge.py"
ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl", "/etc/passwd", "/etc/group", "/etc/localtime")


@dataclass(frozen=True)
class AgentLaunch:
    """The command, environment and folders with which an agent is started.

    Args:
        command: the program and its arguments; empty for a function.
        environment: the complete environment of the agent.
        folder: the working directory.
        answer_file: the file in which a program can write its answer; empty for a function.
        files: the folder on this host to which a program can write; empty for a function.
        llm: the model's URL and key, in the form in which the agent reaches them.
        confinement: what the program may reach if Landlock confines it (`agents.confinement`).
    """

    command: list[str]
    environment: dict[str, str]
    folder: str
    answer_file: str
    files: str
    llm: LLM
    confinement: dict[str, Any] | None = None

    def spec(self, agent: AgentConfig) -> str:
        """Return the import path of the function that the warm interpreter must import; empty for a program."""
        return "" if self.command else agent.name

    def order(self, agent: AgentConfig, task: AgentTask, keys: Sequence[str] = ()) -> Order:
        """Return the start command for the guardian, the process that watches the agent. The guardian removes the `keys` from
        the agent's output.
        """
        return Order(
            command=self.command,
            environment=self.environment,
            folder=self.folder,
            answer_file=self.answer_file,
            files=self.files,
            task=asdict(task),
            llm=asdict(self.llm),
            timeout_seconds=agent.timeout_seconds,
            memory_mb=agent.memory_mb,
            processes=agent.processes,
            output_bytes=agent.output_bytes,
            reuse=agent.reuse,
            keys=list(keys),
            confinement=self.confinement,
        )


@contextmanager
def placed(
    agent: AgentConfig, task: AgentTask, llm: LLM, config: Mapping[str, Any], emit_key: str = "", clock: float | None = None
) -> Iterator[AgentLaunch]:
    """Prepare the folder, socket and command for an agent. At the end of the `with` block, remove the folder and close the
    socket.

    Args:
        agent: the agent's config.
        task: the task of the episode.
        llm: the model's URL and key.
        config: the run's config, which says which files to hide from the agent.
        emit_key: the key with which the agent sends annotations; empty if it may not send any.
        clock: the time that the agent reads, in seconds since 1970; None for the present time.

    Raises:
        ConfigError: this machine cannot run the agent in a sandbox or apply its limits.
    """
    check_held(agent)
    if not agent.command and not agent.sandboxed:
        yield AgentLaunch([], clean_environment() | _model(llm, emit_key, clock), os.getcwd(), "", "", llm)
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-agent-", ignore_cleanup_errors=True)))
        (folder / "files").mkdir()
        (folder / "files" / "task.json").write_text(json.dumps(asdict(task), ensure_ascii=False))
        if agent.sandboxed and not bubblewrap_works(agent):
            yield _confined(agent, folder / "files", llm, config, emit_key, clock)
        elif agent.sandboxed:
            yield stack.enter_context(_sandboxed(agent, folder, llm, config, emit_key, clock))
        else:
            yield _unsafe(agent, folder / "files", llm, emit_key, clock)


def _model(llm: LLM, emit_key: str, clock: float | None) -> dict[str, str]:
    return llm.variables | emit_variables(llm.base_url, emit_key) | ({} if clock is None else {CLOCK: repr(clock)})


def _file_variables(folder: str) -> dict[str, str]:
    return {"AGENTRL_TASK": f"{folder}/task.json", "AGENTRL_ANSWER": f"{folder}/answer.json"}


def _unsafe(agent: AgentConfig, files: Path, llm: LLM, emit_key: str, clock: float | None) -> AgentLaunch:
    environment = clean_environment() | _model(llm, emit_key, clock) | _file_variables(str(files))
    return AgentLaunch(command_of(agent), environment, str(files), str(files / "answer.json"), str(files), llm)


def _confined(
    agent: AgentConfig, files: Path, llm: LLM, config: Mapping[str, Any], emit_key: str, clock: float | None
) -> AgentLaunch:
    """Return the launch of a program that Landlock confines. Its endpoint is an address, because it cannot ask for names."""
    command = command_of(agent)
    url = urlsplit(llm.base_url)
    port = url.port or 80
    address = socket.getaddrinfo(url.hostname, port, type=socket.SOCK_STREAM)[0][4][0]
    host = f"[{address}]" if ":" in str(address) else address
    llm = replace(llm, base_url=f"http://{host}:{port}{url.path}")
    readable = [*ETC, *_readable(command)]
    confined = confinement.spec(files, readable, _hidden(config), port)
    environment = _environment(command, str(files), str(files)) | _model(llm, emit_key, clock) | _file_variables(str(files))
    return AgentLaunch(command, environment, str(files), str(files / "answer.json"), str(files), llm, confined)


def _environment(command: list[str], home: str, temporary: str) -> dict[str, str]:
    environment = {"PATH": os.environ.get("PATH", ""), "HOME": home, "LANG": "C.UTF-8", "TMPDIR": temporary}
    return environment | ({"PYTHONPATH": os.pathsep.join(_imported(command))} if _imported(command) else {})


@contextmanager
def _sandboxed(
    agent: AgentConfig, folder: Path, llm: LLM, config: Mapping[str, Any], emit_key: str, clock: float | None
) -> Iterator[AgentLaunch]:
    lease = uid_pool.lease_uid(uid_pool.uid_range(settings().sandbox_uids))
    with ExitStack() as stack:
        stack.callback(lease.release)
        command = command_of(agent)
        args = _view(command, folder, config)
        if agent.network == "endpoint":
            address = urlsplit(llm.base_url)
            stack.enter_context(relay.relayed(folder / "endpoint", str(address.hostname), address.port or 80))
            port = agent_bridge.PORT
            llm = replace(llm, base_url=f"http://127.0.0.1:{port}{address.path}")
            args += [
                "--unshare-net",
                "--ro-bind",
                str(folder / "endpoint"),
                SOCKET,
                "--ro-bind",
                agent_bridge.__file__,
                BRIDGE,
            ]
            command = ["/usr/bin/python3", "-I", BRIDGE, SOCKET, *command]
        else:
            args += ["--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf", "--ro-bind-try", "/etc/hosts", "/etc/hosts"]
        environment = _environment(command, INSIDE, "/tmp")
        for name, value in (environment | _model(llm, emit_key, clock) | _file_variables(INSIDE)).items():
            args += ["--setenv", name, value]
        options = folder / "options"  # not on a command line, which everybody on this host can read
        options.write_bytes(b"".join(os.fsencode(arg) + b"\0" for arg in args))
        for path in (folder, folder / "files", folder / "files" / "task.json", options):
            if lease.uid is not None:
                os.chown(path, lease.uid, lease.uid)
        shell = 'exec 9< "$1"; rm -f "$1"; shift; exec "$@"'
        bwrap = ["/bin/sh", "-c", shell, "sh", str(options), *_dropped(lease.uid), "bwrap", "--args", "9", "--", *command]
        outer = {"PATH": os.environ.get("PATH", "/usr/bin:/bin")}
        files = folder / "files"
        yield AgentLaunch(bwrap, outer, str(folder), str(files / "answer.json"), str(files), llm)


def _dropped(uid: int | None) -> list[str]:
    if uid is None:
        return []
    return ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--no-new-privs", "--bounding-set=-all"]


def _view(command: list[str], folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Return bubblewrap's options that decide which files of this host the program sees and which are hidden."""
    args = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent"]
    args += ["--new-session", "--clearenv", "--cap-drop", "ALL", "--hostname", "agent", "--ro-bind", "/usr", "/usr"]
    for linked in ("bin", "sbin", "lib", "lib32", "lib64"):
        there = Path("/", linked)
        link = (
            ["--symlink", os.readlink(there), str(there)] if there.is_symlink() else ["--ro-bind-try", str(there), str(there)]
        )
        args += link
    for path in ETC:
        args += ["--ro-bind-try", path, path]
    args += ["--size", str(256 << 20), "--tmpfs", "/tmp"]
    read = _readable(command)
    for name in read:
        args += ["--ro-bind", name, name]
    for hidden in sorted(_hidden(config)):
        kind = ["--tmpfs", hidden] if Path(hidden).is_dir() else ["--ro-bind", os.devnull, hidden]
        args += kind if any(f"{hidden}/".startswith(f"{path}/") for path in read) else []
    args += ["--proc", "/proc", "--dev", "/dev", "--bind", str(folder / "files"), INSIDE, "--chdir", INSIDE]
    return args


def _readable(command: list[str]) -> list[str]:
    """Return the folders outside of /usr that the program reads: its interpreter's, and those of its files."""
    read = {sys.prefix, sys.base_prefix, *_imported(command), *map(str, folders_of(command))}
    return sorted(path for path in read if path != "/" and not f"{path}/".startswith("/usr/") and may_read(Path(path)))


def _imported(command: list[str]) -> list[str]:
    """Return the folders of `sys.path`, from which a sandboxed function agent is imported; empty for other programs."""
    folders = [str(Path(path).resolve()) for path in sys.path if path and Path(path).is_dir()]
    return folders if FUNCTION in command else []


def _hidden(config: Mapping[str, Any]) -> set[str]:
    """Return the paths that the program must not read although their folder may be visible: databases, keys and references."""
    here = Path.cwd()
    paths = [
        settings().root,
        here / ".env",
        here / ".git",
        *(Path(name).absolute() for name in split_mixture(str(config["dataset"]["name"]))),
        settings().gsm8k_dir,
    ]
    return {str(Path(path).resolve()) for path in paths if path is not None and Path(path).exists()}
