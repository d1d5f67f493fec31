"""Runs of the kind `serve`: one process serves a policy, and adds an episode for each of its clients.

The process holds the lease of the run's only iteration. Every episode is a separate group. Like any episode of an agent, it has
a row in `agent_attempts`; here the client is the agent. An episode ends when its client requests the end, when no request came
for some time, or when the process ends.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Select, delete, select, update

from agentrl.workflow.errors import ConflictError, Fenced
from agentrl.workflow.store.agent_attempts import lose_agents
from agentrl.workflow.store.connect import Database, insert, read_transaction, transaction
from agentrl.workflow.store.episode_loader import load_episodes, task_value
from agentrl.workflow.store.planning import Submission, insert_submission, log
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import is_lease_free, now_ms
from agentrl.workflow.trajectory import OPEN, ROOT, Episode, Message, Task, storable

_RUNS, _ITERATIONS, _GROUPS, _EPISODES = schema.runs.c, schema.iterations.c, schema.groups.c, schema.episodes.c
KEEP_DAYS = "keep_days"
"""The key in a run's manifest for the number of days for which its episodes are kept."""
MAX_DAYS = 36_500
"""The maximum number of days for KEEP_DAYS. A larger value is treated as this value, because no valid date is further in the
past.
"""
FORGOTTEN_AT_ONCE = 200
"""The maximum number of episodes that one transaction deletes."""
PROMPTS_AT_ONCE = 100
"""The maximum number of episodes that `load_prompts` loads in one transaction."""
_USED = schema.consumptions.c
_FORKS = schema.episodes.alias("forks")


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A run that this process serves: its iteration, claimed by `worker` with the fence `token`. `created` is when the run was
    created, in Unix seconds.
    """

    id: int
    name: str
    iteration: int
    token: int
    worker: str
    created: int


@dataclass(frozen=True, slots=True)
class ServedEpisode:
    """An episode of a client: its id, the id of its `group`, and the id of its `agent` row."""

    id: int
    group: int
    agent: int


@transaction
def open_run(tx: Connection, submission: Submission, worker: str, lease_seconds: float) -> ServedRun:
    """Insert the run and claim its iteration for this process. Raise ConflictError if a run of that name exists. Raise
    CheckpointError if the run's weights have just been removed.
    """
    submitted = insert_submission(tx, submission)
    if not submitted.created:
        raise ConflictError(f"A run called {submitted.name!r} exists.", "Choose another --name, or leave it out.")
    now = datetime.now(UTC)
    values = {"status": "running", "worker": worker, "started_at": now, "lease_until": now_ms() + int(lease_seconds * 1000)}
    claim = update(schema.iterations).where(_ITERATIONS.run_id == submitted.id)
    row = tx.execute(claim.values(train_token=1, **values).returning(_ITERATIONS.id)).one()
    start = update(schema.runs).where(_RUNS.id == submitted.id).values(started_at=now)
    created = tx.execute(start.returning(_RUNS.created_at)).scalar_one()
    return ServedRun(submitted.id, submitted.name, row.id, 1, worker, int(created.timestamp()))


@transaction
def open_episode(tx: Connection, run: ServedRun, client: str, key_hash: str, lease_seconds: float) -> ServedEpisode:
    """Add an episode for a client. Raise Fenced if this process no longer serves the run.

    Args:
        client: the client's name for the episode; it becomes the key of the task.
        key_hash: the sha256 of the key with which the client's requests are forwarded.
        lease_seconds: the length of the lease in `agent_attempts`, in seconds.
    """
    _check_served(tx, run)
    agents = schema.agent_attempts.c
    there = select(_EPISODES.id, _EPISODES.group_id, agents.id.label("agent")).join(
        schema.agent_attempts, agents.episode_id == _EPISODES.id
    )
    row = tx.execute(there.where(agents.key_hash == key_hash)).one_or_none()
    if row is not None:  # the answer of this very commit was lost
        return ServedEpisode(row.id, row.group_id, row.agent)
    task = _find_task(tx, Task(storable(client), (), ""))
    # Counted, for other draws in each: those before it may be forgotten already.
    counted = update(schema.iterations).where(_ITERATIONS.id == run.iteration).values(episodes=_ITERATIONS.episodes + 1)
    number = int(tx.execute(counted.returning(_ITERATIONS.episodes)).scalar_one()) - 1
    of_run = {"run_id": run.id, "iteration_id": run.iteration, "task_id": task}
    statement = schema.groups.insert().values(**of_run, slot=number, kind="serve").returning(_GROUPS.id)
    group = int(tx.execute(statement).scalar_one())
    opened = schema.episodes.insert().values(**of_run, group_id=group, sample=number).returning(_EPISODES.id)
    episode = int(tx.execute(opened).scalar_one())
    values = {"status": "running", "key_hash": key_hash, "worker": run.worker, "started_at": datetime.now(UTC)}
    values |= {"episode_id": episode, "attempt": 0, "run": run.name, "lease_until": now_ms() + int(lease_seconds * 1000)}
    agent = int(tx.execute(schema.agent_attempts.insert().values(**values).returning(agents.id)).scalar_one())
    return ServedEpisode(episode, group, agent)


def load_prompts(db: Database, run_id: int) -> Iterator[tuple[int, int, tuple[Message, ...]]]:
    """Yield each conversation that a client of the run began: the ids of the episode and of the step, and all messages of that
    step's prompt. The episodes are loaded in portions.
    """
    after = 0
    while episodes := _load_some(db, run_id, after):
        for episode in episodes:
            for step in episode.steps:
                if step.parent == ROOT or step.shared is not None:
                    yield episode.id, step.index, step.prompt
        after = episodes[-1].id


@read_transaction
def _load_some(tx: Connection, run_id: int, after: int) -> list[Episode]:
    mine = select(_EPISODES.id, _EPISODES.task_id).where(_EPISODES.run_id == run_id, _EPISODES.id > after)
    rows = tx.execute(mine.order_by(_EPISODES.id).limit(PROMPTS_AT_ONCE)).all()
    tasks = select(schema.tasks).where(schema.tasks.c.id.in_({row.task_id for row in rows}))
    by_id = {row["id"]: task_value(row) for row in tx.execute(tasks).mappings()}
    some = _EPISODES.id.in_([row.id for row in rows])
    episodes = load_episodes(tx, some, by_id, with_tokens=False) if rows else ()
    return sorted(episodes, key=lambda episode: episode.id)


def _check_served(tx: Connection, run: ServedRun) -> None:
    held = select(_ITERATIONS.id).join(schema.runs, _RUNS.id == _ITERATIONS.run_id).where(_ITERATIONS.id == run.iteration)
    held = held.where(_ITERATIONS.train_token == run.token, _ITERATIONS.status == "running", _RUNS.status == "running")
    if tx.execute(held.with_for_update(of=schema.iterations)).first() is None:
        raise Fenced(f"{run.name} is no longer served by this process.")


def _find_task(tx: Connection, task: Task) -> int:
    values = {"content_hash": task.content_hash, "key": task.key, "messages": [], "reference": "", "metadata": {}}
    tx.execute(insert(tx, schema.tasks).values(values).on_conflict_do_nothing(index_elements=["content_hash"]))
    return int(tx.execute(select(schema.tasks.c.id).where(schema.tasks.c.content_hash == task.content_hash)).scalar_one())


@transaction
def close_run(tx: Connection, run: ServedRun, reason: str = "") -> None:
    """End the run and cancel its open episodes. If this process no longer serves the run, do nothing."""
    try:
        _check_served(tx, run)
    except Fenced:
        return
    _end(tx, run.id, "cancelled", reason)


@read_transaction
def find_lost_runs(tx: Connection, lease_seconds: float) -> set[int]:
    """Return the ids of the running `serve` runs whose lease has expired."""
    return {row.id for row in tx.execute(_lost_runs(lease_seconds))}


def _lost_runs(lease_seconds: float) -> Select[Any]:
    lost = select(_RUNS.id, _RUNS.name, _ITERATIONS.worker).join(schema.iterations, _ITERATIONS.run_id == _RUNS.id)
    return lost.where(_RUNS.kind == "serve", _RUNS.status == "running", is_lease_free(_ITERATIONS.lease_until, lease_seconds))


@transaction
def end_lost_runs(tx: Connection, lease_seconds: float, only: Collection[int] | None = None) -> list[str]:
    """End the `serve` runs whose process died, and their episodes. Return their names. With `only`, end only the runs with
    these ids.
    """
    lost = _lost_runs(lease_seconds)
    lost = lost if only is None else lost.where(_RUNS.id.in_(only))
    rows = tx.execute(lost.order_by(_RUNS.id).with_for_update(of=schema.runs)).all()
    for row in rows:
        reason = f"the process that served it ({row.worker.partition('/')[0]}) is gone"
        _end(tx, row.id, "infra_error", reason)
    return [row.name for row in rows]


def _end(tx: Connection, run: int, status: str, reason: str) -> None:
    """End a run. Its open episodes get the status `status`."""
    now = datetime.now(UTC)
    lose_agents(tx, run, reason)
    ended = {"status": status, "error": reason, "error_class": "lost" if reason else "", "finished_at": now}
    tx.execute(update(schema.episodes).where(_EPISODES.run_id == run, _EPISODES.status.in_(OPEN)).values(ended))
    for table in (schema.groups, schema.iterations):
        over = update(table).where(table.c.run_id == run, table.c.status.in_(OPEN))
        tx.execute(over.values(status="done", finished_at=now, lease_until=None))
    tx.execute(update(schema.runs).where(_RUNS.id == run).values(status="done", reason=reason, finished_at=now))
    log(tx, run, "done", detail=reason)


@read_transaction
def find_kept(tx: Connection) -> dict[int, float]:
    """Return the days for which each `serve` run keeps its episodes, by run id. Runs without a limit are left out."""
    days = _RUNS.manifest[KEEP_DAYS].as_float()
    rows = tx.execute(select(_RUNS.id, days.label("days")).where(_RUNS.kind == "serve", days.is_not(None)))
    return {row.id: row.days for row in rows}


def forget_old(db: Database) -> int:
    """Delete ended episodes of `serve` runs that are older than their run's limit; return the number of deleted episodes."""
    count = 0
    for run, days in find_kept(db).items():
        before = datetime.now(UTC) - timedelta(days=min(days, MAX_DAYS))
        while gone := forget_episodes(db, run, before):
            count += gone
    return count


def forget_ended(db: Database, run: ServedRun) -> None:
    """Delete the run's ended episodes."""
    while forget_episodes(db, run.id, datetime.now(UTC) + timedelta(days=1)):
        pass


@transaction
def forget_episodes(tx: Connection, run: int, before: datetime) -> int:
    """Delete ended episodes of the run with their content; return the number of deleted episodes.

    One call deletes at most FORGOTTEN_AT_ONCE episodes, of those that ended before `before`. Episodes that another run uses or
    has used for training are not deleted, and neither are episodes that have forks.
    """
    ended = select(_EPISODES.id, _EPISODES.group_id).where(_EPISODES.run_id == run, _EPISODES.finished_at < before)
    for table in (schema.run_groups, schema.iteration_groups):
        ended = ended.where(~select(table.c.group_id).where(table.c.group_id == _EPISODES.group_id).exists())
    ended = ended.where(~select(_FORKS.c.id).where(_FORKS.c.parent_id == _EPISODES.id).exists())
    ended = ended.where(~select(_USED.episode_id).where(_USED.episode_id == _EPISODES.id).exists())
    rows = tx.execute(ended.order_by(_EPISODES.id).limit(FORGOTTEN_AT_ONCE)).all()
    if not rows:
        return 0
    episodes: Sequence[int] = [row.id for row in rows]
    steps = select(schema.steps.c.id).where(schema.steps.c.episode_id.in_(episodes))
    tx.execute(delete(schema.step_tokens).where(schema.step_tokens.c.step_id.in_(steps)))
    for table in (schema.tool_calls, schema.steps, schema.rewards, schema.annotations, schema.agent_attempts):
        tx.execute(delete(table).where(table.c.episode_id.in_(episodes)))
    tx.execute(delete(schema.episodes).where(_EPISODES.id.in_(episodes)))
    tx.execute(delete(schema.groups).where(_GROUPS.id.in_([row.group_id for row in rows])))
    return len(rows)
