"""A first-come, first-served semaphore that limits the number of running programs. At most one program per core of the machine
holds the semaphore. The time in its queue does not count towards a program's limits.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from agentrl.workflow.runtime.wait_budget import waiting


class FairSemaphore:
    """A semaphore with a queue. A thread that acquires it repeatedly cannot overtake threads that already wait."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._lock = threading.Lock()
        self._running = 0
        self._waiting: deque[threading.Event] = deque()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Acquire the semaphore, and release it when the context ends. Raise InfraError if this thread's caller has stopped
        waiting.
        """
        handed = self._enqueue()
        try:
            with waiting():
                handed.wait()
            yield
        finally:
            self._release(handed)

    def running(self) -> int:
        """Return the number of holders of the semaphore."""
        return self._running

    def _enqueue(self) -> threading.Event:
        handed = threading.Event()
        with self._lock:
            if self._running < self._max_running:  # so nobody waits
                self._running += 1
                handed.set()
            else:
                self._waiting.append(handed)
        return handed

    def _release(self, handed: threading.Event) -> None:
        with self._lock:
            if not handed.is_set():  # the waiting thread was interrupted
                self._waiting.remove(handed)
            elif self._waiting:
                self._waiting.popleft().set()
            else:
                self._running -= 1
