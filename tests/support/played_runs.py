"""Small runs in a real database, played by hand: no model, no queue, every query of the store."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any
from uuid import uuid4

from sqlalchemy import text

from agentrl.workflow.config import build
from agentrl.workflow.store import planning, rollout_claims, steps, train_claims
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.planning import Submission
from agentrl.workflow.store.rollout_claims import GroupWork, Outcome
from agentrl.workflow.store.train_claims import IterationWork
from agentrl.workflow.store.train_commits import UpdateRecord
from agentrl.workflow.trajectory import CallRecord, Message, PolicyRef, Step, StepRecord, Task, ToolCall, ToolResult

LEASE = 60.0
_workers = count(1)
EXPIRED = -1.0
"""A lease that has run out when it is taken: its worker is as good as lost."""

CALL = CallRecord(ToolCall("calculator", {"expression": "6*7"}), "none", None)


def task(number: int) -> Task:
    """One question."""
    return Task(f"train/{number}", (Message("user", f"What is 6*{number}?"),), str(6 * number))


def submission(
    name: str = "first",
    tasks: int = 2,
    epochs: int = 1,
    seed: int = 0,
    kind: str = "train",
    tasks_per_iteration: int = 2,
    max_staleness: int = 0,
    dynamic_sampling: int = 1,
) -> Submission:
    """A run with groups of 2 episodes."""
    rollouts = {"rollout.group_size": 2, "rollout.tasks_per_iteration": tasks_per_iteration}
    rollouts |= {"rollout.max_staleness": max_staleness, "rollout.dynamic_sampling": dynamic_sampling}
    config = build({"name": name, "epochs": epochs, "seed": seed, "env": "math", **rollouts})
    return Submission(
        name=name,
        kind=kind,
        config=config.model_dump(mode="json"),
        manifest={"agentrl": "0", "id": uuid4().hex},
        policy=PolicyRef("tiny", "hash"),
        tasks=[task(number) for number in range(tasks)],
        dataset="arithmetic",
        seed=config.seed,
        epochs=config.epochs,
        tasks_per_iteration=config.rollout.tasks_per_iteration,
        group_size=config.rollout.group_size,
        weights={"numeric_answer": 1.0, "format": 0.5},
        code_hash="code",
        output_dir="out",
    )


def start(db: Database, wanted: Submission) -> list[int]:
    """Submits the run and sends its first iteration; returns its groups."""
    made = planning.submit(db, wanted)
    groups = planning.start_iteration(db, planning.open_iterations(db, made.id)[0])
    planning.mark_groups_sent(db, groups)
    return groups


def claim(db: Database, group: int, worker: str = "", lease: float = LEASE) -> GroupWork:
    """The claim of a group that is free, by a worker of its own unless one is named."""
    work = rollout_claims.claim_group(db, group, worker or f"claim:{next(_workers)}", lease)
    assert work is not None
    return work


def step(index: int = 0, calls: tuple[CallRecord, ...] = (), text: str = "42") -> Step:
    """A turn that sampled two tokens."""
    message = Message("assistant", text, "thinking", tuple(item.call for item in calls))
    prompt = (Message("user", f"turn {index}"),)
    return Step(
        index, prompt, (1, 2, 2**31 - 1), (3, 4), (-0.125, -(2.0**-22)), "stop", message, policy_version=0, seconds=0.25
    )


def sampled(work: GroupWork, position: int = 0, index: int = 0, calls: tuple[CallRecord, ...] = ()) -> StepRecord:
    """T1 of one step of the work's episode at that position."""
    episode = work.episodes[position].id
    assert episode is not None
    return StepRecord(episode, step(index, calls), work.policy_id, "42", calls)


def answered(content: str = "42", error_class: str | None = None) -> ToolResult:
    """What a tool said."""
    return ToolResult(content, error_class, 0.5)


@dataclass(frozen=True)
class CompletedWork:
    """What the end of an episode completed: whether it was the last of its group, and the iteration that may now be trained."""

    group: bool
    iteration: int | None


def end(db: Database, work: GroupWork, outcome: Outcome) -> CompletedWork:
    """Ends an episode."""
    group = rollout_claims.finish_episodes(db, work.fence, [outcome], work.reward_set, work.weights)
    return CompletedWork(group, rollout_claims.find_ready_iteration(db, work.fence.group) if group else None)


def finish(
    db: Database, work: GroupWork, position: int, reward: float = 1.0, parts: Mapping[str, float] | None = None
) -> CompletedWork:
    """Ends the episode at that position as answered."""
    episode = work.episodes[position].id
    assert episode is not None
    return end(db, work, Outcome(episode, "done", "answered", reward, parts or {"numeric_answer": reward}, "42"))


def fail(db: Database, work: GroupWork, position: int) -> CompletedWork:
    """Ends the episode at that position as failed."""
    episode = work.episodes[position].id
    assert episode is not None
    return end(db, work, Outcome(episode, "failed", error_class="RewardError", error="the reward raised"))


def play(db: Database, group: int, reward: float = 1.0) -> CompletedWork:
    """Claims a group, gives each of its episodes one step, and ends them."""
    work = claim(db, group)
    steps.commit_sampled(db, work.fence, [sampled(work, position) for position in range(len(work.episodes))])
    ends = [finish(db, work, position, reward * (position % 2)) for position in range(len(work.episodes))]
    return ends[-1]


def ready(db: Database, wanted: Submission) -> IterationWork:
    """A run whose first iteration is rolled out and claimed for training."""
    for group in start(db, wanted):
        ended = play(db, group)
    assert ended.iteration is not None
    return claim_training(db, ended.iteration)


def claim_training(db: Database, iteration: int, lease: float = LEASE) -> IterationWork:
    """The claim of an iteration that is free."""
    work = train_claims.claim_iteration(db, iteration, f"trainer:{next(_workers)}", lease)
    assert isinstance(work, IterationWork)
    return train_claims.load_work(db, work)


def update_of(work: IterationWork, **fields: Any) -> UpdateRecord:
    """An update that consumed every episode of the iteration."""
    episodes = [episode.id for group in work.groups for episode in group.episodes if episode.id is not None]
    metrics = [{"loss": 0.5, "kl": 0.01, "rows": 4, "tokens": 8, "unknown": 1.0}]
    known = {"metrics": metrics, "advantages": dict.fromkeys(episodes, 0.5), "path": "out/v1", "sha256": "abc"}
    return UpdateRecord(**{**known, **fields})


def bad_update() -> UpdateRecord:
    """An update that met a NaN and took no step."""
    return UpdateRecord((), {}, skipped="the loss is nan", bad=True)


def values(database: Database, query: str, **parameters: Any) -> list[Any]:
    """The first column."""
    with database.read() as tx:
        return list(tx.execute(text(query), parameters).scalars())


def value(database: Database, query: str, **parameters: Any) -> Any:
    """The one value."""
    (found,) = values(database, query, **parameters)
    return found


def status_of_run(database: Database) -> str:
    """Of the only run."""
    return str(value(database, "SELECT status FROM runs"))


@contextmanager
def altered(database: Database, table: str, column: str, condition: str, to: Any) -> Iterator[None]:
    """One value of one row is another for a while."""
    before = value(database, f"SELECT {column} FROM {table} WHERE {condition}")
    change = text(f"UPDATE {table} SET {column} = :to WHERE {condition}")
    with database.engine.begin() as tx:
        assert tx.execute(change, {"to": to}).rowcount == 1
    try:
        yield
    finally:
        with database.engine.begin() as tx:
            tx.execute(change, {"to": before})
