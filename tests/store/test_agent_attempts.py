"""agent_attempts: one worker has an agent, its key is known by a hash alone, and the first end counts."""

import hashlib
from collections.abc import Sequence
from typing import Any

from sqlalchemy import text

from agentrl.workflow.store import agent_attempts, agent_holds, steps
from agentrl.workflow.store.agent_attempts import AgentEnd, AgentWork
from agentrl.workflow.store.connect import Database
from tests.support.agents_stage import group_of
from tests.support.played_runs import claim

LEASE = 60.0
HASH = hashlib.sha256(b"key").hexdigest()


def opened(database: Database, **config: Any) -> tuple[Any, int]:
    """A claimed group whose only episode waits for its agent: (the claim, the episode)."""
    work = claim(database, group_of(database, **config))
    episode = work.episodes[0].id
    agent_holds.open_attempts(database, work.fence, [episode])
    return work, episode


def taken(database: Database, episode: int, worker: str = "a:1/x", attempt: int = 0, key_hash: str = HASH) -> AgentWork | None:
    return agent_attempts.claim_agent(database, episode, attempt, worker, key_hash, LEASE)


def row(database: Database, columns: str = "status, worker, key_hash") -> Sequence[Any]:
    with database.read() as tx:
        return tuple(tx.execute(text(f"SELECT {columns} FROM agent_attempts ORDER BY attempt DESC")).first() or ())


def test_agent_claim_has_task_without_reference(database: Database) -> None:
    work, episode = opened(database)
    found = taken(database, episode)
    assert found is not None
    assert (found.run, found.task, found.messages) == (work.run, work.task.key, work.task.messages)
    assert not hasattr(found, "reference")
    assert row(database) == ("running", "a:1/x", HASH)
    assert agent_holds.find_key(database, HASH) == (episode, 0)


def test_reference_of_claimed_task_is_read_by_its_id(database: Database) -> None:
    work, episode = opened(database, agent={"name": "m:f", "show_reference": True})
    found = taken(database, episode)
    assert found is not None
    assert agent_attempts.load_reference(database, found.task_id) == work.task.reference


def test_agent_attempt_has_one_worker(database: Database) -> None:
    _, episode = opened(database)
    assert taken(database, episode) is not None
    assert taken(database, episode, "b:2/y", key_hash="0" * 64) is None
    assert row(database)[1] == "a:1/x"


def test_agent_claim_repeated_is_the_same_claim(database: Database) -> None:
    _, episode = opened(database)
    first, again = taken(database, episode), taken(database, episode)
    assert first is not None
    assert again is not None
    assert first.id == again.id


def test_agent_claim_refuses_attempt_that_is_not_current(database: Database) -> None:
    work, episode = opened(database)
    steps.restart_episode(database, work.fence, episode)
    assert taken(database, episode) is None
    assert taken(database, episode, attempt=1) is None
    agent_holds.open_attempts(database, work.fence, [episode])
    assert taken(database, episode, attempt=1) is not None


def test_agent_lease_is_renewed_until_episode_restarts(database: Database) -> None:
    work, episode = opened(database)
    found = taken(database, episode)
    assert found is not None
    claims = [(found.id, "a:1/x"), (found.id, "b:2/y")]
    assert agent_attempts.extend_agents(database, claims, LEASE) == {found.id}
    steps.restart_episode(database, work.fence, episode)
    assert agent_attempts.extend_agents(database, claims, LEASE) == set()


def test_agent_end_counts_once_with_any_text(database: Database) -> None:
    _, episode = opened(database)
    found = taken(database, episode)
    assert found is not None
    end = AgentEnd(1, "ValueError", "lost \0 \ud800", "4", {"own\0": 0.5}, "\0printed")
    assert agent_attempts.finish_agent(database, found.id, "a:1/x", end)
    assert not agent_attempts.finish_agent(database, found.id, "a:1/x", AgentEnd(0))
    assert not agent_attempts.finish_agent(database, found.id, "b:2/y", AgentEnd(0))
    assert row(database, "status, exit_code, error, answer, output") == ("ended", 1, "lost \ufffd ?", "4", "\ufffdprinted")
    assert taken(database, episode) is None


def test_agent_attempt_handed_back_is_no_loss(database: Database) -> None:
    work, episode = opened(database)
    found = taken(database, episode)
    assert found is not None
    agent_attempts.give_up_agent(database, found.id, "a:1/x", "its worker stops")
    assert row(database, "status, error_class") == ("lost", agent_attempts.STOPPED)
    assert agent_holds.load_agents(database, work.fence.group, LEASE)[episode].losses == 0
