"""The interface that each kind of sandbox on this host implements: it starts an interpreter inside the sandbox and controls it.

Programs, sessions and their limits are the same for all kinds, because they use only a `Launch`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agentrl.workflow.sandbox import Limits
from agentrl.workflow.sandbox.cgroups import CgroupEvents


@dataclass(frozen=True)
class Inside:
    """A request to start an interpreter inside a sandbox.

    Args:
        scripts: the names of the files of this package to run, without suffix. The `main` of the last one is called.
        files: file descriptors that the program inherits, with the same numbers. They are the first arguments of `main`.
        numbers: integers; they are the next arguments of `main`.
        stdin, output: the descriptors of the standard streams.
        session: True if the program is long-lived and is stopped between requests. If no process outside can stop all of its
            processes in one step, the program becomes the first process of its namespace, and stops the others. In that case
            the last argument of `main` is the socket from which it reads when to stop and continue them.
        zygote: True if the program is a zygote, which forks a process in new namespaces for each program. The system call
            filter then allows this. The last argument of `main` is the filter that the program installs later.
        reads: paths of this host that the program may read, in addition to its interpreter.
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
    """Counters of the resources that all processes of a sandbox use together. A kind of sandbox may be unable to count some
    resources.
    """

    def set_limits(self, memory_bytes: int, processes: int) -> None:
        """Set the limits on memory, in bytes, and on the number of processes."""
        ...

    def events(self) -> CgroupEvents:
        """Return the number of kernel interventions so far."""
        ...

    def cpu_seconds(self) -> float | None:
        """Return the processor time so far, in seconds; None if it is not known."""
        ...


class RunningSandbox(Protocol):
    """A started sandbox."""

    @property
    def cgroup(self) -> Counts:
        """The counters of the sandbox."""
        ...

    @property
    def end_fd(self) -> int:
        """A descriptor (such as a pidfd) that becomes readable when the program inside has ended."""
        ...

    def members(self) -> set[int]:
        """Return the ids of the processes inside, as this host numbers them."""
        ...

    def stop(self) -> None:
        """Stop all processes inside in one step that no fork escapes (`freeze`). Raise OSError if that is impossible."""
        ...

    def go_on(self) -> None:
        """Continue the stopped processes. They may continue only shortly after this method has returned. Raise OSError if that
        is impossible.
        """
        ...

    def close(self) -> int:
        """Kill all processes inside and wait for them; return the program's exit code, negative for a signal."""
        ...


@dataclass(frozen=True)
class Launch:
    """A launcher of one kind of sandbox.

    Args:
        kind: the name of the kind of sandbox, as in `CodeResult.kind`.
        start: starts a sandbox; raises InfraError if the start fails.
        nests: True if a warm interpreter inside the sandbox (a zygote) can create namespaces for its programs.
    """

    kind: str
    start: Callable[[Limits, Inside], RunningSandbox]
    nests: bool = False
