"""A tools worker runs what a model asks for: its own login at the database does the tools job, and nothing else."""

from collections.abc import Iterator

import pytest
from sqlalchemy import text

from agentrl.workers.jobs import tool_call
from agentrl.workers.stack.replies import Replies
from agentrl.workflow.errors import AccessDenied
from agentrl.workflow.settings import settings
from agentrl.workflow.store import steps
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import open_database, upgrade
from agentrl.workflow.tables import schema
from agentrl.workflow.trajectory import CallRecord
from tests.conftest import forget_process
from tests.support.played_runs import CALL, claim, sampled, start, submission, values

ONCE = CallRecord(CALL.call, "once", None)
REFUSED = (
    *(f"SELECT * FROM {name}" for name in schema.metadata.tables if name not in schema.RIGHTS_OF_TOOLS),
    *("SELECT name, manifest FROM runs", "SELECT reward FROM episodes", "UPDATE episodes SET reward = 1"),
    *("UPDATE tool_calls SET arguments = '{}'", "DELETE FROM tool_calls", "UPDATE runs SET config = '{}'"),
    *(
        "CREATE TABLE mine (a int)",
        "SET ROLE agentrl_reader",
        "COPY runs TO PROGRAM 'cat'",
        "SELECT pg_read_file('PG_VERSION')",
    ),
    *("SELECT rolpassword FROM pg_authid", "ALTER ROLE agentrl_tools SUPERUSER", "SELECT * FROM v_steps"),
)


@pytest.fixture
def login(postgres: Database, home: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """The process's database, logged in as tools workers are."""
    url = postgres.url.set(username="agentrl_tools")
    monkeypatch.setenv("AGENTRL_DATABASE_URL", url.render_as_string(hide_password=False))
    monkeypatch.setenv("AGENTRL_REDIS_SERVER", "none")
    forget_process()
    found = open_database(settings().database)
    yield found
    found.close()
    if tool_call.database.made:
        tool_call.database().close()
    forget_process()


def test_tools_login_answers_calls(postgres: Database, login: Database) -> None:
    work = claim(postgres, start(postgres, submission(tasks=1))[0])
    [found] = steps.commit_sampled(postgres, work.fence, [sampled(work, calls=(CALL, ONCE))])
    address = Replies(settings()).address
    for call in found:
        tool_call.calls([call], address)
    assert values(postgres, "SELECT result FROM tool_calls ORDER BY id") == ["42", "42"]


@pytest.mark.parametrize("statement", REFUSED)
def test_tools_login_is_refused_everything_else(login: Database, statement: str) -> None:
    with login.engine.connect() as connection, pytest.raises(AccessDenied, match=r"permission denied|must"):
        connection.execute(text(statement))


def test_upgrade_sets_tools_password_of_settings(postgres: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_TOOLS_PASSWORD", "it's a \\ secret")
    settings.cache_clear()
    upgrade(postgres)
    stored = "SELECT count(*) FROM pg_authid WHERE rolname = 'agentrl_tools' AND rolpassword IS NOT NULL AND NOT rolsuper"
    assert values(postgres, stored) == [1]
    settings.cache_clear()
