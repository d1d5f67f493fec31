"""Fault points: named places at which a test can kill, fail or stop the process that passes them; elsewhere they do nothing.

`AGENTRL_FAULT_DIR` names a folder in which every point counts its hits, over all processes that share it and for ever, so that
a process that is started again does not fall at the same place. `AGENTRL_FAULT` is what happens: `name:n:action` (several with
commas between them) acts at the n-th hit of the point `name`.

- `kill`   SIGKILL to itself: nothing is flushed, nobody is told
- `raise`  InjectedFault
- `sleep`  the whole process, heartbeat and all, stands still for `AGENTRL_FAULT_SLEEP` seconds (5) and wakes up as a zombie
"""

import fcntl
import os
import signal
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path


class InjectedFault(Exception):
    """Somebody asked for this failure."""


def faultpoint(name: str) -> None:
    """Does what was asked for here, if anything was.

    Raises:
        InjectedFault: this is the hit at which it was asked for.
    """
    plan = _plan()
    if plan is not None:
        plan.pass_by(name)


@dataclass(frozen=True, slots=True)
class _Plan:
    folder: Path
    faults: tuple[tuple[str, int, str], ...]

    def pass_by(self, name: str) -> None:
        hit = _count(self.folder / name)
        for wanted, number, action in self.faults:
            if (wanted, number) == (name, hit):
                _act(action, f"{name}, hit {hit}")


@cache
def _plan() -> _Plan | None:
    folder = os.environ.get("AGENTRL_FAULT_DIR")
    if not folder:
        return None
    asked = [text.split(":") for text in os.environ.get("AGENTRL_FAULT", "").split(",") if text]
    return _Plan(Path(folder), tuple((name, int(number), action) for name, number, action in asked))


def _count(file: Path) -> int:
    with file.open("ab") as hits:
        fcntl.flock(hits, fcntl.LOCK_EX)  # else two processes might both be the n-th, or none
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
            raise ValueError(f"AGENTRL_FAULT asks for {action!r}: kill, raise or sleep.")


def _stand_still(seconds: float) -> None:
    # Who is stopped cannot wake himself.
    with subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"]):
        os.kill(os.getpid(), signal.SIGSTOP)
