"""Patience: time that a call spends waiting for shared resources does not count against its limit.

To limit a call's time on the clock, make a `Patience` and let the call's thread hold it. Code that waits for a shared resource
(a sandbox's turns, the judges) does so inside `waiting()`. Once the call is given up, its waits end with an error.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from agentrl.workflow.errors import InfraError


class Patience:
    """The time that a thread has spent waiting, and whether its result is still wanted."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = 0.0
        self._still = 0.0
        self._looked = 0.0, time.process_time()
        self._since: float | None = None
        self._over = False

    @property
    def seconds_waited(self) -> float:
        """Seconds waited so far, including a wait that is still going on."""
        since = self._since
        return self._before + (0.0 if since is None else time.monotonic() - since)

    def look(self, meant: float) -> float:
        """Count the time for which the whole process stood still since the last look, and return the call's own seconds.

        The standstill is the time on the clock beyond the `meant` wait and the process's own work: the process was stopped,
        or got no core, and so the call did nothing either.
        """
        before, worked = self._looked
        now, busy = self.own_seconds, time.process_time()
        still = max(0.0, now - before - meant - (busy - worked))
        self._still += still
        self._looked = now - still, busy
        return now - still

    @property
    def own_seconds(self) -> float:
        """Seconds on the clock since the start, less waits and the process's standstills."""
        return time.monotonic() - self._began - self.seconds_waited - self._still

    def end(self) -> None:
        """Give the call up: from now on its waits raise."""
        self._over = True

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Make this the thread's patience inside."""
        before: Patience | None = getattr(_this, "patience", None)
        _this.patience = self
        try:
            yield
        finally:
            _this.patience = before

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """See `waiting`."""
        if self._over:
            raise InfraError("The call was cancelled while it waited.")
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._before, self._since = self.seconds_waited, None


_this = threading.local()


@contextmanager
def waiting() -> Iterator[None]:
    """Mark the time inside as this thread's wait for a shared resource.

    Raises:
        InfraError: the call was given up.
    """
    patience: Patience = getattr(_this, "patience", None) or Patience()
    with patience.waiting():
        yield
