"""Settling a sandbox: processes that a cell left running are ended, and those that last stay stopped until the next request.

Killing one process after the other loses against processes that fork meanwhile. So all are stopped first, in one step that a
fork cannot outrun: a stopped process neither forks nor uses a core. A process that may signal others can undo this as long as
it lives, so the lasting ones must be seen stopped once all others are dead.

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
"""The pause between two looks at processes that are not stopped yet."""


class SettleError(Exception):
    """A process that should have ended lives on, or one that should last is gone."""


def settle(stop: Callable[[], None], members: Callable[[], Set[int]], lasting: Set[int], seconds: float) -> int:
    """End all members but the lasting ones, leave those stopped, and return how many threads it ended.

    Args:
        stop: stops all processes in one step.
        members: the processes there are, without keepers.

    Raises:
        SettleError: it took longer than `seconds`, or a lasting process has ended. One whose first thread alone has ended
            counts too: its other threads can run, but it can fork no next state.
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
        seen = [proc.threads_of(process)[1] for process in lasting]  # with the others dead, nothing can continue them
        if any(state in "ZX" for state in seen):
            raise SettleError("its processes are gone")
        if not new and all(state in "Tt" for state in seen):
            return sum(ended.values())
        if time.monotonic() > deadline:
            raise SettleError("what is to stand still does not")
        if len(ended) > len(new) or not new:  # more came after the first step, or a signal continued some
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
            continue  # it has been reaped
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        ended = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        os.close(pidfd)
        if not ended:
            return False
    return True
