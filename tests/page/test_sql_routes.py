"""The guarded console of the page: one SELECT, bounded, on SQLite and as the reader of a Postgres."""

import asyncio
import json
import resource
import sqlite3
from contextlib import closing
from threading import BoundedSemaphore
from typing import Any

import httpx2
import pytest

from agentrl.workers.page.read_only import ReadOnlyStore
from agentrl.workers.page.routes.sql_routes import MAX_BODY
from agentrl.workers.page.service import application
from agentrl.workflow.settings import Settings
from agentrl.workflow.store.connect import Database
from tests.support.played_runs import play, start, submission

HEADERS = {"X-Agentrl": "1", "Content-Type": "application/json"}


def post(where: Settings, body: bytes) -> tuple[int, Any]:
    """The status and the document that the console answers."""

    async def send() -> httpx2.Response:
        transport = httpx2.ASGITransport(application(ReadOnlyStore(where)))
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:7788") as client:
            return await client.post("/api/sql", content=body, headers=HEADERS)

    answered = asyncio.run(send())
    return answered.status_code, json.loads(answered.content.decode())


def ask(database: Database, query: str) -> tuple[int, Any]:
    """What a SELECT gives."""
    where = Settings(database_url=database.url.render_as_string(hide_password=False))
    return post(where, json.dumps({"query": query}).encode())


def test_sql_route_gives_columns_rows_and_time(sqlite: Database) -> None:
    play(sqlite, start(sqlite, submission())[0])
    status, found = ask(sqlite, "SELECT id, reward, status, NULL AS none FROM v_episodes WHERE reward IS NOT NULL ORDER BY id")
    assert status == 200
    assert found["columns"] == ["id", "reward", "status", "none"]
    assert [row[1:] for row in found["rows"]] == [[0.0, "done", None], [1.0, "done", None]]
    assert (found["cut"], found["cells_cut"]) == (False, 0)
    assert found["seconds"] < 5


def test_sql_route_refuses_all_but_select_in_one_sentence(sqlite: Database) -> None:
    for query, status, said in (
        ("DELETE FROM runs", 403, "does more than read"),
        ("SELECT 1; SELECT 2", 403, "Only one statement"),
        ("PRAGMA writable_schema = 1", 403, "does more than read"),
        ("ATTACH '/tmp/x' AS x", 403, "does more than read"),
        ("SELEC", 422, "Invalid query"),
        ("SELECT * FROM v_episode", 422, "Invalid query"),
        ("", 403, "gives no rows"),
        ("SELECT '\0'", 403, "NUL"),
        ("SELECT '\ud800'", 422, "surrogate"),
    ):
        found, document = ask(sqlite, query)
        assert (found, said in document["error"]) == (status, True), document


def test_sql_route_cuts_many_rows_and_long_values(sqlite: Database) -> None:
    count = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 5000)"
    _, found = ask(sqlite, f"{count} SELECT x FROM n")
    assert (len(found["rows"]), found["cut"]) == (1000, True)
    _, found = ask(sqlite, f"{count} SELECT printf('%.*c', 30000, 'a') AS long FROM n LIMIT 500")
    assert found["cells_cut"] == 500
    assert sum(len(row[0]) for row in found["rows"]) < 4_200_000


def test_sql_route_converts_values_outside_json(sqlite: Database) -> None:
    _, found = ask(sqlite, "SELECT 9e999 AS inf, -9e999, x'00ff' AS blob, 9223372036854775807 AS big, 9007199254740991")
    assert found["rows"][0][:3] == [None, None, "(2 bytes)"]
    assert found["rows"][0][3:] == ["9223372036854775807", 2**53 - 1]  # a browser would lose the digits of the first
    assert ask(sqlite, "SELECT char(0xd800)")[0] in (200, 422)


def test_sql_route_stops_slow_query(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.workers.page.routes.sql_routes.SECONDS", 0.2)
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    status, found = ask(sqlite, endless)
    assert (status, "took longer" in found["error"]) == (403, True)


def test_sql_route_refuses_body_without_query(sqlite: Database) -> None:
    where = Settings(database_url=sqlite.url.render_as_string(hide_password=False))
    for body in (b"", b"[]", b"{", b'{"query": 1}', b"\xff", b"[" * 90_000, b'{"query": "' + b"1" * 90_000):
        assert post(where, body)[0] == 422, body[:20]


def test_sql_route_refuses_long_body(sqlite: Database) -> None:
    where = Settings(database_url=sqlite.url.render_as_string(hide_password=False))
    status, found = post(where, b" " * (MAX_BODY + 1))
    assert (status, "more than 100000 bytes" in found["error"]) == (403, True)


def test_sql_route_uses_postgres_reader_and_numbers(postgres: Database) -> None:
    status, found = ask(postgres, "SELECT avg(x) AS mean, 'NaN'::float8 AS none, current_user FROM (VALUES (1), (2)) v(x)")
    assert (status, found.get("rows")) == (200, [[1.5, None, "agentrl_reader"]]), found
    assert ask(postgres, "DELETE FROM runs")[0] == 403


def test_sql_route_without_postgres_or_reader_says_what_to_do(postgres: Database) -> None:
    url = postgres.url.render_as_string(hide_password=False)
    for other in (postgres.url.set(username="nobody_here"), postgres.url.set(host="127.0.0.1", port=1, query={})):
        where = Settings(database_url=url, database_reader_url=other.render_as_string(hide_password=False))
        status, found = post(where, b'{"query": "SELECT 1"}')
        assert (status in (403, 500, 503), bool(found["hint"])) == (True, True), found


def test_sql_route_ends_process_of_uninterruptible_query(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.workers.page.routes.sql_routes.SECONDS", 1.0)
    long = "SELECT instr(hex(zeroblob(12000000)), hex(zeroblob(6000000)) || '1')"
    status, found = ask(sqlite, long)
    assert (status, "stopped" in found["error"]) == (403, True), found
    assert ask(sqlite, "SELECT 1")[1]["rows"] == [[1]]


def test_sql_route_bounds_memory_of_query(sqlite: Database) -> None:
    status, found = ask(sqlite, "SELECT rl_f4(zeroblob(60000000)), hex(zeroblob(20000000))")
    assert status in (403, 422), found
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2_000_000


def test_sql_route_of_locked_store_is_busy(sqlite: Database) -> None:
    sqlite.close()
    with closing(sqlite3.connect(str(sqlite.url.database), isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        status, found = ask(sqlite, "SELECT * FROM v_runs")
    assert (status, "locked" in found["error"]) == (503, True), found


def test_sql_route_beyond_limit_is_refused_at_once(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    room = BoundedSemaphore(1)
    monkeypatch.setattr("agentrl.workers.page.routes.sql_routes._waiting", room)
    with room:
        status, found = ask(sqlite, "SELECT 1")
    assert (status, "still running" in found["error"]) == (503, True)
    assert ask(sqlite, "SELECT 1")[0] == 200
