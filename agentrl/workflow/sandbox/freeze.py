"""Cleanup after a cell: the processes that the cell left running are killed, and the remaining processes stay stopped until the
next request.

Killing processes one by one fails if they fork meanwhile. So all processes are stopped first, in one step that a fork cannot
escape. A stopped process neither forks nor uses a core. A process that may signal others can continue them while it lives. So
after all processes to be killed are dead, the remaining processes must still be stopped; if they are not, they are stopped
again.

This file also runs inside a container and imports only the standard library and `proc`.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Set
from contextlib import suppress

from agentrl.workflow.sandbox import proc

PAUSE_SECONDS = 0.002
"""The pause between two checks of processes that are not stopped yet, in seconds."""


class SettleError(Exception):
    """The error of a cleanup after a cell: a process that should have ended still lives, or a process that should live has
    ended.
    """


def settle(stop: Callable[[], None], members: Callable[[], Set[int]], lasting: Set[int], seconds: float) -> int:
    """Kill all processes except `lasting`, and leave those in `lasting` stopped. Return the number of threads that were ended.

    Args:
        stop: stops all processes in one step.
        members: returns the ids of the processes, without those of the sandbox itself.
        lasting: the ids of the processes that must remain.
        seconds: the longest time for the whole cleanup, in seconds.

    Raises:
        SettleError: the cleanup took longer than `seconds`, or a process in `lasting` has ended. A process whose first thread
            has ended counts as ended: its other threads can run, but it cannot fork the next state.
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
            raise SettleError("the processes that should remain are gone")
        if not new and all(state in "Tt" for state in seen):
            return sum(ended.values())
        if time.monotonic() > deadline:
            raise SettleError("the remaining processes could not be stopped")
        if len(ended) > len(new) or not new:  # more came after the first step, or a signal continued some
            stop()
        time.sleep(PAUSE_SECONDS)


def _kill(processes: Set[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _wait_until_gone(processes: Set[int], deadline: float) -> bool:
    """Wait until all of these processes and their threads have ended. Return False if the deadline passes first."""
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
