"""Database queries of a rollout on the table `agent_attempts`. The module `agent_attempts` has the queries of the agents
worker.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Boolean, Connection, Float, and_, bindparam, case, func, select, type_coerce, update

from agentrl.workflow.store.agent_attempts import MISMATCH, STOPPED
from agentrl.workflow.store.connect import insert, read_transaction, transaction
from agentrl.workflow.store.planning import log
from agentrl.workflow.store.prepared_statements import PreparedStatement
from agentrl.workflow.store.rollout_claims import Fence, check_claim
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import is_lease_free, now_ms
from agentrl.workflow.trajectory import storable

_AGENTS, _EPISODES = schema.agent_attempts.c, schema.episodes.c
_CURRENT = and_(_AGENTS.episode_id == _EPISODES.id, _AGENTS.attempt == _EPISODES.attempt)


@dataclass(frozen=True, slots=True)
class AgentState:
    """The row of the agent that runs an episode's current attempt.

    Args:
        status: pending, running, ended or lost.
        is_overdue: True if the agent is running and its worker's lease has expired.
        losses: the number of earlier agents of this episode that were lost.
    """

    id: int
    episode: int
    attempt: int
    status: str
    sends: int
    error_class: str
    error: str
    answer: str | None
    rewards: Mapping[str, float] | None
    is_overdue: bool
    losses: int


@transaction
def publish_address(tx: Connection, fence: Fence, address: str) -> None:
    """Store the address of the process that samples for the group's agents. Raise Fenced if another worker holds the group."""
    check_claim(tx, fence)
    tx.execute(update(schema.groups).where(schema.groups.c.id == fence.group).values(address=address))


@transaction
def open_attempts(tx: Connection, fence: Fence, episodes: Sequence[int]) -> None:
    """Insert a pending row for the current attempt of each of these episodes, if the attempt has no row yet. Raise Fenced if
    another worker holds the group.
    """
    held = check_claim(tx, fence)
    rows = [{"episode_id": episode, "attempt": held.attempts[episode], "run": held.run} for episode in episodes]
    if rows:
        keys = ["episode_id", "attempt"]
        tx.execute(insert(tx, schema.agent_attempts).on_conflict_do_nothing(index_elements=keys), rows)


@transaction
def count_sent(tx: Connection, agents: Sequence[int]) -> None:
    """Record that a message was sent to each of these agents that is still pending: add one to its number of messages, and
    store the time.
    """
    mine = update(schema.agent_attempts).where(_AGENTS.id.in_(agents), _AGENTS.status == "pending")
    tx.execute(mine.values(sends=_AGENTS.sends + 1, sent_ms=now_ms()))


_LOST = schema.agent_attempts.alias("before")
_LOSSES = (
    select(func.count())
    .where(_LOST.c.episode_id == _EPISODES.id, _LOST.c.status == "lost")
    .where(_LOST.c.error_class != STOPPED, _LOST.c.error_class != MISMATCH)
    .scalar_subquery()
)
_OVERDUE = case((_AGENTS.status == "running", is_lease_free(_AGENTS.lease_until, bindparam("lease", type_=Float))), else_=False)
_STATES = (
    select(_AGENTS.id, _AGENTS.episode_id, _AGENTS.attempt, _AGENTS.status, _AGENTS.sends, _AGENTS.error_class)
    .add_columns(_AGENTS.error, _AGENTS.answer, _AGENTS.rewards, type_coerce(_OVERDUE, Boolean), _LOSSES)
    .join(schema.episodes, _CURRENT)
    .where(_EPISODES.finished_at.is_(None))
)
_STATES_OF_GROUP = PreparedStatement(_STATES.where(_EPISODES.group_id == bindparam("group")))
_STATE_OF_EPISODE = PreparedStatement(_STATES.where(_EPISODES.id == bindparam("episode")))


@read_transaction
def load_agents(
    tx: Connection, group: int, lease_seconds: float, episodes: Collection[int] | None = None
) -> dict[int, AgentState]:
    """Return the state of each agent that runs the current attempt of an open episode of the group, by episode id.
    `lease_seconds` is the length of a lease, in seconds. `episodes` are the ids of the episodes to look at; None for all
    episodes of the group.
    """
    if episodes is None:
        rows = _STATES_OF_GROUP.rows(tx, {"group": group, "lease": lease_seconds})
    else:
        rows = [row for one in episodes for row in _STATE_OF_EPISODE.rows(tx, {"episode": one, "lease": lease_seconds})]
    return {state.episode: state for state in (AgentState(*row) for row in rows)}


@transaction
def lose_agent(tx: Connection, fence: Fence, agent: AgentState, lease_seconds: float) -> bool:
    """Mark an agent as lost if its lease has expired, and return True. Raise Fenced if another worker holds the group."""
    check_claim(tx, fence)
    gone = update(schema.agent_attempts).where(_AGENTS.id == agent.id, _AGENTS.status == "running")
    gone = gone.where(is_lease_free(_AGENTS.lease_until, lease_seconds))
    reason = "its agents worker was lost"
    values = {"status": "lost", "error_class": "lost", "error": reason, "finished_at": datetime.now(UTC)}
    return bool(tx.execute(gone.values(values)).rowcount)


@transaction
def end_replay(tx: Connection, fence: Fence, episode: int, attempt: int, reason: str) -> None:
    """Mark the agent of a replayed attempt as lost because one of its requests contradicted the record, and write an event with
    the reason.

    Raise Fenced if another worker holds the group.
    """
    check_claim(tx, fence)
    mine = update(schema.agent_attempts).where(_AGENTS.episode_id == episode, _AGENTS.attempt == attempt)
    values = {"status": "lost", "error_class": MISMATCH, "error": storable(reason), "finished_at": datetime.now(UTC)}
    tx.execute(mine.values(lease_until=None, **values))
    run_id = tx.execute(select(_EPISODES.run_id).where(_EPISODES.id == episode)).scalar_one()
    log(tx, run_id, "replay_mismatch", f"episode {episode}", reason)


@read_transaction
def current_attempts(tx: Connection, group: int) -> dict[int, int]:
    """Return, for each episode of the group, its id and the number of its current attempt."""
    rows = tx.execute(select(_EPISODES.id, _EPISODES.attempt).where(_EPISODES.group_id == group))
    return {row.id: row.attempt for row in rows}


@read_transaction
def any_at_work(tx: Connection, lease_seconds: float) -> bool:
    """Return whether an agents worker holds a live lease on a running agent."""
    query = select(_AGENTS.id).where(_AGENTS.status == "running", ~is_lease_free(_AGENTS.lease_until, lease_seconds))
    return tx.execute(query.limit(1)).first() is not None


@read_transaction
def find_key(tx: Connection, key_hash: str) -> tuple[int, int] | None:
    """Return the (episode, attempt) of the key with this hash; None for an unknown key."""
    row = tx.execute(select(_AGENTS.episode_id, _AGENTS.attempt).where(_AGENTS.key_hash == key_hash)).one_or_none()
    return (row.episode_id, row.attempt) if row else None


@transaction
def note_asked(tx: Connection, run_id: int, names: str) -> None:
    """Write an event that an agent requested sampling options which the run ignores. `names` has the options' names. At most
    one such event is written per run.
    """
    tx.execute(
        select(schema.runs.c.id).where(schema.runs.c.id == run_id).with_for_update()
    )  # of two at once one sees the other
    events = schema.events.c
    earlier_event = select(events.id).where(events.run_id == run_id, events.kind == "sampling_asked")
    if tx.execute(earlier_event).first() is None:
        detail = f"an agent asked for {names}: sampling is the run's, and what was asked for is kept with each step"
        log(tx, run_id, "sampling_asked", "", detail)
