"""The part that each kind of sandbox on this host does in its own way: start an interpreter inside and hold it.

Programs, sessions and their limits are the same for all kinds; they only know a `Launch`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agentrl.workflow.sandbox import Limits
from agentrl.workflow.sandbox.cgroups import CgroupEvents


@dataclass(frozen=True)
class Inside:
    """A request: the code to run inside, and its files.

    Args:
        scripts: files of this package without their suffix; the `main` of the last one is called.
        files: the first arguments of `main`: descriptors, which keep their numbers.
        numbers: the further arguments of `main`.
        stdin, output: the standard streams.
        session: the program lasts, and is stopped between requests. Where nobody outside can stop all its processes in one
            step, it is the first process of its namespace, and its last argument is the socket on which that is ordered.
        zygote: the program forks into namespaces of its own. So the calls that make them are allowed, and its last argument
            is the system call filter, which it sets later.
        reads: paths of this host that the program may read, beside its interpreter.
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
    """Counters of what all processes of a sandbox use together, as far as something counts it."""

    def set_limits(self, memory_bytes: int, processes: int) -> None:
        """Set the limits."""
        ...

    def events(self) -> CgroupEvents:
        """Return the kernel's interventions to keep the limits."""
        ...

    def cpu_seconds(self) -> float | None:
        """Return processor time so far; None where nothing counts it."""
        ...


class RunningSandbox(Protocol):
    """A started sandbox."""

    @property
    def cgroup(self) -> Counts:
        """The counters of the sandbox."""
        ...

    @property
    def end_fd(self) -> int:
        """A descriptor, a pidfd for one, that becomes readable when the program inside has ended."""
        ...

    def members(self) -> set[int]:
        """Return the processes inside, by this host's numbers."""
        ...

    def stop(self) -> None:
        """Stop all processes started inside, in one step that a fork cannot outrun (see `freeze`).

        Raises:
            OSError: the process that carries out the order is gone.
        """
        ...

    def go_on(self) -> None:
        """Let the processes go on, at once or soon. Raises as `stop`."""
        ...

    def close(self) -> int:
        """Kill what runs, waits until nothing is left; the exit code, negative for a signal. Calling it twice is no error."""
        ...


@dataclass(frozen=True)
class Launch:
    """One kind of sandbox.

    Args:
        kind: the kind's name in results.
        start: starts a sandbox, or raises InfraError.
        nests: whether a zygote inside can make namespaces of its own.
    """

    kind: str
    start: Callable[[Limits, Inside], RunningSandbox]
    nests: bool = False
