"""Control groups: they count and limit the memory, processes and processor time of all processes of a sandbox together.

For each controller that this process may use, a sandbox has a control group below the group of this process. Version 1 has one
hierarchy per controller; version 2 has one hierarchy for all controllers. If no controller can be used, rlimits limit each
process alone. Then only the container in which agentrl runs, if there is one, limits all processes together. Only the kernel's
counters are trusted: the amounts used, the kills and the refusals.
"""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from agentrl.workflow.errors import InfraError

MOUNT = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids", "cpuacct")
PREFIX = "agentrl-sandbox-"
SPARE_PROCESSES = 6
"""The number of processes that the sandbox itself needs, in addition to the program's limit."""

_numbers = count()


@dataclass(frozen=True)
class CgroupEvents:
    """The numbers of kernel interventions so far: kills for lack of memory, refused processes, and kills for disk use."""

    oom: int = 0
    pids: int = 0
    disk: int = 0

    def since(self, before: "CgroupEvents") -> "CgroupEvents":
        """Return the numbers of interventions after `before`, which is an earlier value."""
        return CgroupEvents(max(0, self.oom - before.oom), max(0, self.pids - before.pids), max(0, self.disk - before.disk))


class Cgroup:
    """The control groups of one sandbox. `folders` is empty if this process cannot create control groups."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        self._bounds: dict[str, int] = {}
        self._seconds: float | None = None

    @property
    def joins(self) -> list[str]:
        """The paths of the files to which a process writes its id to join the groups."""
        return sorted({str(folder / "cgroup.procs") for folder in self._folders.values()})

    def set_limits(self, memory_bytes: int, processes: int) -> None:
        """Set the limits on memory, in bytes, and on the number of processes. Limits that have not changed are not written
        again. Raise InfraError if the kernel refuses a limit because the processes already use more.
        """
        self._write("memory", "memory.swappiness", "memory.swap.max", 0)
        self._write("memory", "memory.limit_in_bytes", "memory.max", memory_bytes)
        self._write("pids", "pids.max", "pids.max", processes + SPARE_PROCESSES)

    def events(self) -> CgroupEvents:
        """Return the number of kernel interventions so far."""
        memory = self._pairs("memory", "memory.oom_control", "memory.events")
        return CgroupEvents(memory.get("oom_kill", 0), self._pairs("pids", "pids.events", "pids.events").get("max", 0))

    def cpu_seconds(self) -> float | None:
        """Return the processor time of all processes that were ever in the group, in seconds; None if it is not known."""
        folder = self._folders.get("cpuacct")
        if folder is None:
            return self._seconds
        if (folder / "cpuacct.usage").exists():
            return int((folder / "cpuacct.usage").read_text()) / 1e9
        return self._pairs("cpuacct", "", "cpu.stat").get("usage_usec", 0) / 1e6

    def members(self) -> set[int] | None:
        """Return the ids of the processes in the group; None if there is no group."""
        folder = next(iter(self._folders.values()), None)
        return None if folder is None else set(map(int, (folder / "cgroup.procs").read_text().split()))

    def note_final_cpu_seconds(self, seconds: float) -> None:
        """Store the processor time of the sandbox's first process, in seconds. It is used only if no controller counts
        processor time.
        """
        self._seconds = seconds

    def remove(self) -> None:
        """Remove the groups. Retry for up to a second, because a process that has just ended may still be in its group."""
        for folder in set(self._folders.values()):
            for _ in range(100):
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.01)
                else:
                    break

    def _write(self, controller: str, first: str, second: str, value: int) -> None:
        folder = self._folders.get(controller)
        if folder is None or self._bounds.get(second) == value:
            return
        file = folder / (first if (folder / first).exists() else second)
        try:
            if file.exists():  # a kernel without swap has no such file
                file.write_text(str(value))
        except OSError as error:
            raise InfraError(f"A sandbox's limit could not be set: {value} in {file}: {error.strerror}.") from error
        self._bounds[second] = value

    def _pairs(self, controller: str, first: str, second: str) -> dict[str, int]:
        folder = self._folders.get(controller)
        if folder is None:
            return {}
        file = next((folder / name for name in (first, second) if name and (folder / name).exists()), None)
        if file is None:
            return {}
        return {name: int(number) for name, number in (line.split() for line in file.read_text().splitlines())}


def make() -> Cgroup:
    """Create the groups of one sandbox, for every controller that this process may use."""
    name = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
    folders: dict[str, Path] = {}
    for controller, parent in parents().items():
        with suppress(OSError):
            (parent / name).mkdir(exist_ok=True)
            folders[controller] = parent / name
    return Cgroup(folders)


def parents(mount: Path = MOUNT, own: Path = Path("/proc/self/cgroup")) -> dict[str, Path]:
    """Return, for each controller, the folder of the group in which this process may create groups."""
    first: dict[str, Path] = {}
    second: dict[str, Path] = {}
    for line in own.read_text().splitlines() if own.exists() else ():
        _, names, path = line.split(":", 2)
        for controller in set(names.split(",")) & set(CONTROLLERS):
            first[controller] = mount / names / path.lstrip("/")
        if names == "":
            second = _version_2_parents(mount, path.lstrip("/"))
    groups = {**second, **first}
    return {controller: folder for controller, folder in groups.items() if os.access(folder, os.W_OK)}


def _version_2_parents(mount: Path, path: str) -> dict[str, Path]:
    """Return the nearest version 2 group that delegates memory and pids to its children, by controller.

    A group that contains processes never delegates, so the search continues with the parent groups of this process's group.
    """
    for folder in (mount / path, *(mount / parent for parent in Path(path).parents)):
        with suppress(OSError):
            handed = (folder / "cgroup.subtree_control").read_text().split()
            if {"memory", "pids"} <= set(handed) and os.access(folder / "cgroup.procs", os.W_OK):
                return dict.fromkeys(CONTROLLERS, folder)
    return {}


def sweep() -> None:
    """Remove the groups of agentrl processes that no longer exist. The sandboxes of these processes have ended too."""
    for parent in set(parents().values()):
        for folder in parent.glob(f"{PREFIX}*"):
            owner = folder.name.removeprefix(PREFIX).split("-")[0]
            if not Path("/proc", owner).exists():
                with suppress(OSError):
                    folder.rmdir()
