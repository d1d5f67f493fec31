"""The kernel's facts about a process in /proc, read as bytes: a process may give itself a name that is no valid text.

This file also runs inside a container and imports only the standard library.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress


def fields(process: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` after the process's name, its state first; empty where it is gone."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def threads_of(process: int) -> tuple[int, str]:
    """Return (number of living threads of a process, 0 once it has ended; the state of its first thread).

    A process whose first thread has ended looks dead while others still run; their number shows them.
    """
    stat = fields(process)
    if not stat:
        return 0, "X"
    threads = int(stat[17])
    return (threads - 1 if stat[0] in "ZX" else threads), stat[0]


def processor_seconds(process: int) -> float:
    """Return processor time of a process and of its reaped children; 0 where it is gone."""
    return sum(int(field) for field in fields(process)[11:15]) / os.sysconf("SC_CLK_TCK")


class Waits:
    """The time that a changing set of processes has waited for a core, as far as it was observed.

    Between two looks the wait of the thread that waited longest counts: threads wait for each other no longer than they
    themselves run, however many there are.
    """

    def __init__(self) -> None:
        self._threads: dict[str, int] = {}
        self.seconds = 0.0

    def look(self, processes: Iterable[int]) -> float:
        """Add the waits of the processes that live now; return the seconds so far."""
        before, self._threads = self._threads, {name: wait for process in processes for name, wait in _waits(process)}
        longest = max((wait - before.get(name, 0) for name, wait in self._threads.items()), default=0)
        self.seconds += max(0, longest) / 1e9
        return self.seconds


def _waits(process: int) -> Iterator[tuple[str, int]]:
    """(thread, nanoseconds that it has waited for a core) for each thread of a process."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with suppress(OSError), open(f"/proc/{process}/task/{thread}/schedstat", "rb") as file:
                yield thread, int(file.read().split()[1])
