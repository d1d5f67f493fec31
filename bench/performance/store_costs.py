"""What one operation of the store costs: processor time of Postgres and of the caller, one caller at a time.

The operations are those of workers, in their order: groups are claimed, turns committed, calls answered and episodes ended.
Then the iteration is claimed for training, and its update is published.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from agentrl.workflow.control.scheduler import plan
from agentrl.workflow.store import control_reads, planning, rollout_claims, steps, tool_calls, train_claims, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.rollout_claims import GroupWork, Outcome
from agentrl.workflow.store.train_claims import IterationWork
from agentrl.workflow.trajectory import StepRecord
from bench.performance.databases import server_processor
from bench.performance.scripted_plugins import CALLS, TURN_TOKENS
from bench.performance.writes import CALL, RESULT, STEP, TEXT
from tests.support.played_runs import update_of

LEASE_SECONDS = 3600.0
PASSES = 20
COLUMNS = ("operation", "times", "Postgres ms", "caller ms", "ms in all")
TURN = replace(STEP, sampled_ids=STEP.sampled_ids[:TURN_TOKENS], behavior_logprobs=STEP.behavior_logprobs[:TURN_TOKENS])

Together = Sequence[tuple[GroupWork, Sequence[int]]]
"""Groups, each with some of its episodes: a commit takes one of these."""


@dataclass
class Costs:
    """The measured operations, as rows of a table."""

    database: Database
    rows: list[list[object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._server = server_processor(self.database)

    @contextmanager
    def measured(self, operation: str, times: int) -> Iterator[None]:
        """Add a row: the block does the operation so many times."""
        began, server, own = time.perf_counter(), self._server(), time.thread_time()
        yield
        taken = (self._server() - server, time.thread_time() - own, time.perf_counter() - began)
        self.rows.append([operation, times, *(1000 * seconds / times for seconds in taken)])


def measure_operations(database: Database, run: int) -> Costs:
    """Measure the operations with the first iteration of a run that no worker serves; its next iteration stays open."""
    costs = Costs(database)
    measure_control(costs, "a control pass before the run is sent")
    (iteration,) = planning.open_iterations(database, run)
    with costs.measured("an iteration is started", 1):
        groups = planning.start_iteration(database, iteration)
        planning.mark_groups_sent(database, groups)
    with costs.measured("a group is claimed", len(groups)):
        works = [rollout_claims.claim_group(database, group, f"host:1/{group}", LEASE_SECONDS) for group in groups]
    held = [work for work in works if work is not None]
    assert len(held) == len(groups)
    with costs.measured("the leases of 16 groups are renewed", len(held)):
        for _ in held:
            rollout_claims.extend_leases(database, [work.fence for work in held[:16]], LEASE_SECONDS)
    together: Together = [(work, [episode.id for episode in work.episodes]) for work in held]
    alone: Together = [(work, [episode]) for work, episodes in together for episode in episodes]
    for number in range(CALLS):
        _step(costs, number, *((together, "of eight together") if number == 0 else (alone, "alone")))
    with costs.measured("a last turn is committed, of eight together", len(alone)):
        _sample(database, CALLS, together, calls=False)
    half = len(together) // 2
    later = [(work, [episode]) for work, episodes in together[half:] for episode in episodes]
    with costs.measured("an episode ends, of eight together", len(alone) - len(later)):
        _finish(database, together[:half])
    with costs.measured("an episode ends, alone", len(later)):
        _finish(database, later)
    _train(costs, iteration, len(alone))
    measure_control(costs, "a control pass")
    return costs


def measure_control(costs: Costs, name: str) -> None:
    """Add a row: the reads and the decision of the control loop, without the sending."""
    with costs.measured(name, PASSES):
        for _ in range(PASSES):
            plan(control_reads.snapshot(costs.database, 30.0))


def _step(costs: Costs, number: int, batches: Together, how: str) -> None:
    episodes = sum(len(some) for _, some in batches)
    with costs.measured(f"a turn with a call is committed, {how}", episodes):
        calls = _sample(costs.database, number, batches, calls=True)
    with costs.measured("a call is found, and its result recorded", len(calls)):
        for call in calls:
            assert tool_calls.find_call(costs.database, call) is not None
            tool_calls.record_result(costs.database, call, RESULT, datetime.now(UTC), "host:2")
    with costs.measured(f"a result is read and committed, {how}", episodes):
        position = 0
        for work, some in batches:
            steps.load_results(costs.database, calls[position : position + len(some)])
            position += len(some)
            observed = [(episode, replace(TURN, index=number, results=(RESULT,))) for episode in some]
            steps.commit_observed(costs.database, work.fence, observed)


def _sample(database: Database, number: int, batches: Together, calls: bool) -> list[int]:
    turn, made = replace(TURN, index=number), (CALL,) if calls else ()
    return [
        call
        for work, some in batches
        for ids in steps.commit_sampled(
            database, work.fence, [StepRecord(episode, turn, work.policy_id, TEXT, made) for episode in some]
        )
        for call in ids
    ]


def _finish(database: Database, batches: Together) -> None:
    for work, some in batches:
        rewards = {episode: float(episode % 2) for episode in some}
        ends = [
            Outcome(episode, "done", "answered", rewards[episode], {"numeric_answer": rewards[episode]}) for episode in some
        ]
        rollout_claims.finish_episodes(database, work.fence, ends, work.reward_set, work.weights)


def _train(costs: Costs, iteration: int, episodes: int) -> None:
    with costs.measured(f"an iteration of {episodes} episodes is claimed", 1):
        work = train_claims.claim_iteration(costs.database, iteration, "host:3/1", LEASE_SECONDS)
    assert isinstance(work, IterationWork)
    with costs.measured("its episodes are read", 1):
        work = train_claims.load_work(costs.database, work)
    with costs.measured(f"an update of {episodes} episodes is published, and {episodes} more are planned", 1):
        train_commits.commit_update(costs.database, work, update_of(work), 3)
