"""Patience: what a call waits for because others have it takes none of its own time, and who is not wanted waits for nothing.

Whoever sets a limit on the clock to a call makes a `Patience` and has the call's thread hold it. What is handed out in turn
(a sandbox's turns, the judges) is waited for inside of `waiting()`.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from agentrl.workflow.errors import InfraError


class Patience:
    """How long a thread has waited for others, and whether anybody still wants what it does."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = 0.0
        self._still = 0.0
        self._looked = 0.0, time.process_time()
        self._since: float | None = None
        self._over = False

    @property
    def seconds_waited(self) -> float:
        """Seconds so far, those of a wait that goes on too."""
        since = self._since
        return self._before + (0.0 if since is None else time.monotonic() - since)

    def look(self, meant: float) -> float:
        """The call's own seconds, after counting for how long the whole process stood still since the last look.

        That is what the clock counted beyond what was meant to pass and what the process worked: it was stopped, or the machine
        had no time for it, and so the call has done nothing either.
        """
        before, worked = self._looked
        now, busy = self.own_seconds, time.process_time()
        still = max(0.0, now - before - meant - (busy - worked))
        self._still += still
        self._looked = now - still, busy
        return now - still

    @property
    def own_seconds(self) -> float:
        """On the clock since it was made, without what was waited and what the process stood still."""
        return time.monotonic() - self._began - self.seconds_waited - self._still

    def end(self) -> None:
        """Nobody wants what it does any more: from now on it waits for nothing."""
        self._over = True

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Makes it this thread's."""
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
            raise InfraError("Nobody waits any more for what was to be done.")
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._before, self._since = self.seconds_waited, None


_this = threading.local()


@contextmanager
def waiting() -> Iterator[None]:
    """What this thread does inside is to wait for what others have.

    Raises:
        InfraError: nobody wants what it does any more.
    """
    patience: Patience = getattr(_this, "patience", None) or Patience()
    with patience.waiting():
        yield
