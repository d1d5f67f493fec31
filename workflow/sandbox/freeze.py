"""Bringing a sandbox to rest: whatever a cell left running is ended, and what lasts stands still until it is asked again.

Killing one process after the other loses against those that fork meanwhile, so all are stopped first, in one step that a fork
cannot outrun: who is stopped neither forks nor uses a processor. Who may signal others can undo that as long as it lives, so
what is to last must be seen standing still once everybody else is dead.

This file also runs inside a container and imports only the standard library.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Set
from contextlib import suppress


class Unsettled(Exception):
    """What was to end lives on, or what was to last is gone."""


def threads_of(process: int) -> tuple[int, bool]:
    """How many threads of a process live (0: it has ended), and whether it stands still.

    A process whose first thread has ended looks dead as long as others run; its number of threads says that they do.
    """
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0, False
    threads = int(fields[17])
    return (threads - 1 if fields[0] in "ZX" else threads), fields[0] in "Tt"


def settle(stop: Callable[[], None], members: Callable[[], Set[int]], lasting: Set[int], seconds: float) -> int:
    """Ends all members but the lasting ones and leaves those stopped; how many threads it ended.

    Args:
        stop: stops all of them in one step.
        members: the processes that are there, keepers left out.

    Raises:
        Unsettled: it took longer than so many seconds, or a lasting one has ended.
    """
    deadline = time.monotonic() + seconds
    ended: dict[int, int] = {}
    stop()
    while True:
        others = members() - lasting
        new = others - ended.keys()
        ended |= {process: threads_of(process)[0] for process in new}
        _kill(new)
        if not _all_gone(others, deadline):
            raise Unsettled(f"{len(others)} processes did not end")
        seen = [threads_of(process) for process in lasting]  # once the others are dead nobody can set them going
        if not all(threads for threads, _ in seen):
            raise Unsettled("its processes are gone")
        if not new and all(still for _, still in seen):
            return sum(ended.values())
        if time.monotonic() > deadline:
            raise Unsettled("what is to stand still does not")
        if len(ended) > len(new) or not new:  # more came after the first step, or a signal set some going
            stop()


def _kill(processes: Set[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _all_gone(processes: Set[int], deadline: float) -> bool:
    """Waits until all of them have ended, with all their threads."""
    for process in processes:
        try:
            pidfd = os.pidfd_open(process)
        except OSError:
            continue  # it has been buried
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        ended = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        os.close(pidfd)
        if not ended:
            return False
    return True
