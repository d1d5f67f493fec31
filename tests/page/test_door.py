"""Who is let in to the page, and what every answer binds the browser to."""

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from agentrl.workers.page import page_server
from agentrl.workers.page.door import HEADERS, MAX_BODY_BYTES, RequestGuard, Rules, names_of
from agentrl.workers.page.read_only import ReadOnlyStore
from agentrl.workers.page.service import application
from agentrl.workflow.settings import Settings
from agentrl.workflow.store.connect import Database

PORT = 7788
LOCAL = Rules(names_of("127.0.0.1", ()), PORT)
TOKEN = "t0ken-of-the-page"
OPEN = Rules(names_of("", ("trainer", "trainer.lab.example")), PORT, addresses=True, token=TOKEN)
OWN = {"X-Agentrl": "1"}


@pytest.fixture
def store(sqlite: Database, tmp_path: Path) -> ReadOnlyStore:
    return ReadOnlyStore(Settings(home=tmp_path, database_url=sqlite.url.render_as_string(hide_password=False)))


@cache
def served(store: ReadOnlyStore, actions: bool = False) -> FastAPI:
    return application(store, actions)


def ask(store: ReadOnlyStore, rules: Rules, path: str, host: str = f"127.0.0.1:{PORT}", **how: Any) -> httpx2.Response:
    """One request to the page as it is served."""
    method, headers = how.pop("method", "GET"), {"Host": host, **how.pop("headers", {})}

    door = how.pop("door", None) or RequestGuard(served(store, bool(rules.action_token)), rules)

    async def send() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=door), base_url="http://127.0.0.1") as client:
            return await client.request(method, path, headers=headers, **how)

    return asyncio.run(send())


def test_page_start_token_works_once(store: ReadOnlyStore) -> None:
    rules = replace(OPEN, once="first")
    door = RequestGuard(served(store), rules)
    answers = [ask(store, rules, "/?token=first", "trainer:7788", door=door) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [303, 401]
    assert f"agentrl_ui_7788={TOKEN}" in answers[0].headers["set-cookie"]
    assert ask(store, rules, f"/?token={TOKEN}", "trainer:7788", door=door).status_code == 303
    assert ask(store, replace(rules, once=""), "/?token=", "trainer:7788").status_code == 401


@pytest.mark.parametrize("host", ["127.0.0.1:7788", "localhost:7788", "LOCALHOST:7788", "[::1]:7788"])
def test_page_accepts_names_of_this_machine(store: ReadOnlyStore, host: str) -> None:
    assert ask(store, LOCAL, "/api/store", host).status_code == 200


def test_page_refuses_foreign_host_on_every_path(store: ReadOnlyStore) -> None:
    for host in (
        "evil.example",
        "evil.example:7788",
        "127.0.0.1",
        "127.0.0.1:80",
        "127.0.0.1.evil.example:7788",
        "",
        ":7788",
        "localhost:7788.evil",
        "localhost.:7788",
        "user@localhost:7788",
        "[::1",
        "[evil]:7788",
        "127.0.0.1:7788, evil.example",
        "10.0.0.1:7788",
        "127.0.0.1:07788",
    ):
        for path in ("/", "/api/store", "/static/app.js", "/api/nothing"):
            assert ask(store, LOCAL, path, host).status_code == 421, (host, path)


def test_page_refuses_two_host_headers(store: ReadOnlyStore) -> None:
    sent: list[Mapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1:7788"), (b"host", b"evil.example")]
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/api/store",
        "raw_path": b"/api/store",
        "query_string": b"",
        "headers": headers,
    }
    asyncio.run(RequestGuard(served(store), LOCAL)(scope, receive, send))
    assert sent[0]["status"] == 421


def test_page_answers_have_security_headers(store: ReadOnlyStore) -> None:
    answers = [
        ask(store, LOCAL, "/"),
        ask(store, LOCAL, "/api/store"),
        ask(store, LOCAL, "/api/runs/99"),
        ask(store, LOCAL, "/static/nothing.js"),
        ask(store, LOCAL, "/", "evil.example"),
        ask(store, LOCAL, "/api/store", method="DELETE"),
    ]
    assert [found.status_code for found in answers] == [200, 200, 404, 404, 421, 405]
    for found in answers:
        for name, value in HEADERS:
            assert found.headers.get_list(name.decode()) == [value.decode()], found
        assert "access-control-allow-origin" not in found.headers
        assert len(found.headers.get_list("cache-control")) == 1
    assert "unsafe" not in answers[0].headers["content-security-policy"]


def test_page_refuses_forged_requests_of_other_sites(store: ReadOnlyStore) -> None:
    query = {"query": "SELECT 1"}
    forged = [
        {},
        {"Origin": "http://127.0.0.1:7788"},
        {**OWN, "Origin": "http://evil.example"},
        {**OWN, "Origin": "null"},
        {**OWN, "Origin": "http://127.0.0.1:7789"},
        {**OWN, "Origin": "http://127.0.0.1:7788.evil.example"},
        {"X-Agentrl": "2"},
    ]
    for headers in forged:
        assert ask(store, LOCAL, "/api/sql", method="POST", json=query, headers=headers).status_code == 403, headers
    for headers in (OWN, {**OWN, "Origin": "http://127.0.0.1:7788"}):
        assert ask(store, LOCAL, "/api/sql", method="POST", json=query, headers=headers).status_code not in (401, 403), headers


def test_page_refuses_other_methods(store: ReadOnlyStore) -> None:
    assert {
        ask(store, LOCAL, "/api/store", method=method, headers=OWN).status_code
        for method in ("PUT", "DELETE", "OPTIONS", "PATCH", "TRACE")
    } == {405}
    large = ask(store, LOCAL, "/api/sql", method="POST", content=b"x" * (MAX_BODY_BYTES + 1), headers=OWN)
    assert large.status_code == 413

    async def drip() -> Any:
        yield b"{}"

    assert ask(store, LOCAL, "/api/sql", method="POST", content=drip(), headers=OWN).status_code == 413


def test_page_actions_need_option_and_token(store: ReadOnlyStore) -> None:
    refused = ask(store, LOCAL, "/api/actions/tag", method="POST", json={}, headers=OWN)
    assert refused.status_code == 403
    assert "agentrl ui --actions" in refused.json()["hint"]
    acting = Rules(LOCAL.names, PORT, action_token=TOKEN)
    assert ask(store, acting, "/api/actions/tag", method="POST", json={}, headers=OWN).status_code == 401
    wrong = {**OWN, "Cookie": f"{acting.cookie}=wrong"}
    assert ask(store, acting, "/api/actions/tag", method="POST", json={}, headers=wrong).status_code == 401
    assert ask(store, acting, "/api/store").status_code == 200
    right = {**OWN, "Cookie": f"{acting.cookie}={TOKEN}"}
    assert ask(store, acting, "/api/actions/nothing", method="POST", json={}, headers=right).status_code in (404, 405, 422)


def test_page_on_other_interface_always_needs_token(store: ReadOnlyStore) -> None:
    for path in ("/", "/api/store", "/static/app.js", "/api/openapi.json"):
        assert ask(store, OPEN, path, "trainer:7788").status_code == 401, path
    page = ask(store, OPEN, "/", "trainer:7788")
    assert "token" in page.text
    assert page.headers["content-type"].startswith("text/html")
    assert ask(store, OPEN, "/?token=wrong", "trainer:7788").status_code == 401
    assert ask(store, OPEN, "/?token=", "trainer:7788").status_code == 401
    assert ask(store, OPEN, "/api/store?token=" + TOKEN, "trainer:7788").status_code == 401
    taken = ask(store, OPEN, f"/?token={TOKEN}", "192.168.1.7:7788")
    assert (taken.status_code, taken.headers["location"]) == (303, "/")
    cookie = taken.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    own = cookie.split(";")[0]
    for headers in ({"Cookie": own}, {"Cookie": f"agentrl_ui_7788=bad; {own}"}, {"Authorization": f"Bearer {TOKEN}"}):
        assert ask(store, OPEN, "/api/store", "trainer.lab.example:7788", headers=headers).status_code == 200
    for host in ("evil.example:7788", "trainer.evil.example:7788"):
        assert ask(store, OPEN, "/api/store", host, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 421


def test_page_link_in_compose_opens_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "settings", lambda: Settings(image=True))
    with socket.create_server(("0.0.0.0", 0)) as listening:
        opened = page_server.prepare_door(listening, "secret", actions=False)
    assert opened.link == f"http://127.0.0.1:{opened.rules.port}/?token=secret"
    assert opened.rules.token == "secret"
    assert "127.0.0.1" in opened.rules.names


def test_page_refuses_foreign_cookies(store: ReadOnlyStore) -> None:
    for cookie in ("", "=", "agentrl_ui_7788", f"agentrl_ui_7789={TOKEN}", f"other={TOKEN}", "\xff\xfe;=;", "a" * 8000):
        assert (
            ask(store, OPEN, "/api/store", "trainer:7788", headers={"Cookie": cookie.encode("latin-1")}).status_code == 401
        ), cookie


def test_page_static_paths_stay_in_folder(store: ReadOnlyStore) -> None:
    for path in (
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e%2fapp.py",
        "/static//etc/passwd",
        "/static/....//app.py",
        "/static/vendor/../../app.py",
        "/static/%00",
        "/static/app.js%00.css",
        "/static/\\..\\app.py",
        "/static/",
        "/static/vendor",
        "/etc/passwd",
    ):
        found = ask(store, LOCAL, path)
        assert found.status_code == 404, path
        assert "import" not in found.text, path
        assert "root:" not in found.text, path


def test_page_files_have_types_and_are_cached(store: ReadOnlyStore) -> None:
    kinds = {
        "/": "text/html",
        "/static/app.js": "text/javascript",
        "/static/app.css": "text/css",
        "/static/icon.svg": "image/svg+xml",
    }
    for path, kind in kinds.items():
        found = ask(store, LOCAL, path)
        assert found.headers["content-type"].split(";")[0] == kind, path
        again = ask(store, LOCAL, path, headers={"If-None-Match": found.headers["etag"]})
        assert path == "/" or again.status_code == 304, path


def test_page_serves_openapi_description(store: ReadOnlyStore) -> None:
    found = ask(store, LOCAL, "/api/openapi.json").json()
    assert {"/api/store", "/api/runs", "/api/runs/{run}/curves"} <= found["paths"].keys()
    for path, methods in found["paths"].items():
        for method, told in methods.items():
            assert told["description"], (path, method)
