"""The start and the end of an agent's attempt in the table `agent_attempts`. Agents workers call these queries, and the
endpoint calls them for external agents.

Rollout workers use the queries of `agent_holds` instead. The queries of `agent_holds` insert the rows, and mark an agent as
lost if its worker is lost.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Integer, bindparam, func, null, select, update

from agentrl.workflow.config import EXTERNAL, AgentConfig
from agentrl.workflow.store.connect import read_transaction, skip_flush, transaction
from agentrl.workflow.store.episode_loader import clean_tree, message_value
from agentrl.workflow.store.prepared_statements import PreparedStatement
from agentrl.workflow.store.run_format import RUN_FORMAT
from agentrl.workflow.store.run_resources import resources_of_group
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import is_one_of, now_ms
from agentrl.workflow.trajectory import OPEN, Message, storable

_AGENTS, _EPISODES, _TASKS = schema.agent_attempts.c, schema.episodes.c, schema.tasks.c


@dataclass(frozen=True, slots=True)
class AgentWork:
    """The work of an agents worker: one agent to run.

    Args:
        id: the id of the agent's row in `agent_attempts`.
        run: the run's name, which the agent passes as the model's name.
        task: the key of the task.
        task_id: the id of the task's row.
        resources: the run's texts that the agent uses, by name.
        began: the time at which the first attempt at the episode began. For a fork, it is the time of the parent.
    """

    id: int
    run: str
    config: Mapping[str, Any]
    episode: int
    attempt: int
    task: str
    messages: tuple[Message, ...]
    metadata: Mapping[str, Any]
    task_id: int
    training: bool = True
    resources: Mapping[str, str] = field(default_factory=dict)
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def agent(self) -> AgentConfig:
        """The agent section of the run's config."""
        return AgentConfig.model_validate(self.config["agent"])


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """The end of an agent.

    Args:
        exit_code: the exit code of the agent's process, negative for a signal; None if no process was started.
        error_class: the class of the error; empty if the function returned or the program exited with 0.
        error: the error as a sentence.
        answer: the episode's answer, if the agent returned one; else None.
        rewards: the rewards that the agent returned, by name; None if the agent returned no rewards.
    """

    exit_code: int | None = None
    error_class: str = ""
    error: str = ""
    answer: str | None = None
    rewards: Mapping[str, float] | None = None
    output: str = ""


_WORK = (
    select(_AGENTS.id, _AGENTS.episode_id, _AGENTS.attempt, _EPISODES.task_id, _EPISODES.group_id)
    .add_columns(schema.runs.c.name, schema.runs.c.config, schema.runs.c.kind)
    .join(schema.episodes, (_EPISODES.id == _AGENTS.episode_id) & (_EPISODES.attempt == _AGENTS.attempt))
    .join(schema.runs, schema.runs.c.id == _EPISODES.run_id)
    .where(_AGENTS.status == "pending", is_one_of(_EPISODES.status, OPEN), schema.runs.c.format == RUN_FORMAT)
)

_CLAIMABLE = PreparedStatement(
    _WORK.where(_AGENTS.episode_id == bindparam("episode"), _AGENTS.attempt == bindparam("attempt"))
    .limit(1)
    .with_for_update(of=schema.agent_attempts, skip_locked=True)
)
_CLAIM_AGAIN = PreparedStatement(
    update(schema.agent_attempts)
    .where(_AGENTS.status == "running", _AGENTS.worker == bindparam("of_worker"))
    .values(status="pending")
)
_CLAIM = PreparedStatement(
    update(schema.agent_attempts)
    .where(_AGENTS.id == bindparam("of_agent"))
    .values(status="running", lease_until=now_ms() + bindparam("lease_ms", type_=Integer))
)
_TASK = PreparedStatement(select(_TASKS.key, _TASKS.messages, _TASKS.metadata).where(_TASKS.id == bindparam("task")))
_PARENT = PreparedStatement(select(_EPISODES.parent_id).where(_EPISODES.id == bindparam("episode")))
_BEGAN = PreparedStatement(select(func.min(_AGENTS.started_at)).where(_AGENTS.episode_id == bindparam("episode")))
_FINISH = PreparedStatement(
    update(schema.agent_attempts)
    .where(_AGENTS.id == bindparam("of_agent"), _AGENTS.worker == bindparam("of_worker"), _AGENTS.status == "running")
    .values(status="ended", lease_until=null())
)


@transaction
def claim_agent(
    tx: Connection, episode: int, attempt: int, worker: str, key_hash: str, lease_seconds: float
) -> AgentWork | None:
    """Claim the agent of an episode's current attempt.

    Return None if the episode has ended, or if another worker has claimed the agent.

    Args:
        worker: a name that is unique to this claim. If the reply of the commit is lost and the caller repeats the claim, the
            name shows that both are the same claim.
        key_hash: the sha256 of the key with which the agent will call its model.
        lease_seconds: the length of the lease, in seconds.
    """
    _CLAIM_AGAIN.run(tx, {"of_worker": worker})
    rows = _CLAIMABLE.rows(tx, {"episode": episode, "attempt": attempt})
    return _claim(tx, rows, worker, key_hash, lease_seconds)


@transaction
def claim_external(tx: Connection, run: str, worker: str, key_hash: str, lease_seconds: float) -> AgentWork | None:
    """Claim the oldest waiting attempt of the external agents; return None if no attempt waits.

    Args:
        run: the name of the run whose attempts are claimed; empty for all runs.
        worker, key_hash, lease_seconds: see `claim_agent`.
    """
    _CLAIM_AGAIN.run(tx, {"of_worker": worker})
    oldest = _WORK.where(_is_external(run)).order_by(_AGENTS.id).limit(1)
    rows = tx.execute(oldest.with_for_update(of=schema.agent_attempts, skip_locked=True)).all()
    return _claim(tx, rows, worker, key_hash, lease_seconds)


@read_transaction
def some_external_waits(tx: Connection, run: str) -> bool:
    """Return whether an attempt waits that `claim_external` would claim."""
    return tx.execute(_WORK.where(_is_external(run)).limit(1)).first() is not None


def _is_external(run: str) -> ColumnElement[bool]:
    external: ColumnElement[bool] = schema.runs.c.config[("agent", "name")].as_string() == EXTERNAL
    return external & (schema.runs.c.name == run) if run else external


def _claim(tx: Connection, rows: Sequence[Any], worker: str, key_hash: str, lease_seconds: float) -> AgentWork | None:
    """Claim the pending attempt of the only row, which has the columns of `_WORK`; return None if there is no row."""
    if not rows:
        return None
    agent, episode, attempt, task, group, run, config, kind = rows[0]
    values = {"worker": worker, "key_hash": key_hash, "started_at": datetime.now(UTC), "lease_ms": int(lease_seconds * 1000)}
    _CLAIM.run(tx, {"of_agent": agent, **values})
    ((key, messages, metadata),) = _TASK.rows(tx, {"task": task})
    return AgentWork(
        id=agent,
        run=run,
        config=config,
        episode=episode,
        attempt=attempt,
        task=key,
        messages=tuple(message_value(message) for message in messages),
        metadata=metadata,
        task_id=task,
        training=kind == "train",
        resources=resources_of_group(tx, group) if config.get("resources") else {},
        began=_began(tx, episode),
    )


@read_transaction
def load_reference(tx: Connection, task_id: int) -> str:
    """Return the reference answer of a task. Raise AccessDenied if the login may not read it (`agentrl_agents` may not)."""
    return str(tx.execute(select(_TASKS.reference).where(_TASKS.id == task_id)).scalar_one())


def _began(tx: Connection, episode: int) -> datetime:
    """Return the time at which the first attempt at the episode began. A fork has the time of its parent."""
    while parent := _PARENT.rows(tx, {"episode": episode})[0][0]:
        episode = parent
    began: datetime = _BEGAN.rows(tx, {"episode": episode})[0][0]
    return began


def _claimed(agent: int, worker: str) -> Any:
    return (_AGENTS.id == agent) & (_AGENTS.worker == worker) & (_AGENTS.status == "running")


@transaction
def extend_agents(tx: Connection, claims: Collection[tuple[int, str]], lease_seconds: float) -> set[int]:
    """Renew the leases of the agents that these (agent, worker) claims still hold, and return the ids of those agents.

    A claim loses its agent in three cases: the agent's row is no longer running under that worker, the episode has ended, or
    the episode has a newer attempt.
    """
    skip_flush(tx)
    current = select(_EPISODES.id).where(
        _EPISODES.id == _AGENTS.episode_id, _EPISODES.attempt == _AGENTS.attempt, _EPISODES.status.in_(OPEN)
    )
    held = set()
    for agent, worker in sorted(claims):  # in the order of `insert_calls`, which locks the same rows
        extended = update(schema.agent_attempts).where(_claimed(agent, worker), current.exists())
        if tx.execute(extended.values(lease_until=now_ms() + int(lease_seconds * 1000))).rowcount:
            held.add(agent)
    return held


@transaction
def renew_external(tx: Connection, agent: int, worker: str, lease_seconds: float) -> bool:
    """Renew the lease of an external agent, and return True. Return False if this worker no longer holds the agent.

    If the agent's time limit is over, store its end as `timeout` and return False.
    """
    current = (
        select(_AGENTS.started_at, schema.runs.c.config)
        .join(schema.episodes, (_EPISODES.id == _AGENTS.episode_id) & (_EPISODES.attempt == _AGENTS.attempt))
        .join(schema.runs, schema.runs.c.id == _EPISODES.run_id)
        .where(_claimed(agent, worker), _EPISODES.status.in_(OPEN))
    )
    row = tx.execute(current).one_or_none()
    if row is None:
        return False
    limit = AgentConfig.model_validate(row.config["agent"]).timeout_seconds
    if datetime.now(UTC) - row.started_at > timedelta(seconds=limit):
        error = f"it ran for more than {limit:g} s (agent.timeout_seconds)"
        _finish(tx, agent, worker, AgentEnd(None, "timeout", error))
        return False
    values = {"lease_until": now_ms() + int(lease_seconds * 1000)}
    return bool(tx.execute(update(schema.agent_attempts).where(_claimed(agent, worker)).values(values)).rowcount)


@transaction
def finish_agent(tx: Connection, agent: int, worker: str, end: AgentEnd) -> bool:
    """Store the end of the agent; return False if this worker no longer holds the agent."""
    return _finish(tx, agent, worker, end)


def _finish(tx: Connection, agent: int, worker: str, end: AgentEnd) -> bool:
    values = {
        "of_agent": agent,
        "of_worker": worker,
        "exit_code": end.exit_code,
        "error_class": storable(end.error_class),
        "error": storable(end.error),
        "answer": None if end.answer is None else storable(end.answer),
        "rewards": None if end.rewards is None else clean_tree(dict(end.rewards)),
        "output": storable(end.output),
        "finished_at": datetime.now(UTC),
    }
    return bool(_FINISH.run(tx, values))


STOPPED = "stopped"
"""The error class of an agent whose worker stopped before the agent ended. Such an agent does not count as a loss."""

MISMATCH = "mismatch"
"""The error class of an agent that was replayed and sent a request which contradicts the record. It does not count as a loss,
because the attempt after it begins without a record.
"""


@transaction
def give_up_agent(tx: Connection, agent: int, worker: str, why: str, error_class: str = STOPPED) -> bool:
    """Mark a running agent as lost, so that its episode restarts. The episode's count of losses grows, unless `error_class` is
    STOPPED. Return False if this worker no longer holds the agent.
    """
    values = {
        "status": "lost",
        "error_class": error_class,
        "error": storable(why),
        "lease_until": None,
        "finished_at": datetime.now(UTC),
    }
    return bool(tx.execute(update(schema.agent_attempts).where(_claimed(agent, worker)).values(values)).rowcount)


def lose_agents(tx: Connection, run: int, why: str) -> None:
    """Mark the running agents of the run's open episodes as lost, and the pending calls of these agents as unobserved."""
    calls = schema.tool_calls.c
    still = select(schema.episodes.c.id).where(schema.episodes.c.run_id == run, schema.episodes.c.status.in_(OPEN))
    unobserved = update(schema.tool_calls).where(calls.episode_id.in_(still), calls.kind == "agent", calls.status == "pending")
    tx.execute(unobserved.values(status="unobserved"))
    left = update(schema.agent_attempts).where(_AGENTS.episode_id.in_(still), _AGENTS.status == "running")
    values = {
        "status": "lost",
        "error_class": "lost",
        "error": storable(why),
        "lease_until": None,
        "finished_at": datetime.now(UTC),
    }
    tx.execute(left.values(values))
