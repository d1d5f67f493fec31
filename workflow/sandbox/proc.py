"""What the kernel tells of a process, read as bytes: a process gives itself any name, also one that is no text.

This file also runs inside a container and imports only the standard library.
"""

import os


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
