"""Writes of an agents worker: it started an agent (with the hash of its key), and the agent ended.

The rollout's side of the same rows is `agent_holds`: it opens them, and gives up those whose worker is lost.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, select, update

from agentrl.workflow.config import AgentConfig
from agentrl.workflow.store.connect import transaction
from agentrl.workflow.store.episode_loader import clean_tree, message_value
from agentrl.workflow.store.run_resources import resources_of_group
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import now_ms
from agentrl.workflow.trajectory import OPEN, Message, storable

_AGENTS, _EPISODES, _TASKS = schema.agent_attempts.c, schema.episodes.c, schema.tasks.c


@dataclass(frozen=True, slots=True)
class AgentWork:
    """An agent that this worker has to run.

    Args:
        id: its row.
        run: the run's name, by which its model is called.
        reference: the task's, where the run's config shows it to agents; else None.
        training: whether the run trains.
        resources: the run's texts that it works with, by name.
    """

    id: int
    run: str
    config: Mapping[str, Any]
    episode: int
    attempt: int
    task: str
    messages: tuple[Message, ...]
    metadata: Mapping[str, Any]
    reference: str | None
    training: bool = True
    resources: Mapping[str, str] = field(default_factory=dict)

    @property
    def agent(self) -> AgentConfig:
        """The run's agent."""
        return AgentConfig.model_validate(self.config["agent"])


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How an agent ended.

    Args:
        exit_code: of its process, negative for a signal; None where nothing was started.
        error_class: empty where it returned, or its program exited with 0.
        error: in words.
        answer: the text that it gave as the episode's answer; None: none.
        rewards: what it says it earned.
        output: the end of what it printed.
    """

    exit_code: int | None = None
    error_class: str = ""
    error: str = ""
    answer: str | None = None
    rewards: Mapping[str, float] | None = None
    output: str = ""


_WORK = (
    select(_AGENTS.id, schema.runs.c.name, schema.runs.c.config, schema.runs.c.kind, _EPISODES.task_id, _EPISODES.group_id)
    .join(schema.episodes, (_EPISODES.id == _AGENTS.episode_id) & (_EPISODES.attempt == _AGENTS.attempt))
    .join(schema.runs, schema.runs.c.id == _EPISODES.run_id)
    .where(_AGENTS.status == "pending", _EPISODES.status.in_(OPEN))
)


@transaction
def claim_agent(
    tx: Connection, episode: int, attempt: int, worker: str, key_hash: str, lease_seconds: float
) -> AgentWork | None:
    """Take the agent of an episode's current attempt; None where the episode is over, or another worker has taken it.

    Args:
        worker: a name of this very claim: a claim whose answer was lost is recognised by it.
        key_hash: sha256 of the key that the agent will call its model with.
    """
    mine = (_AGENTS.episode_id == episode) & (_AGENTS.attempt == attempt)
    again = mine & (_AGENTS.worker == worker) & (_AGENTS.status == "running")
    if tx.execute(select(_AGENTS.id).where(again)).first() is not None:
        tx.execute(update(schema.agent_attempts).where(again).values(status="pending"))
    found = tx.execute(_WORK.where(mine).with_for_update(of=schema.agent_attempts)).one_or_none()
    if found is None:
        return None
    values = {"status": "running", "worker": worker, "key_hash": key_hash, "started_at": datetime.now(UTC)}
    lease = now_ms() + int(lease_seconds * 1000)
    tx.execute(update(schema.agent_attempts).where(_AGENTS.id == found.id).values(lease_until=lease, **values))
    task = tx.execute(select(_TASKS.key, _TASKS.messages, _TASKS.metadata).where(_TASKS.id == found.task_id)).one()
    reference = None
    if found.config["agent"].get("show_reference"):
        reference = str(tx.execute(select(_TASKS.reference).where(_TASKS.id == found.task_id)).scalar_one())
    messages = tuple(message_value(message) for message in task.messages)
    resources = resources_of_group(tx, found.group_id) if found.config.get("resources") else {}
    told = (task.key, messages, task.metadata, reference, found.kind == "train", resources)
    return AgentWork(found.id, found.name, found.config, episode, attempt, *told)


def _claimed(agent: int, worker: str) -> Any:
    return (_AGENTS.id == agent) & (_AGENTS.worker == worker) & (_AGENTS.status == "running")


@transaction
def extend_agents(tx: Connection, claims: Collection[tuple[int, str]], lease_seconds: float) -> set[int]:
    """Renew the leases of those of the (agent, worker) that still have it, and return these agents.

    One whose episode is over, or goes on in another attempt, is had no longer.
    """
    current = select(_EPISODES.id).where(
        _EPISODES.id == _AGENTS.episode_id, _EPISODES.attempt == _AGENTS.attempt, _EPISODES.status.in_(OPEN)
    )
    held = set()
    for agent, worker in claims:
        extended = update(schema.agent_attempts).where(_claimed(agent, worker), current.exists())
        if tx.execute(extended.values(lease_until=now_ms() + int(lease_seconds * 1000))).rowcount:
            held.add(agent)
    return held


@transaction
def finish_agent(tx: Connection, agent: int, worker: str, end: AgentEnd) -> bool:
    """Writes how the agent ended; False where its worker had it no longer."""
    values = {
        "status": "ended",
        "exit_code": end.exit_code,
        "error_class": storable(end.error_class),
        "error": storable(end.error),
        "answer": None if end.answer is None else storable(end.answer),
        "rewards": None if end.rewards is None else clean_tree(dict(end.rewards)),
        "output": storable(end.output),
        "lease_until": None,
        "finished_at": datetime.now(UTC),
    }
    return bool(tx.execute(update(schema.agent_attempts).where(_claimed(agent, worker)).values(values)).rowcount)


STOPPED = "stopped"
"""The error class of an agent that was given up since its worker was to stop: no loss of a worker."""


@transaction
def give_up_agent(tx: Connection, agent: int, worker: str, why: str, error_class: str = STOPPED) -> None:
    """Give up the agent before it has ended: its episode restarts with another. This counts as a loss, unless it was
    STOPPED.
    """
    values = {
        "status": "lost",
        "error_class": error_class,
        "error": storable(why),
        "lease_until": None,
        "finished_at": datetime.now(UTC),
    }
    tx.execute(update(schema.agent_attempts).where(_claimed(agent, worker)).values(values))


def lose_agents(tx: Connection, run: int, why: str) -> None:
    """Give up the agents of the run's open episodes, and mark their pending calls as unobserved."""
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
