"""Lets other processes find, start, keep and stop the embedded stack.

A lock in the data folder shows whether a supervisor is running. A small state file contains the supervisor's pid and whether
the supervisor is stopping. A command that needs the stack touches the file `asked`. `agentrl up` creates the file `stay`.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import IO, Any

from agentrl.workers.stack import broker
from agentrl.workers.stack.process import no_overlap_error
from agentrl.workflow.errors import ConfigError, ServiceError
from agentrl.workflow.settings import Settings, digest

START_SECONDS = 20.0
ASKED_SECONDS = 20.0
"""The time, in seconds, that a command has to write its run after it has requested the stack. During this time, the stack does
not count as idle.
"""
STOP_SECONDS = 40.0
ALWAYS_COMPARED = ("AGENTRL_DATABASE_URL", "AGENTRL_AGENTS")
"""The environment variables that must be equal for the workers of a stack and a command. If they differ, the two use different
databases or run a different number of agents at a time.
"""

PATH_VARIABLES = ("PYTHONPATH", "PWD")
"""The environment variables that decide where Python finds modules."""


def log_file(where: Settings, role: str) -> Path:
    """Return the log file of a process of the embedded stack."""
    return where.stack_dir / f"{role.replace(',', '-')}.log"


def find_supervisor(where: Settings) -> int | None:
    """Return the pid of this data folder's supervisor; None if no supervisor is running."""
    try:
        with (where.stack_dir / "supervisor.lock").open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return int(read_state(where)["pid"])


def end_orphaned_redis(where: Settings) -> None:
    """Stop the private Redis of a killed supervisor, unless a new supervisor is already running."""
    if not where.broker_url and find_supervisor(where) is None:
        broker.end_server(where)


def ensure_running(where: Settings, stay: bool = False, separate: bool = False) -> bool:
    """Start the embedded stack unless it is running, and return whether this call started it. If a stack is stopping, first
    wait until it has stopped. If `stay` is true, the stack stops only on request. If `separate` is true, rollout and train are
    separate processes. Raise ServiceError if the stack does not start, or the broker of the settings does not answer. Raise
    ConfigError if separate processes are impossible, or the running stack does not have them.
    """
    if where.broker_url:
        broker.require_broker(where)
    check_separate(where, separate)
    where.stack_dir.mkdir(parents=True, exist_ok=True)
    (where.stack_dir / "asked").touch()  # before the state is read: see `Supervisor._is_idle`
    process = None
    deadline = time.monotonic() + START_SECONDS
    while not _is_serving(where):
        if (process is not None and process.poll()) or time.monotonic() > deadline:
            raise ServiceError("The embedded stack did not start.", "Read its log: agentrl logs supervisor")
        if find_supervisor(where) is None:
            # If several supervisors start at once, all but one exit with 0.
            process = _spawn(where, separate) if process is None or process.poll() is not None else process
        elif read_state(where)["stopping"]:
            deadline = time.monotonic() + START_SECONDS
        time.sleep(0.05)
    check_separate(where, separate)
    if stay:
        stay_file(where).touch()
    return process is not None and find_supervisor(where) == process.pid


def check_separate(where: Settings, separate: bool) -> None:
    """If `separate` is true, check that rollout and train can be separate processes. Raise ConfigError if the broker is in
    memory, or if rollout and train share a process in the running stack; the message says what to type.
    """
    if separate and broker.is_in_memory(where):
        raise no_overlap_error(f"Without a Redis server all workers are one process. {broker.server_hint()}")
    if separate and _is_serving(where) and not read_state(where)["separate"]:
        raise ConfigError(
            "The running stack samples and trains in one process, so they cannot overlap.",
            "Type `agentrl down; agentrl up --separate`. Unfinished runs then continue.",
        )


def _spawn(where: Settings, separate: bool) -> "subprocess.Popen[bytes]":
    # -P: a folder in the current directory with the name of one of our packages must not be imported.
    command = [sys.executable, "-P", "-m", "agentrl.workers.stack.supervisor", *(["--separate"] if separate else [])]
    with log_file(where, "supervisor").open("ab") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)


def _is_serving(where: Settings) -> bool:
    return bool(find_supervisor(where)) and not read_state(where)["stopping"] and broker.is_answering(where)


def stop(where: Settings) -> bool:
    """Stop the embedded stack and wait for its end. Return False if none is running."""
    pid = find_supervisor(where)
    if not pid:
        return False
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS + 10
    while find_supervisor(where) is not None:
        if time.monotonic() > deadline:
            raise ServiceError(f"The supervisor (pid {pid}) did not stop.", f"Kill it: kill -9 {pid}")
        time.sleep(0.05)
    return True


def restart(where: Settings, separate: bool = False) -> None:
    """Restart the stack with the environment of this process. If the old stack had `stay` or separate processes, the new stack
    has them too. If `separate` is true, the new stack always has separate processes. Raise ServiceError or ConfigError if the
    stack cannot be started; see `ensure_running`.
    """
    before, stay = read_state(where), stay_file(where).exists()
    stop(where)
    ensure_running(where, stay, separate or before["separate"])


def list_queues(where: Settings) -> tuple[str, ...]:
    """Return one text for each worker of the running stack: the names of its queues, joined by commas."""
    return ("rollout", "train", "tools") if read_state(where)["separate"] else ("rollout,train", "tools")


def changed_variables(where: Settings, variables: Iterable[str]) -> list[str]:
    """Return the environment variables whose values differ between this process and the running stack.

    The variables in ALWAYS_COMPARED are always compared. The given variables are compared only if the broker is in memory,
    because the workers of such a stack cannot be queried.
    """
    digests = read_state(where).get("environment", {})
    needed = [*ALWAYS_COMPARED, *(variables if broker.is_in_memory(where) else ())]
    now = _environment_digests(digests.get("key", ""))
    return [name for name in dict.fromkeys(needed) if digests and digests.get(name) != now.get(name)]


def _environment_digests(key: str) -> dict[str, str]:
    """Return a digest of each relevant variable, for the state file. The values may be secret."""
    values = {
        name: value for name, value in os.environ.items() if value and (name.startswith("AGENTRL_") or name in PATH_VARIABLES)
    }
    values["PWD"] = os.getcwd()
    return {"key": key, **{name: digest(key, value) for name, value in values.items()}}


def stay_file(where: Settings) -> Path:
    """Return the path of the file `stay`. While that file exists, the stack stops only on request."""
    return where.stack_dir / "stay"


def agents_file(where: Settings) -> Path:
    """Return the path of the file `agents`. While that file exists, the stack runs an agents worker even if no stored run needs
    one yet.
    """
    return where.stack_dir / "agents"


def was_asked_lately(where: Settings) -> bool:
    """Return whether a command has requested the stack within the last ASKED_SECONDS."""
    try:
        age = time.time() - (where.stack_dir / "asked").stat().st_mtime
    except FileNotFoundError:
        return False
    return abs(age) < ASKED_SECONDS


def read_state(where: Settings) -> dict[str, Any]:
    """Return the supervisor's state: pid (0 at first), whether it is stopping, whether rollout and train are separate."""
    try:
        state = json.loads((where.stack_dir / "supervisor.json").read_text())
    except FileNotFoundError:
        state = {"pid": 0, "stopping": False}
    return {"separate": False, **state}  # the previous release does not write it


def write_state(where: Settings, stopping: bool, separate: bool) -> None:
    """Write this supervisor's state: pid, whether it is stopping, whether rollout and train are separate."""
    beside = where.stack_dir / "supervisor.json.new"
    with suppress(FileNotFoundError):  # the data folder was removed: the children are ended all the same
        state = {
            "pid": os.getpid(),
            "stopping": stopping,
            "separate": separate,
            "environment": _environment_digests(token_hex(8)),
        }
        beside.touch(0o600)
        beside.write_text(json.dumps(state))
        beside.replace(where.stack_dir / "supervisor.json")


def hold_lock(where: Settings) -> IO[str] | None:
    """Take the supervisor's lock; closing the returned file releases it. Return None if another process has the lock."""
    file = (where.stack_dir / "supervisor.lock").open("w")
    deadline = time.monotonic() + 1.0  # a process that only checks for a supervisor holds the lock for a moment
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                return None
        time.sleep(0.02)
