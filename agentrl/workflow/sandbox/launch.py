"""The interface that each kind of sandbox on this host implements: it starts an interpreter inside and controls it.

Programs, sessions and their limits are the same for all kinds, and use only a `Launch`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agentrl.workflow.sandbox import Limits
from agentrl.workflow.sandbox.cgroups import CgroupEvents


@dataclass(frozen=True)
class Inside:
    """A request to start an interpreter: the code to run inside, and its files.

    Args:
        scripts: the files of this package, without suffix; the `main` of the last one is called.
        files: descriptors, the first arguments of `main`; they keep their numbers.
        numbers: the further arguments of `main`.
        stdin, output: the descriptors of the standard streams.
        session: True if the program is long-lived and is stopped between requests. If no process outside can stop all of its
            processes in one step, it becomes the first process of its namespace, and its last argument is the socket for such
            orders.
        zygote: True if the program forks into its own namespaces. The system calls for that are then allowed, and the last
            argument is the system call filter, which it sets later.
        reads: paths of this host that the program may read, besides its interpreter.
    """

    scripts: tuple[str, ...]
    files: tuple[int, ...]
    numbers: tuple[int, ...]
    stdin: int
    output: int
    session: bool = False
    zygote: bool = False
    reads: tuple[str, ...] = ()


class Counts(Protocol):
    """Counters of the resources that all processes of a sandbox use together, as far as they are counted."""

    def set_limits(self, memory_bytes: int, processes: int) -> None:
        """Set the limits on memory, in bytes, and on the number of processes."""
        ...

    def events(self) -> CgroupEvents:
        """Return the number of kernel interventions so far."""
        ...

    def cpu_seconds(self) -> float | None:
        """Return the processor time so far, in seconds; None if nothing counts it."""
        ...


class RunningSandbox(Protocol):
    """A started sandbox."""

    @property
    def cgroup(self) -> Counts:
        """The counters of the sandbox."""
        ...

    @property
    def end_fd(self) -> int:
        """A descriptor, such as a pidfd, that becomes readable when the program inside has ended."""
        ...

    def members(self) -> set[int]:
        """Return the processes inside, by their ids on this host."""
        ...

    def stop(self) -> None:
        """Stop all processes inside, in one step that a fork cannot escape (see `freeze`).

        Raises:
            OSError: the process that carries out the order is gone.
        """
        ...

    def go_on(self) -> None:
        """Continue the stopped processes, at once or soon. Raise as `stop` does."""
        ...

    def close(self) -> int:
        """Kill all processes and wait until they are gone; return the exit code, negative for a signal. Idempotent."""
        ...


@dataclass(frozen=True)
class Launch:
    """One kind of sandbox.

    Args:
        kind: the kind's name in results.
        start: starts a sandbox; raises InfraError if it cannot.
        nests: whether a zygote inside can make its own namespaces.
    """

    kind: str
    start: Callable[[Limits, Inside], RunningSandbox]
    nests: bool = False
