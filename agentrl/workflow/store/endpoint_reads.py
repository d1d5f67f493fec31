"""Database queries of the endpoint: the attempt of a key, and the process that samples for that attempt. The endpoint writes no
row except its own lease.
"""

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import Connection, case, func, select

from agentrl.workflow.config import EXTERNAL
from agentrl.workflow.errors import AccessDenied
from agentrl.workflow.store.connect import Database, read_transaction
from agentrl.workflow.store.planning import IS_AT_WORK
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import now_ms
from agentrl.workflow.trajectory import OPEN

ENDPOINT = "endpoint"
"""The name of the endpoint's lease. The lease's holder is the endpoint's URL."""


@dataclass(frozen=True, slots=True)
class AttemptLocation:
    """The attempt of a key, and the process that serves the attempt's requests.

    `agent` is the id of the attempt's row in `agent_attempts`. `created` is when the run was created, in Unix seconds.
    `over` is the reason why the attempt takes no more requests; it is empty while the attempt takes requests. `address` is the
    "host:port" of the process that holds the episode's group; it is None while no process holds the group.
    """

    agent: int
    run: str
    created: int
    episode: int
    attempt: int
    over: str
    address: str | None


@read_transaction
def find_places(tx: Connection, key_hashes: Collection[str]) -> dict[str, AttemptLocation]:
    """Return the location of each attempt, by the hash of its key. Unknown hashes are left out."""
    agents, episodes, groups, runs = schema.agent_attempts, schema.episodes, schema.groups, schema.runs
    is_held = groups.c.lease_until >= now_ms()
    rows = tx.execute(
        select(
            agents.c.key_hash,
            agents.c.id,
            runs.c.name,
            runs.c.created_at,
            agents.c.episode_id,
            agents.c.attempt,
            agents.c.status,
            episodes.c.attempt.label("newest"),
            episodes.c.status.label("episode_status"),
            case((is_held, groups.c.address), else_=None).label("address"),
        )
        .join(episodes, episodes.c.id == agents.c.episode_id)
        .join(groups, groups.c.id == episodes.c.group_id)
        .join(runs, runs.c.id == episodes.c.run_id)
        .where(agents.c.key_hash.in_(key_hashes))
    )
    return {
        row.key_hash: AttemptLocation(
            row.id,
            row.name,
            int(row.created_at.timestamp()),
            row.episode_id,
            row.attempt,
            _why_over(row.status, row.attempt, row.newest, row.episode_status),
            row.address or None,
        )
        for row in rows
    }


def _why_over(status: str, attempt: int, newest: int, episode_status: str) -> str:
    if episode_status not in OPEN:
        return f"is {episode_status}"
    if attempt != newest:
        return f"is at attempt {newest}, but this key belongs to attempt {attempt}"
    if status in ("ended", "lost"):
        return f"no longer has an agent: its attempt {attempt} is {status}"
    return ""


def some_run_has_agent(database: Database, elsewhere: bool = True) -> bool:
    """Return whether a running run has an agent instead of the built-in loop. The embedded stack needs an endpoint only in this
    case. If `elsewhere` is False, agents that run elsewhere (`--agent external`) are not counted, because they need no agents
    worker.

    Return False for the login of a tools or agents worker, because that login may not read runs. Raise ServiceError if the
    database is unreachable. Do not retry, because the caller also has to supervise workers.
    """
    has_agent = func.coalesce(schema.runs.c.config["agent"].as_string(), "null") != "null"
    try:
        with database.read() as tx:
            configs = tx.execute(select(schema.runs.c.config).where(*IS_AT_WORK, has_agent)).scalars()
            agents = [config["agent"] for config in configs if config.get("agent")]
            return any(elsewhere or agent.get("name") != EXTERNAL for agent in agents)
    except AccessDenied:
        return False
