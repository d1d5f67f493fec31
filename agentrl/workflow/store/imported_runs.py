"""Runs of the kind `import`: episodes that were sampled elsewhere, written completely in one transaction.

The episodes of a task form one group, so they share a baseline. The run is done as soon as it is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sqlalchemy import Connection, func, select, update

from agentrl.workflow.annotations import Annotation
from agentrl.workflow.errors import ConflictError
from agentrl.workflow.runtime.shown_text import format_count
from agentrl.workflow.store.connect import transaction
from agentrl.workflow.store.episode_annotations import insert_annotations
from agentrl.workflow.store.planning import Submission, insert_submission, log
from agentrl.workflow.store.rollout_claims import Fence, Outcome, end_episodes
from agentrl.workflow.store.steps import insert_calls
from agentrl.workflow.tables import schema
from agentrl.workflow.trajectory import StepRecord, StopReason, Task

EXACT = "exact_tokens"
"""The key in a run's manifest that says whether the stored token ids and logprobs are exactly those of the sampler."""
ATTEMPT = 0
_RUNS, _ITERATIONS, _GROUPS, _EPISODES = schema.runs.c, schema.iterations.c, schema.groups.c, schema.episodes.c


@dataclass(frozen=True)
class ImportedEpisode:
    """An episode to be imported. `key` is its id in the other system. `reward` is the weighted sum of its `rewards`."""

    key: str
    task: Task
    steps: Sequence[StepRecord]
    rewards: Mapping[str, float]
    reward: float
    stop_reason: StopReason
    answer: str = ""
    error: str = ""
    annotations: Sequence[Annotation] = ()
    started_at: datetime | None = None
    finished_at: datetime | None = None


@transaction
def write_import(tx: Connection, submission: Submission, episodes: Sequence[ImportedEpisode]) -> str:
    """Write the run with all of its episodes; return its name. Raise ConflictError if a run of that name exists."""
    run = insert_submission(tx, submission)
    if not run.created:
        raise ConflictError(f"A run called {run.name!r} exists.", "Choose another --name, or leave it out.")
    by_task: dict[str, list[ImportedEpisode]] = {}
    for episode in episodes:
        by_task.setdefault(episode.task.content_hash, []).append(episode)
    iteration = tx.execute(select(_ITERATIONS.id, _ITERATIONS.policy_id).where(_ITERATIONS.run_id == run.id)).one()
    sets = schema.reward_sets.c
    reward_set = int(tx.execute(select(sets.id).where(sets.run_id == run.id)).scalar_one())
    for slot, siblings in enumerate(by_task.values()):
        task = select(schema.tasks.c.id).where(schema.tasks.c.content_hash == siblings[0].task.content_hash)
        of_run = {"run_id": run.id, "iteration_id": iteration.id, "task_id": tx.execute(task).scalar_one()}
        values = {**of_run, "slot": slot, "kind": "import", "status": "running", "attempt": ATTEMPT}
        fence = Fence(tx.execute(schema.groups.insert().values(values).returning(_GROUPS.id)).scalar_one(), ATTEMPT)
        numbers = _write_group(tx, fence, of_run, siblings, run.name, iteration.policy_id)
        ended = [_outcome(number, sibling) for number, sibling in zip(numbers, siblings, strict=True)]
        end_episodes(tx, fence, ended, reward_set, submission.weights)
        for number, sibling in zip(numbers, siblings, strict=True):
            _set_times(tx, number, sibling)
    _end(tx, run.id, iteration.id, len(episodes))
    return run.name


def _write_group(
    tx: Connection, fence: Fence, of_run: Mapping[str, int], siblings: Sequence[ImportedEpisode], run: str, policy: int
) -> list[int]:
    numbers: list[int] = []
    for sample, _ in enumerate(siblings):
        values = {**of_run, "group_id": fence.group, "sample": sample, "attempt": ATTEMPT}
        numbers.append(tx.execute(schema.episodes.insert().values(values).returning(_EPISODES.id)).scalar_one())
    records = [
        _record(number, sibling, step, policy)
        for number, sibling in zip(numbers, siblings, strict=True)
        for step in sibling.steps
    ]
    insert_calls(tx, fence, records)
    for number, sibling in zip(numbers, siblings, strict=True):
        if sibling.annotations:
            insert_annotations(tx, number, ATTEMPT, None, run, sibling.annotations)
    return numbers


def _record(number: int, episode: ImportedEpisode, record: StepRecord, policy: int) -> StepRecord:
    request = record.request
    if request is not None and record.step.index == 0:
        request = replace(request, asked={"trace": episode.key})
    return replace(record, episode=number, policy_id=policy, request=request)


def _outcome(number: int, episode: ImportedEpisode) -> Outcome:
    return Outcome(
        number,
        "done",
        episode.stop_reason,
        episode.reward,
        dict(episode.rewards),
        episode.answer,
        "agent_error" if episode.error else "",
        episode.error,
        of_agent=True,
    )


def _set_times(tx: Connection, number: int, episode: ImportedEpisode) -> None:
    if episode.started_at and episode.finished_at:
        times = {"started_at": episode.started_at, "finished_at": episode.finished_at}
        tx.execute(update(schema.episodes).where(_EPISODES.id == number).values(times))


def _end(tx: Connection, run: int, iteration: int, episodes: int) -> None:
    now = datetime.now(UTC)
    summed = ("prompt_tokens", "sampled_tokens", "tool_calls", "tool_errors")
    mine = select(func.avg(_EPISODES.reward).label("mean_reward"), *(func.sum(_EPISODES[name]).label(name) for name in summed))
    sums = dict(tx.execute(mine.where(_EPISODES.iteration_id == iteration)).mappings().one())
    over = {"status": "done", "episodes": episodes, "trainable": episodes, "started_at": now, "rolled_out_at": now}
    tx.execute(update(schema.iterations).where(_ITERATIONS.id == iteration).values(**over, finished_at=now, **sums))
    tx.execute(update(schema.runs).where(_RUNS.id == run).values(status="done", started_at=now, finished_at=now))
    log(tx, run, "done", detail=f"{format_count(episodes, 'episode')} imported")
