"""Excludes the time that a call waits for shared resources from the call's time limit.

To limit a call's time, create a `Patience` and `hold` it in the thread of the call. Code that waits for a shared resource (a
free sandbox, the judges) does so inside `waiting()`. If the caller has stopped waiting for the call, further waits of the call
raise an error.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from agentrl.workflow.errors import InfraError


class Patience:
    """The time that a call has spent waiting for shared resources, and whether its result is still needed."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = 0.0
        self._still = 0.0
        self._looked = 0.0, time.process_time()
        self._since: float | None = None
        self._over = False

    @property
    def seconds_waited(self) -> float:
        """The time spent waiting so far, in seconds. It includes a wait that has not ended."""
        since = self._since
        return self._before + (0.0 if since is None else time.monotonic() - since)

    def look(self, meant: float) -> float:
        """Return the seconds that the watched call has used so far, without waits and without standstills of the whole process.

        Args:
            meant: the time that the caller intended to wait since the previous call of `look`, in seconds. If more
                time passed than `meant` plus the process's processor time, the rest is a standstill: the process was stopped
                or got no core, so the watched call could not run either.
        """
        before, worked = self._looked
        now, busy = self.own_seconds, time.process_time()
        still = max(0.0, now - before - meant - (busy - worked))
        self._still += still
        self._looked = now - still, busy
        return now - still

    @property
    def own_seconds(self) -> float:
        """The time since the start, in seconds, without waits and standstills of the process."""
        return time.monotonic() - self._began - self.seconds_waited - self._still

    def end(self) -> None:
        """Give the call up. From now on, every wait of the call raises InfraError."""
        self._over = True

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Use this object for all waits of the current thread in the `with` block: it counts their time, and they raise
        InfraError once the call is given up.
        """
        before: Patience | None = getattr(_this, "patience", None)
        _this.patience = self
        try:
            yield
        finally:
            _this.patience = before

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in the `with` block as a wait. See the function `waiting`."""
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
    """Count the time in the `with` block as a wait for a shared resource. Raise InfraError if the call was given up."""
    patience: Patience = getattr(_this, "patience", None) or Patience()
    with patience.waiting():
        yield
