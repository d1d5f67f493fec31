"""`/metrics` as Prometheus' own parser reads it, logs as JSON, and notifications of runs that end or wait."""

import json
import logging
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import copy_context
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.workers.stack import metrics, notify
from agentrl.workers.stack.metrics import PrometheusMetric, collect_work, port_of, render, serve_metrics
from agentrl.workers.stack.notify import Notifier
from agentrl.workers.stack.worker import ROLES
from agentrl.workflow.errors import ServiceError
from agentrl.workflow.runtime.log_fields import JsonFormatter, log_fields
from agentrl.workflow.sandbox.proc import fields
from agentrl.workflow.settings import Settings
from agentrl.workflow.store import blocked_runs, planning, run_events
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import open_work
from tests.conftest import missing
from tests.support.played_runs import claim, play, start, submission


def parse(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Name -> labels and values, as Prometheus' client reads them."""
    if find_spec("prometheus_client") is None:
        missing("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for sample in samples:
        found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
    return number


def read(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_metrics_count_work_by_queue_and_lease(database: Database) -> None:
    groups = start(database, submission())
    claim(database, groups[0])
    found = parse(render(collect_work(database)))
    work = {(labels["queue"], labels["state"]): value for labels, value in found["agentrl_work"]}
    assert work == {("rollout", "held"): 1.0, ("rollout", "waiting"): 1.0}
    assert found["agentrl_runs"] == [({"status": "running"}, 1.0)]
    play(database, groups[1])
    found = parse(render(collect_work(database)))
    assert ({"run": "first", "of": "sampled"}, 4.0) in found["agentrl_tokens_total"]
    assert ({"run": "first", "of": "generate"}, 0.5) in found["agentrl_seconds_total"]
    assert found["agentrl_iterations_done_total"] == [({"run": "first"}, 0.0)]


def test_metrics_of_empty_store_are_valid(database: Database) -> None:
    assert parse(render(collect_work(database))) == {}


def test_metrics_escape_labels() -> None:
    hostile = 'a"b\\c\nd} 1\nagentrl_fake 2'
    found = parse(render([PrometheusMetric("runs", "Runs.", [({"run": hostile}, 1.0)])]))
    assert found == {"agentrl_runs": [({"run": hostile}, 1.0)]}


def test_metrics_port_differs_for_each_role() -> None:
    where = Settings(metrics_port=9464)
    assert sorted(port_of(where, [role]) for role in ROLES) == list(range(9464, 9464 + len(ROLES)))
    assert port_of(where, ["control"]) == 9464
    assert port_of(where, ["rollout", "train"]) == 9465
    assert port_of(Settings(), ["control"]) == 0


def test_metrics_are_off_and_local_by_default() -> None:
    assert serve_metrics(Settings(), ["control"], lambda: pytest.fail("no database is opened")) is None
    assert Settings().metrics_host == "127.0.0.1"


def test_metrics_are_served_over_http(database: Database, port: int) -> None:
    start(database, submission())
    server = serve_metrics(Settings(metrics_port=port), ["control"], lambda: database)
    assert server is not None
    try:
        found = parse(read(port))
        assert ({"queue": "rollout", "state": "waiting"}, 2.0) in found["agentrl_work"]
        assert found["agentrl_peak_memory_bytes"][0][1] > 1e6
        assert found["agentrl_machine_processors"][0][1] >= 1
        with pytest.raises(urllib.error.HTTPError, match="404"):
            read(port, "/")
        assert serve_metrics(Settings(metrics_port=port), ["control"], lambda: database) is None  # the port is taken
    finally:
        server.shutdown()
        server.server_close()


def test_metrics_survive_clients_that_never_finish(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CONNECTION_SECONDS", 1.0)
    before = threading.active_count()
    server = serve_metrics(Settings(metrics_port=port), ["control"], lambda: pytest.fail("not asked"))
    assert server is not None
    clients = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(metrics.MAX_CONNECTIONS + 4)]
    try:
        for client in clients[:4]:
            with suppress(OSError):
                client.sendall(b"GET /met")
        while any(_drips(client) for client in clients):
            assert threading.active_count() <= before + 1 + metrics.MAX_CONNECTIONS
            time.sleep(0.1)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            read(port, "/")
    finally:
        for client in clients:
            client.close()
        server.shutdown()
        server.server_close()


def _drips(client: socket.socket) -> bool:
    """Send one byte more; return whether the server still takes it."""
    try:
        client.sendall(b"x")
    except OSError:
        return False
    return True


def test_metrics_name_the_newest_running_runs_only(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_work, "_RUNNING", open_work._RUNNING.replace(f"LIMIT {open_work.MAX_RUNS}", "LIMIT 2"))
    for name in ("a", "b", "c"):
        start(database, submission(name))
    assert sorted(row["run"] for row in open_work.count_work(database).running) == ["b", "c"]


def test_metrics_without_the_database_are_one_sentence(port: int) -> None:
    def away() -> Database:
        raise ServiceError("The database does not answer.", "Start it.")

    server = serve_metrics(Settings(metrics_port=port), ["control"], away)
    assert server is not None
    try:
        with pytest.raises(urllib.error.HTTPError, match="503") as caught:
            read(port)
        assert caught.value.read() == b"The database does not answer. Start it.\n"
    finally:
        server.shutdown()
        server.server_close()


def test_metrics_include_those_of_a_module(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_collectors", [])
    metrics.add_collector(lambda: [PrometheusMetric("sampler_turns", "Turns.", [({"of": "live"}, 3)])])
    where = Settings(metrics_port=port - port_of(Settings(metrics_port=1), ["endpoint"]) + 1)
    server = serve_metrics(where, ["endpoint"], lambda: pytest.fail("no database is opened"))
    assert server is not None
    try:
        assert parse(read(port))["agentrl_sampler_turns"] == [({"of": "live"}, 3.0)]
    finally:
        server.shutdown()
        server.server_close()


def test_log_records_in_json_have_context_fields() -> None:
    record = logging.LogRecord("agentrl.train", logging.WARNING, "f", 1, "iteration %d\nfailed", (3,), None)
    with log_fields(run="first", iteration=3), log_fields(attempt=2):
        row = json.loads(JsonFormatter().format(record))
        inherited = copy_context()
    assert {key: row[key] for key in ("run", "iteration", "attempt", "level", "logger", "message")} == {
        "run": "first",
        "iteration": 3,
        "attempt": 2,
        "level": "WARNING",
        "logger": "agentrl.train",
        "message": "iteration 3\nfailed",
    }
    assert "\n" not in JsonFormatter().format(record)
    assert "run" not in json.loads(JsonFormatter().format(record))
    threads: list[str] = []
    thread = threading.Thread(target=inherited.run, args=[lambda: threads.append(JsonFormatter().format(record))])
    thread.start()
    thread.join()
    assert json.loads(threads[0])["attempt"] == 2


class Hook:
    """A server that keeps what it is sent; while `broken` it answers 500."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.broken = False
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not hook.broken:
                    hook.bodies.append(body)
                self.send_response(500 if hook.broken else 204)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook"


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    yield made
    made.server.shutdown()
    made.server.server_close()


def tend(notifier: Notifier, db: Database) -> None:
    """Send what is new, and wait until it is sent."""
    notifier.tend(db)
    notifier.join()


def test_notifier_posts_waiting_and_ended_run_once(database: Database, hook: Hook) -> None:
    notifier = Notifier(Settings(notify_url=hook.url))
    tend(notifier, database)  # what happened before is history
    run = planning.submit(database, submission()).id
    blocked_runs.wait_for(database, run, "The sandbox is away.")
    planning.stop(database, "first", "cancelled", "cancelled by hand")
    for _ in range(2):
        tend(notifier, database)
        tend(Notifier(Settings(notify_url=hook.url)), database)  # another control loop goes on
    told = [(body["event"], body["run"], body["status"], body["detail"]) for body in hook.bodies]
    assert told == [
        ("waiting", "first", "waiting", "The sandbox is away."),
        ("run_end", "first", "cancelled", "cancelled by hand"),
    ]


def test_notifier_gives_up_failing_server(database: Database, hook: Hook) -> None:
    notifier = Notifier(Settings(notify_url=hook.url))
    tend(notifier, database)
    planning.submit(database, submission())
    planning.stop(database, "first", "paused", "one")
    hook.broken = True
    for _ in range(3):
        tend(notifier, database)
    hook.broken = False
    planning.stop(database, "first", "cancelled", "two")
    tend(notifier, database)
    assert [body["detail"] for body in hook.bodies] == ["two"]
    assert run_events.list_unsent_events(database) == []


def test_notifier_command_reads_event_on_stdin(database: Database, tmp_path: Path) -> None:
    file = tmp_path / "told.json"
    code = f"import sys; open({str(file)!r}, 'a').write(sys.stdin.read())"
    notifier = Notifier(Settings(notify_command=f'{sys.executable} -c "{code}"'))
    tend(notifier, database)
    planning.submit(database, submission())
    planning.stop(database, "first", "failed", "the loss is nan")
    tend(notifier, database)
    assert json.loads(file.read_text())["detail"] == "the loss is nan"


def test_notifier_ends_hanging_command_with_its_children(
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(notify, "COMMAND_SECONDS", 2.0)
    script, pids = tmp_path / "hang.sh", tmp_path / "pids"
    script.write_text(f"sleep 600 &\necho $! >> {pids}\necho noise; echo noise >&2\nwait\n")
    notifier = Notifier(Settings(notify_command=f"sh {script}"))
    tend(notifier, database)
    planning.submit(database, submission())
    planning.stop(database, "first", "failed", "the loss is nan")
    tend(notifier, database)
    assert "the command took more than 2 s" in caplog.text
    assert "noise" not in "".join(capfd.readouterr())
    (pid,) = pids.read_text().split()
    until = time.monotonic() + 30  # a killed process ends when it is scheduled next
    while fields(int(pid))[:1] not in ([], ["Z"]):
        assert time.monotonic() < until, f"the child {pid} still runs"
        time.sleep(0.01)
    failing = Notifier(Settings(notify_command="sh -c 'exit 3'"))
    tend(failing, database)
    assert "the command ended with exit code 3" in caplog.text


@pytest.mark.parametrize(("name", "value"), [("notify_url", "file:///etc/passwd"), ("notify_command", "say 'it")])
def test_settings_refuse_a_target_that_cannot_be_notified(name: str, value: str) -> None:
    make: Callable[..., Settings] = Settings
    with pytest.raises(ValidationError):
        make(**{name: value})
