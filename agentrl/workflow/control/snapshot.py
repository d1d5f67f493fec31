"""The input of the control loop: the unfinished work of all runs as plain values, read by `store.control_reads`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """How a job stands with its row.

    Args:
        held: a live worker holds the row's lease.
        expired_ago: seconds since the lease ran out or was handed back; None if the row is held, never was, or nobody knows.
        sent_ago: seconds since its message was last sent; None if never, negative if the clock was set back since.
        sends: how often it was sent.
    """

    held: bool
    expired_ago: float | None
    sent_ago: float | None
    sends: int


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group that is not terminal."""

    id: int
    claim: Claim


@dataclass(frozen=True, slots=True)
class IterationState:
    """An iteration that is not done. `groups` holds only those that are not terminal.

    `published`: the policy is there that its update starts from; one that was rolled out ahead of the updates waits for it.
    """

    id: int
    number: int
    groups: tuple[GroupState, ...]
    train: Claim
    published: bool = True

    @property
    def is_rolled_out(self) -> bool:
        """Every slot is terminal."""
        return not self.groups

    @property
    def is_ready(self) -> bool:
        """Its update may run."""
        return self.is_rolled_out and self.published

    @property
    def is_dispatched(self) -> bool:
        """Its chord was sent at least once."""
        return bool(self.train.sends) or any(group.claim.sends for group in self.groups)


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A running run: its open iterations, in order, and the median seconds that one of its groups takes.

    `broken`: a checkpoint of it is to be made again before anything samples with it or trains on it.
    """

    id: int
    name: str
    iterations: tuple[IterationState, ...]
    group_seconds: float
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All running runs, and the lease that a claim lives for (seconds)."""

    runs: tuple[RunSnapshot, ...]
    lease_seconds: float
