"""Bringing a sandbox to rest: whatever a cell left running is ended, and what lasts stands still until it is asked again.

Killing one process after the other loses against those that fork meanwhile, so all are stopped first, in one step that a fork
cannot outrun: who is stopped neither forks nor uses a processor. Who may signal others can undo that as long as it lives, so
what is to last must be seen standing still once everybody else is dead.

This file also runs inside a container and imports the standard library and `proc`.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Set
from contextlib import suppress

from agentrl.workflow.sandbox import proc

PAUSE_SECONDS = 0.002
"""Before what does not yet stand still is looked at again."""


class SettleError(Exception):
    """A process that was to end lives on, or one that was to last is gone."""


def settle(stop: Callable[[], None], members: Callable[[], Set[int]], lasting: Set[int], seconds: float) -> int:
    """Ends all members but the lasting ones and leaves those stopped; how many threads it ended.

    Args:
        stop: stops all of them in one step.
        members: the processes that are there, keepers left out.

    Raises:
        Unsettled: it took longer than so many seconds, or a lasting one has ended, be it its first thread alone: the others
            of such a process can run, and it can hand on to nobody.
    """
    deadline = time.monotonic() + seconds
    ended: dict[int, int] = {}
    stop()
    while True:
        others = members() - lasting
        new = others - ended.keys()
        ended |= {process: proc.threads_of(process)[0] for process in new}
        _kill(new)
        if not _wait_until_gone(others, deadline):
            raise SettleError(f"{len(others)} processes did not end")
        seen = [proc.threads_of(process)[1] for process in lasting]  # once the others are dead nobody can set them going
        if any(state in "ZX" for state in seen):
            raise SettleError("its processes are gone")
        if not new and all(state in "Tt" for state in seen):
            return sum(ended.values())
        if time.monotonic() > deadline:
            raise SettleError("what is to stand still does not")
        if len(ended) > len(new) or not new:  # more came after the first step, or a signal set some going
            stop()
        time.sleep(PAUSE_SECONDS)


def _kill(processes: Set[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _wait_until_gone(processes: Set[int], deadline: float) -> bool:
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
