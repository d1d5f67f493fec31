"""Fault points: named places in the code at which a test can kill, fail or stop the process. Outside of tests they do nothing.

`AGENTRL_FAULT_DIR` names a folder in which every point counts how often it was reached. The count is permanent and shared by
all processes with this folder, so a restarted process does not fail at the same place again. `AGENTRL_FAULT` lists the faults,
separated by commas. `name:n:action` runs the action when the point `name` is reached for the n-th time.

- `kill`   the process sends itself SIGKILL: nothing is flushed, no handler runs
- `raise`  raises InjectedFault
- `sleep`  stops the whole process, including its heartbeat, for `AGENTRL_FAULT_SLEEP` seconds (default: 5). The process then
    continues, although its leases may be lost
"""

import fcntl
import os
import signal
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path


class InjectedFault(Exception):
    """A failure that a test requested with `AGENTRL_FAULT`."""


def faultpoint(name: str) -> None:
    """Count the fault point and run the fault that is due. Raise InjectedFault if its action is `raise`."""
    plan = _plan()
    if plan is not None:
        plan.pass_by(name)


@dataclass(frozen=True, slots=True)
class _Plan:
    folder: Path
    faults: tuple[tuple[str, int, str], ...]

    def pass_by(self, name: str) -> None:
        hit = _count(self.folder / name)
        for fault_name, number, action in self.faults:
            if (fault_name, number) == (name, hit):
                _act(action, f"{name}, hit {hit}")


@cache
def _plan() -> _Plan | None:
    folder = os.environ.get("AGENTRL_FAULT_DIR")
    if not folder:
        return None
    entries = [text.split(":") for text in os.environ.get("AGENTRL_FAULT", "").split(",") if text]
    return _Plan(Path(folder), tuple((name, int(number), action) for name, number, action in entries))


def _count(file: Path) -> int:
    with file.open("ab") as hits:
        fcntl.flock(hits, fcntl.LOCK_EX)  # unlocked, two processes might both be the n-th, or neither
        os.write(hits.fileno(), b".")
        return os.fstat(hits.fileno()).st_size


def _act(action: str, where: str) -> None:
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise InjectedFault(where)
        case "sleep":
            _stand_still(float(os.environ.get("AGENTRL_FAULT_SLEEP", "5")))
        case _:
            raise ValueError(f"AGENTRL_FAULT names the unknown action {action!r}. Use kill, raise or sleep.")


def _stand_still(seconds: float) -> None:
    # A stopped process cannot wake itself.
    with subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"]):
        os.kill(os.getpid(), signal.SIGSTOP)
