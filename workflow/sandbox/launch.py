"""What every kind of sandbox on this host does in its own way: start an interpreter inside and hold it.

Programs, sessions and the watch over them are the same whatever confines them; they know a `Launch`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agentrl.workflow.sandbox import Limits
from agentrl.workflow.sandbox.cgroups import Events


@dataclass(frozen=True)
class Inside:
    """What is to run inside.

    Args:
        scripts: files of this package without their suffix; the `main` of the last one is called.
        files: its first arguments: descriptors, which keep their numbers.
        numbers: its further arguments.
        stdin, output: its standard streams.
        session: it lasts, and stands still between requests; where nobody else can stop all that it starts in one step, it is
            given the socket of who orders that as a last argument, and is the first process of its namespace.
        zygote: it forks into namespaces of its own. So these, and the calls that make them, are left to it, and it is given the
            system call filter as a last argument.
        reads: paths of this host that it may read, beside its interpreter.
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
    """What all processes of a sandbox use together, as far as somebody counts it."""

    def set_limits(self, memory_bytes: int, processes: int) -> None:
        """Sets the limits."""
        ...

    def events(self) -> Events:
        """What was done to keep them."""
        ...

    def cpu_seconds(self) -> float | None:
        """Processor time so far; None where nobody counts."""
        ...


class RunningSandbox(Protocol):
    """A started sandbox. `end_fd` is a descriptor that can be read when what was to run has ended."""

    @property
    def cgroup(self) -> Counts:
        """Its use of the machine."""
        ...

    @property
    def end_fd(self) -> int:
        """A pidfd, or the like."""
        ...

    def members(self) -> set[int]:
        """The processes inside, by this host's numbers."""
        ...

    def stop(self) -> None:
        """Stops all that was started inside, in one step that a fork cannot outrun (see `freeze`).

        Raises:
            OSError: nobody is there any more who could.
        """
        ...

    def go_on(self) -> None:
        """Lets them go on, at once or soon. Raises as `stop`."""
        ...

    def close(self) -> int:
        """Kills what still runs and waits until nothing is left; the exit code, negative for a signal. Twice is no error."""
        ...


@dataclass(frozen=True)
class Launch:
    """One kind of sandbox.

    Args:
        kind: its name in results.
        start: starts one, or raises InfraError.
        nests: whether a zygote inside can make namespaces of its own.
    """

    kind: str
    start: Callable[[Limits, Inside], RunningSandbox]
    nests: bool = False
