"""Facts about a process, from /proc. The files are read as bytes, because a process may give itself a name that is invalid
text.

This file also runs inside a container and imports only the standard library.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress


def fields(process: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the process's state on; empty if the process is gone."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def threads_of(process: int) -> tuple[int, str]:
    """Return the number of living threads of a process, and the state of its first thread. The number is 0 if the process has
    ended.

    If the first thread has ended, the process looks dead although other threads may still run; their number shows this.
    """
    stat = fields(process)
    if not stat:
        return 0, "X"
    threads = int(stat[17])
    return (threads - 1 if stat[0] in "ZX" else threads), stat[0]


def processor_seconds(process: int) -> float:
    """Return the processor time of a process and its reaped children, in seconds; 0 if the process is gone."""
    return sum(int(field) for field in fields(process)[11:15]) / os.sysconf("SC_CLK_TCK")


class Waits:
    """The time that a changing set of processes has waited for a core, as far as it was observed.

    Threads may wait at the same time. So at each check only the longest wait of a single thread since the last check is added
    to `seconds`. A program cannot make itself look starved by threads that wait for each other to leave a core: while one
    of them waits, another one runs, so the program's processor time grows at least as fast as `seconds`.
    """

    def __init__(self) -> None:
        self._threads: dict[str, int] = {}
        self.seconds = 0.0

    def look(self, processes: Iterable[int]) -> float:
        """Find the longest time that a thread of these processes has waited since the last call. Add it to the total, and
        return the total in seconds.
        """
        before, self._threads = self._threads, {name: wait for process in processes for name, wait in _waits(process)}
        longest = max((wait - before.get(name, 0) for name, wait in self._threads.items()), default=0)
        self.seconds += max(0, longest) / 1e9
        return self.seconds


def _waits(process: int) -> Iterator[tuple[str, int]]:
    """Yield each thread of a process, with the total time that it has waited for a core, in nanoseconds."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with suppress(OSError), open(f"/proc/{process}/task/{thread}/schedstat", "rb") as file:
                yield thread, int(file.read().split()[1])
