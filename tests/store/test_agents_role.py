"""An agents worker runs what a model may have written: its own login at the database does the agents job, and nothing else."""

from collections.abc import Iterator

import pytest
from sqlalchemy import text

from agentrl.workflow.errors import AccessDenied
from agentrl.workflow.settings import settings
from agentrl.workflow.store import agent_attempts, agent_holds, leases, steps
from agentrl.workflow.store.agent_attempts import AgentEnd
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.endpoint_reads import ENDPOINT, some_run_has_agent
from agentrl.workflow.store.migrate import AGENTS_ROLE, TOOLS_ROLE, upgrade
from agentrl.workflow.tables import schema
from tests.support.agents_stage import group_of
from tests.support.played_runs import claim, values
from tests.support.served_endpoint import attempt

READ_WHOLE = ("agent_attempts", "service_leases", "group_resources")
REFUSED = (
    *(f"SELECT * FROM {name}" for name in schema.metadata.tables if name not in READ_WHOLE),
    *("SELECT reference FROM tasks", "SELECT reward FROM episodes", "SELECT manifest FROM runs", "SELECT address FROM groups"),
    *("UPDATE episodes SET reward = 1", "UPDATE agent_attempts SET attempt = 7", "UPDATE agent_attempts SET episode_id = 7"),
    *("DELETE FROM agent_attempts", "INSERT INTO agent_attempts (episode_id, attempt) VALUES (1, 9)"),
    *(
        "UPDATE service_leases SET holder = 'http://mine'",
        "INSERT INTO rewards DEFAULT VALUES",
        "UPDATE runs SET config = '{}'",
    ),
    *(
        "CREATE TABLE mine (a int)",
        "SET ROLE agentrl_reader",
        "COPY runs TO PROGRAM 'cat'",
        "ALTER ROLE agentrl_agents SUPERUSER",
    ),
)
ALLOWED = (
    "SELECT id, name, config FROM runs",
    "SELECT id, key, messages, metadata FROM tasks",
    "SELECT id, run_id, group_id, task_id, attempt, status FROM episodes",
    "SELECT * FROM agent_attempts",
    "UPDATE agent_attempts SET status = 'ended', exit_code = 0, answer = '42', output = 'said', error = '', worker = 'host:1'",
)


@pytest.fixture
def login(postgres: Database) -> Iterator[Database]:
    """The database, logged in as agents workers are."""
    found = Database(postgres.url.set(username=AGENTS_ROLE).render_as_string(hide_password=False))
    yield found
    found.close()


def test_agents_login_reads_tasks_and_writes_ends(postgres: Database, login: Database) -> None:
    attempt(postgres)
    leases.publish_service(postgres, ENDPOINT, "http://127.0.0.1:1", 60.0)
    assert leases.service_holder(login, ENDPOINT) == "http://127.0.0.1:1"
    with login.engine.connect() as connection, connection.begin():
        assert [connection.execute(text(statement)).rowcount for statement in ALLOWED] == [1, 1, 2, 1, 1]


def test_agents_login_claims_extends_and_ends_agents(postgres: Database, login: Database) -> None:
    work = claim(postgres, group_of(postgres))
    episode, worker = work.episodes[0].id, "a:1/x"
    for attempt_number in (0, 1):
        agent_holds.open_attempts(postgres, work.fence, [episode])
        claimed = agent_attempts.claim_agent(login, episode, attempt_number, worker, f"{attempt_number:064}", 60.0)
        assert claimed is not None
        assert agent_attempts.extend_agents(login, [(claimed.id, worker)], 60.0) == {claimed.id}
        if attempt_number == 0:
            agent_attempts.give_up_agent(login, claimed.id, worker, "its agents worker was stopped")
            steps.restart_episode(postgres, work.fence, episode)
        else:
            assert agent_attempts.finish_agent(login, claimed.id, worker, AgentEnd(0))
    assert values(postgres, "SELECT status FROM agent_attempts ORDER BY id") == ["lost", "ended"]
    with pytest.raises(AccessDenied):
        agent_attempts.load_reference(login, claimed.task_id)


@pytest.mark.parametrize("role", [AGENTS_ROLE, TOOLS_ROLE])
def test_some_run_has_agent_is_false_without_right_to_ask(postgres: Database, role: str) -> None:
    attempt(postgres)
    login = Database(postgres.url.set(username=role).render_as_string(hide_password=False))
    assert not some_run_has_agent(login)
    login.close()


@pytest.mark.parametrize("statement", REFUSED)
def test_agents_login_is_refused_everything_else(login: Database, statement: str) -> None:
    with login.engine.connect() as connection, pytest.raises(AccessDenied, match=r"permission denied|must"):
        connection.execute(text(statement))


def test_upgrade_sets_agents_password_of_settings(postgres: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_AGENTS_PASSWORD", "it's a \\ secret")
    settings.cache_clear()
    upgrade(postgres)
    stored = "SELECT count(*) FROM pg_authid WHERE rolname = 'agentrl_agents' AND rolpassword IS NOT NULL AND NOT rolsuper"
    assert values(postgres, stored) == [1]
    settings.cache_clear()
