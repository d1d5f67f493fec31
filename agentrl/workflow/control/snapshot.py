"""The input of the control loop: the unfinished work of all runs as plain values. `store.control_reads` reads these values from
the database.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """The state of a job's lease and of its message.

    Args:
        held: True if a live worker holds the job's lease.
        expired_ago: the time since the lease expired or was returned, in seconds; None if the lease is held, if it was never
            held, or if the time is unknown.
        sent_ago: the time since the job's message was last sent, in seconds; None if it was never sent, negative if the clock
            was set back.
        sends: the number of times that the job's message was sent.
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

    @property
    def was_sent(self) -> bool:
        """True if the group's job was sent at least once. If a worker holds or held the group, it was sent, although the mark
        may be missing: the worker may have locked the row at that moment (`planning.mark_groups_sent`).
        """
        return bool(self.claim.sends) or self.claim.held or self.claim.expired_ago is not None


@dataclass(frozen=True, slots=True)
class IterationState:
    """An iteration that is not done. `groups` has only the groups that have not ended.

    `published` is True if the policy from which the iteration's update starts exists. If an iteration was rolled out ahead, its
    update waits for that policy.
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
        """True if the iteration's update may run."""
        return self.is_rolled_out and self.published

    @property
    def is_dispatched(self) -> bool:
        """True if the iteration's chord was sent at least once."""
        return bool(self.train.sends) or any(group.was_sent for group in self.groups)


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A running run: its open iterations, in order, and the median time that one of its groups takes, in seconds.

    `broken` is True if a checkpoint of the run must be rebuilt before the run continues.
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
