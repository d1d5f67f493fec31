"""`plan(snapshot)` decides from the database rows which messages to send. It is a pure function. It is also used when a run is
resumed.

The database holds the state, and a message only wakes a worker. So any process may compute a plan at any time, even twice: if a
message is sent twice, the second worker finds that the group or iteration is already claimed or done. A chord is sent once per
iteration. If some of its work is still not done long after the chord was sent, that work is sent again outside of a chord.
"""

from dataclasses import dataclass

from agentrl.workflow.control.snapshot import Claim, IterationState, RunSnapshot, Snapshot

MAX_HEADER = 128
"""The most jobs in a chord's header. If an iteration has more groups, each job has several."""

MAX_DOUBLINGS = 6
"""The most doublings of the wait before a message is sent again. The wait doubles each time that the message is sent."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The action to send the iteration as a chord: one rollout job per group (or per few groups), then the train job."""

    iteration: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendRollouts:
    """The action to send the rollout jobs of these groups again, outside of a chord."""

    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendTrain:
    """The action to send the iteration's train job."""

    iteration: int


Action = Dispatch | SendRollouts | SendTrain


def plan(snapshot: Snapshot) -> list[Action]:
    """Return the messages that must be sent; empty if all work that can progress is in progress."""
    return [action for run in snapshot.runs for action in _plan_run(run, snapshot.lease_seconds)]


def _plan_run(run: RunSnapshot, lease: float) -> list[Action]:
    if run.broken:  # the train job of the first iteration makes the checkpoint again; until then nothing else moves
        return [SendTrain(first.id) for first in run.iterations[:1] if _is_missing(first.train, lease)]
    return [action for iteration in run.iterations for action in _plan_iteration(iteration, lease, run.group_seconds)]


def _plan_iteration(iteration: IterationState, lease: float, group_seconds: float) -> list[Action]:
    if not iteration.is_dispatched and not iteration.is_rolled_out:
        return [Dispatch(iteration.id, tuple(group.id for group in iteration.groups))]
    if iteration.is_ready:
        return [SendTrain(iteration.id)] if _is_missing(iteration.train, lease) else []
    lost = tuple(group.id for group in iteration.groups if _is_missing(group.claim, max(lease, group_seconds)))
    return [SendRollouts(lost)] if lost else []


def _is_missing(claim: Claim, patience: float) -> bool:
    if claim.held:
        return False
    if claim.sent_ago is None or claim.sent_ago < 0:
        return True  # never sent, or the clock was set back since: then nobody knows how long ago
    if claim.expired_ago is not None and claim.expired_ago < claim.sent_ago:
        return True  # its worker was lost, or handed it back, after the last message
    # The message may still wait in a queue behind others: wait longer after each sending.
    doublings = min(max(0, claim.sends - 1), MAX_DOUBLINGS)
    return claim.sent_ago > 2 * patience * (1 << doublings)


def split_into_headers(groups: tuple[int, ...]) -> list[list[int]]:
    """Divide the groups into at most MAX_HEADER jobs."""
    per_job = -(-len(groups) // MAX_HEADER)
    return [list(groups[start : start + per_job]) for start in range(0, len(groups), per_job)] if groups else []
