"""The endpoint as a process: what it imports, where it listens, and what a kill costs."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from sqlalchemy import text

from agentrl.workers.stack import presence
from agentrl.workers.stack.listening import LISTENER, LOOPBACK, bind, url_of
from agentrl.workers.stack.supervisor import Supervisor
from agentrl.workflow.dialects.chat_completions import PATH as CHAT
from agentrl.workflow.errors import ServiceError
from agentrl.workflow.settings import settings
from agentrl.workflow.store import leases
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.endpoint_reads import ENDPOINT, some_run_has_agent
from tests.support.played_runs import start, submission
from tests.support.scripted_worker import scripted_worker, whole
from tests.support.served_endpoint import attempt

COMMAND = [sys.executable, "-m", "agentrl.workers.stack.worker", "endpoint"]


@contextmanager
def process(
    database: Database, folder: Path, listener: int | None = None, **environment: str
) -> Iterator["subprocess.Popen[bytes]"]:
    url = database.url.render_as_string(hide_password=False)
    environment = {**os.environ, "AGENTRL_HOME": str(folder), "AGENTRL_DATABASE_URL": url, **environment}
    if listener is not None:
        environment[LISTENER] = str(listener)
    with (folder / "endpoint.log").open("ab") as log:
        made = subprocess.Popen(COMMAND, env=environment, stderr=log, pass_fds=[] if listener is None else [listener])
    try:
        yield made
    finally:
        made.terminate()
        made.wait(20)


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_endpoint_imports_no_model_and_no_queue() -> None:
    code = "import sys, agentrl.workers.serving.endpoint; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "datasets", "celery", "fastapi", "numpy"} & set(loaded)


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.slow
def test_endpoint_restarts_on_its_port_after_kill(database: Database, tmp_path: Path) -> None:
    made = attempt(database, "k" * 30)
    listening = bind(LOOPBACK, 0)
    url = url_of(listening)

    def call() -> int:
        return httpx2.post(url + CHAT, json={"messages": []}, headers=made.bearer, timeout=60).status_code

    with scripted_worker(whole()) as worker, listening:
        made.held_by(worker.address)
        with process(database, tmp_path, listening.fileno()) as first:
            assert call() == 200
            first.send_signal(signal.SIGKILL)
            assert first.wait(10) == -signal.SIGKILL
            found: list[int] = []
            calling = threading.Thread(target=lambda: found.append(call()))
            calling.start()
            with process(database, tmp_path, listening.fileno()):
                calling.join(60)
            assert found == [200]
    said = (tmp_path / "endpoint.log").read_text()
    assert url in said
    assert made.key not in said


@pytest.mark.usefixtures("forked_programs")
def test_endpoint_publishes_its_url(sqlite: Database, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert presence.find_endpoint_url(sqlite) is None
    assert presence.missing_endpoint_hints(sqlite) == ["No endpoint runs. Start one: agentrl worker endpoint"]
    with process(sqlite, tmp_path) as running:
        until(lambda: presence.find_endpoint_url(sqlite))
        url = presence.find_endpoint_url(sqlite)
        assert url is not None
        assert url.startswith(f"http://{LOOPBACK}:")
        until(lambda: httpx2.get(f"{url}/health").status_code == 200)
        running.terminate()
        assert running.wait(20) == 0
    monkeypatch.setenv("AGENTRL_ENDPOINT_URL", "http://endpoint:8500/")
    settings.cache_clear()
    assert presence.find_endpoint_url(sqlite) == "http://endpoint:8500"


def test_endpoint_url_is_the_latest(database: Database) -> None:
    for url in ("http://127.0.0.1:1", "http://127.0.0.1:2"):
        leases.publish_service(database, ENDPOINT, url, 60.0)
        assert leases.service_holder(database, ENDPOINT) == url


def test_endpoint_address_in_use_is_an_error_with_remedy() -> None:
    with bind(LOOPBACK, 0) as first, pytest.raises(ServiceError, match="Address already in use") as refused:
        bind(LOOPBACK, first.getsockname()[1])
    assert "AGENTRL_ENDPOINT_PORT" in refused.value.hint


@pytest.mark.slow
def test_stack_starts_endpoint_once_a_run_has_an_agent(own_database: Database) -> None:
    stack = Supervisor(settings())
    settings().stack_dir.mkdir(parents=True)
    start(own_database, submission("plain"))
    assert not some_run_has_agent(own_database)
    assert not stack._tend_agents(["endpoint"])
    give_agent(own_database)
    assert some_run_has_agent(own_database)
    try:
        assert stack._tend_agents(["endpoint"])
        until(lambda: presence.find_endpoint_url(own_database))
        url = presence.find_endpoint_url(own_database)
        [child] = stack.children
        assert child.process is not None
        time.sleep(1.0)  # it is calm by now
        child.process.kill()
        child.process.wait(10)
        assert stack._tend_agents(["endpoint"])
        assert httpx2.get(f"{url}/health", timeout=30).status_code == 200
    finally:
        stack._end()


def test_run_has_agent_reads_alike_in_both_databases(database: Database) -> None:
    start(database, submission("plain"))
    assert not some_run_has_agent(database)
    give_agent(database, None)
    assert not some_run_has_agent(database)
    give_agent(database, "external")
    assert some_run_has_agent(database)
    assert not some_run_has_agent(database, elsewhere=False)
    give_agent(database)
    assert some_run_has_agent(database, elsewhere=False)


def give_agent(database: Database, agent: str | None = "mine:solve") -> None:
    config = {"agent": agent and {"name": agent}}
    cast = "CAST(:config AS JSON)" if not database.is_sqlite else ":config"
    database.write(lambda tx: tx.execute(text(f"UPDATE runs SET config = {cast}"), {"config": json.dumps(config)}))
