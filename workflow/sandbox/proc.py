"""What the kernel tells of a process, read as bytes: a process gives itself any name, also one that is no text.

This file also runs inside a container and imports only the standard library.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress


def fields(process: int) -> list[str]:
    """What `/proc/PID/stat` says after the process's name, its state first; nothing where it is gone."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def threads_of(process: int) -> tuple[int, str]:
    """How many threads of a process live (0: it has ended), and the state of its first one.

    A process whose first thread has ended looks dead as long as others run; its number of threads says that they do.
    """
    found = fields(process)
    if not found:
        return 0, "X"
    threads = int(found[17])
    return (threads - 1 if found[0] in "ZX" else threads), found[0]


def processor_seconds(process: int) -> float:
    """Processor time of a process and of its buried children; none where it is gone."""
    return sum(int(field) for field in fields(process)[11:15]) / os.sysconf("SC_CLK_TCK")


class Waits:
    """How long processes that come and go have waited for a core, as far as was looked at.

    From one look to the next it is the wait of that thread which waited longest: however many threads there are, what they
    wait for one another is no longer than they themselves run.
    """

    def __init__(self) -> None:
        self._threads: dict[str, int] = {}
        self.seconds = 0.0

    def look(self, processes: Iterable[int]) -> float:
        """Looks at those that live now; the seconds so far."""
        before, self._threads = self._threads, {name: wait for process in processes for name, wait in _waits(process)}
        longest = max((wait - before.get(name, 0) for name, wait in self._threads.items()), default=0)
        self.seconds += max(0, longest) / 1e9
        return self.seconds


def _waits(process: int) -> Iterator[tuple[str, int]]:
    """Each thread of a process, and how many nanoseconds it has waited for a core."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with suppress(OSError), open(f"/proc/{process}/task/{thread}/schedstat", "rb") as file:
                yield thread, int(file.read().split()[1])
