"""The input of the control loop: the unfinished work of all runs as plain values, which `store.control_reads` reads."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """The state of a job's message and lease.

    Args:
        held: a live worker holds the row's lease.
        expired_ago: the seconds since the lease expired or was returned; None if the row is held, was never held, or this is
            unknown.
        sent_ago: the seconds since its message was last sent; None if it never was, negative if the clock was set back since.
        sends: how often its message was sent.
    """

    held: bool
    expired_ago: float | None
    sent_ago: float | None
    sends: int


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group that has not ended."""

    id: int
    claim: Claim


@dataclass(frozen=True, slots=True)
class IterationState:
    """An iteration that is not done. `groups` has only the groups that have not ended.

    `published`: the policy from which its update starts exists. The update of an iteration that was rolled out ahead waits for
    that policy.
    """

    id: int
    number: int
    groups: tuple[GroupState, ...]
    train: Claim
    published: bool = True

    @property
    def is_rolled_out(self) -> bool:
        """True if all groups have ended."""
        return not self.groups

    @property
    def is_ready(self) -> bool:
        """True if its update may run."""
        return self.is_rolled_out and self.published

    @property
    def is_dispatched(self) -> bool:
        """True if its chord was sent at least once."""
        return bool(self.train.sends) or any(group.claim.sends for group in self.groups)


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A running run: its open iterations, in order, and the median time of one of its groups, in seconds.

    `broken`: one of its checkpoints must be rebuilt before the run continues sampling and training.
    """

    id: int
    name: str
    iterations: tuple[IterationState, ...]
    group_seconds: float
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All running runs, and the duration of a lease in seconds."""

    runs: tuple[RunSnapshot, ...]
    lease_seconds: float
