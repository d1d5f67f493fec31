"""What a page is told while a run goes on, by a real uvicorn over both databases."""

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

import pytest
import uvicorn
from sqlalchemy import text

from agentrl.workers.page import live_routes as live
from agentrl.workers.page.read_only import Busy, ReadOnlyStore
from agentrl.workers.page.service import application
from agentrl.workflow.settings import Settings
from agentrl.workflow.store import planning, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.machine_loads import HostLoad, record_load
from agentrl.workflow.store.reads import changes
from agentrl.workflow.store.train_claims import IterationWork
from tests.support.played_runs import claim_training, play, start, submission, update_of

SOON = 1.0
"""A committed iteration is told within this time."""


@dataclass
class Served:
    """A page's service in a thread."""

    port: int
    app: Any
    server: uvicorn.Server

    def listen(self, run: int | str | None = None, last: str = "", seconds: float = 10.0, **asked: Any) -> "Listener":
        """A listener, as a browser's."""
        query = "&".join(f"{name}={value}" for name, value in ({"run": run} | asked).items() if value is not None)
        return Listener(self.port, f"/api/live?{query}", last, seconds)

    @property
    def listeners(self) -> int:
        found: int = self.app.state.live.listeners
        return found


class Listener:
    """One connection that reads events."""

    def __init__(self, port: int, path: str, last: str, seconds: float) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
        self.connection.request("GET", path, headers={"Last-Event-ID": last} if last else {})
        self.answer = self.connection.getresponse()

    def block(self) -> dict[str, str]:
        """The next block of lines: of an event, of `retry`, of a comment."""
        found = {}
        while line := self.answer.readline().decode().rstrip("\n"):
            name, _, value = line.partition(": ")
            found[name] = value
        return found

    def event(self, kind: str = "change") -> dict[str, Any]:
        """The next event, which is of that kind: its data and its id. New loads of hosts are passed over, unless asked for."""
        while (block := self.block()).get("event", "machine") == "machine" != kind or "event" not in block:
            assert block, "the stream ended"
        assert block["event"] == kind, block
        return {"id": block.get("id"), **json.loads(block["data"])}

    def close(self) -> None:
        self.connection.close()
        self.answer.close()


@contextmanager
def serving(database: Database) -> Iterator[Served]:
    url = database.url.render_as_string(hide_password=False)
    app = application(ReadOnlyStore(Settings(database_url=url)))
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        app.state.is_ending = lambda: server.should_exit
        thread = Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        try:
            yield Served(listening.getsockname()[1], app, server)
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def served(database: Database) -> Iterator[Served]:
    """The service over the test's database."""
    with serving(database) as made:
        yield made


def rolled_out(database: Database, name: str = "first", tasks: int = 2) -> IterationWork:
    """A run whose first iteration waits for its update."""
    for group in start(database, submission(name, tasks=tasks)):
        ended = play(database, group, 1.0)
    assert ended.iteration is not None
    return claim_training(database, ended.iteration)


def commit(database: Database, work: IterationWork) -> None:
    train_commits.commit_update(database, work, update_of(work), 3)


def test_live_stream_sends_committed_iteration_within_a_second(database: Database, served: Served) -> None:
    work = rolled_out(database, tasks=4)
    page = served.listen(1)
    assert page.answer.getheader("content-type", "").startswith("text/event-stream")
    assert page.block() == {"retry": "2000"}
    first = page.event()
    assert [row[:2] for row in first["iterations"]] == [[1, "running"]]
    assert first["run_row"]["run"] == "first"
    began = time.monotonic()
    commit(database, work)
    told = page.event()
    assert time.monotonic() - began < SOON
    assert told["iterations"][0][:2] == [1, "done"]
    assert told["run_row"]["iterations_done"] == 1
    assert told["progress"]["iteration"] == 2
    page.close()


def test_live_stream_resumes_with_changes_since_cut(database: Database, served: Served) -> None:
    work = rolled_out(database, tasks=4)
    page = served.listen(1)
    first = page.event()
    page.close()
    commit(database, work)
    again = served.listen(1, last=first["id"])
    told = again.event()
    assert [row[0] for row in told["iterations"]] == [1, 2]
    again.close()
    for asked in ({"last": told["id"]}, {"since": told["id"]}):
        quiet = served.listen(1, seconds=1.5, **asked)
        with pytest.raises(TimeoutError):
            quiet.event()
        quiet.close()
    for nonsense in ("", "x", "-1.2", "9" * 50 + ".a", "1", "5.", "%F0%9F%A6%8A.1"):
        fresh = served.listen(1, since=nonsense)
        assert fresh.event()["id"] == told["id"]
        fresh.close()


def test_live_stream_of_runs_reports_submission_and_end(database: Database, served: Served) -> None:
    page = served.listen()
    page.event()
    work = rolled_out(database)
    submitted = page.event()
    assert submitted["id"]
    commit(database, work)
    while (ended := page.event())["id"] == submitted["id"]:
        pass
    assert ended["id"] != submitted["id"]
    page.close()


@pytest.mark.parametrize("run", [None, 1])
def test_live_stream_reports_new_load_without_change(database: Database, served: Served, run: int | None) -> None:
    planning.submit(database, submission())
    page = served.listen(run)
    page.event()
    assert record_load(database, "host", HostLoad(0.5, 1, 2, None), None, None)
    assert page.event("machine") == {"id": None}
    page.close()


def test_live_stamp_moves_by_pause_event_and_episode(database: Database, served: Served) -> None:
    first, _ = start(database, submission())
    stamps = [changes.find_state(served.app.state.store, 1)]
    play(database, first, 1.0)
    stamps.append(changes.find_state(served.app.state.store, 1))
    planning.stop(database, "first", "paused", "by hand")
    stamps.append(changes.find_state(served.app.state.store, 1))
    with database.engine.begin() as tx:
        tx.execute(text("INSERT INTO events (run_id, kind) VALUES (1, 'waiting')"))
    stamps.append(changes.find_state(served.app.state.store, 1))
    assert len({(state.stamp, state.work) for state in stamps if state}) == 4
    assert len({state.stamp for state in stamps[:2] if state}) == 1  # an episode is work, which may wait to be told


def test_live_stream_limits_episode_events_but_not_iterations(
    database: Database, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "WORK_SECONDS", 1.5)
    groups = start(database, submission())
    page = served.listen(1)
    assert page.event()["progress"]["finished"] == 0
    began = time.monotonic()
    ended = play(database, groups[0], 1.0)
    assert page.event()["progress"]["finished"] == 2
    assert time.monotonic() - began >= 0.9
    play(database, groups[1], 1.0)
    assert ended.iteration is None
    began = time.monotonic()
    with database.engine.begin() as tx:
        tx.execute(text("INSERT INTO events (run_id, kind) VALUES (1, 'waiting')"))
    page.event()
    assert time.monotonic() - began < SOON
    page.close()


def test_live_stream_of_missing_or_removed_run_ends_with_gone(database: Database, served: Served) -> None:
    for number in (7, 0, -1, 2**70):
        page = served.listen(number)
        page.event("gone")
        assert page.answer.read() == b""
        page.close()
    with closing(served.listen("x")) as refused:
        assert refused.answer.status == 422


def test_live_listeners_of_a_run_share_one_query(database: Database, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    work = rolled_out(database, tasks=4)
    looks, readings = [], []
    see, changes = live._see, live._changes
    monkeypatch.setattr(live, "_see", lambda *asked: looks.append(asked) or see(*asked))
    monkeypatch.setattr(live, "_changes", lambda *asked: readings.append(asked) or changes(*asked))
    pages = [served.listen(1) for _ in range(8)]
    for page in pages:
        page.event()
    assert served.listeners == 8
    looks.clear()
    readings.clear()
    began = time.monotonic()
    commit(database, work)
    for page in pages:
        page.event()
    time.sleep(max(0.0, 2.0 - (time.monotonic() - began)))
    assert 2 <= len(looks) <= 5
    assert len(readings) == 1
    for page in pages:
        page.close()
    deadline = time.monotonic() + 5
    while served.listeners:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.1)
    looks.clear()
    time.sleep(2 * live.LOOK_SECONDS)
    assert looks == []  # nobody listens, nobody looks


@pytest.mark.parametrize("error", [Busy("The store cannot be read now: locked."), KeyError("a mistake of ours")])
def test_live_stream_reports_failed_check_and_retries(
    database: Database, served: Served, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    work = rolled_out(database, tasks=4)
    page = served.listen(1)
    page.event()
    find = changes.find_state

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(changes, "find_state", fail)
    assert page.event("busy")["error"].startswith("The store cannot be read")
    commit(database, work)
    monkeypatch.setattr(changes, "find_state", find)
    assert page.event()["iterations"][0][1] == "done"
    page.close()


def test_live_stream_reports_failed_read_and_retries(
    database: Database, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = rolled_out(database, tasks=4)
    page = served.listen(1)
    page.event()
    changes = live._changes

    def busy(*_: Any) -> None:
        raise Busy("The store cannot be read now: locked.")

    monkeypatch.setattr(live, "_changes", busy)
    commit(database, work)
    page.event("busy")
    monkeypatch.setattr(live, "_changes", changes)
    told = page.event()  # although nothing is committed any more
    assert told["iterations"][0][1] == "done"
    page.close()


def test_live_stream_sends_comments_during_silence(database: Database, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "COMMENT_SECONDS", 0.3)
    planning.submit(database, submission())
    page = served.listen(1)
    page.event()
    assert page.block() == {": still here": ""} or page.block() == {"": "still here"}
    page.close()


def test_live_stream_beyond_limit_is_503_with_retry_after(
    database: Database, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_LISTENERS", 2)
    planning.submit(database, submission())
    pages = [served.listen(1), served.listen()]
    for page in pages:
        page.event()
    refused = served.listen(1)
    assert refused.answer.status == 503
    assert refused.answer.getheader("retry-after") == "1"
    assert json.loads(refused.answer.read())["hint"]
    refused.close()
    for page in pages:
        page.close()


def test_live_listeners_do_not_delay_shutdown(database: Database) -> None:
    planning.submit(database, submission())
    with serving(database) as served:
        pages = [served.listen(1), served.listen()]
        for page in pages:
            page.event()
        began = time.monotonic()
    assert time.monotonic() - began < 2.5
    for page in pages:
        page.close()


def test_live_check_of_long_run_is_cheap(database: Database) -> None:
    planning.submit(database, submission())
    with database.engine.begin() as tx:
        (policy,) = tx.execute(text("SELECT min(id) FROM policies")).scalars()
        rows = [{"n": n, "p": policy} for n in range(1000, 3000)]
        query = "INSERT INTO iterations (run_id, number, epoch, policy_id, status) VALUES (1, :n, 0, :p, 'done')"
        tx.execute(text(query), rows)
    store = ReadOnlyStore(Settings(database_url=database.url.render_as_string(hide_password=False)))
    changes.find_state(store, 1)
    began = time.process_time()
    for _ in range(20):
        changes.find_state(store, 1)
    assert (time.process_time() - began) / 20 < 0.02 * live.LOOK_SECONDS * 2  # 2 % of a core, twice over for a slow machine
