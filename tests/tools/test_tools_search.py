"""search: the best passages first, of a folder, of JSON lines, of a server; fetch: only what is allowed, and no more of it."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.workers.jobs.tool_call import run_tool
from agentrl.workflow.errors import ConfigError, InfraError, ServiceError, ToolFailure
from agentrl.workflow.plugins import find
from agentrl.workflow.runtime.html_text import extract_text
from agentrl.workflow.settings import settings
from agentrl.workflow.store.tool_calls import CallWork
from agentrl.workflow.tools import fetch, search
from agentrl.workflow.tools.fetch import fetch_from
from agentrl.workflow.tools.search import MAX_BYTES, PASSAGE, Passage, index, search_in, split_text

Answer = tuple[int, dict[str, str], bytes]


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler, bytes], Answer]) -> Iterator[str]:
    """`HOST:PORT` of a web server that answers so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, headers, content = answer(self, body)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            try:
                self.wfile.write(content)
            except OSError:
                self.close_connection = True  # whoever asked had enough

        do_POST = do_GET  # noqa: N815 - http.server's name

        def log_message(self, *words: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


# --- search -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three texts and what is none."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "bees.md").write_text("# Bees\n\nBees dance to tell where flowers are.\n\nA hive has one queen.")
    (tmp_path / "deep" / "ants.TXT").write_text("Ants follow trails. Ants carry leaves. A flower is nothing to them.")
    (tmp_path / "deep" / "owls.rst").write_bytes(b"Owls fly at night. Caf\xe9.")
    (tmp_path / "picture.png").write_bytes(b"ants ants ants")
    return tmp_path


def test_search_puts_best_passages_of_folder_first(folder: Path) -> None:
    tool = search_in(folder)
    found = tool.call({"query": "Which ants carry LEAVES?"})
    assert found.startswith("[1] deep/ants.TXT\nAnts follow trails.")
    assert "picture" not in found
    assert tool.call({"query": "flowering", "k": 1}).splitlines()[0] == "[1] bees.md"  # by its stem
    assert tool.call({"query": "cafe night"}).startswith("[1] deep/owls.rst")
    assert tool.call({"query": "submarine"}) == "nothing was found; try other words"


def test_search_reads_jsonl_collection(tmp_path: Path) -> None:
    file = tmp_path / "wiki.jsonl"
    rows = [{"title": "Bees", "text": "They dance."}, {"contents": "Ants carry."}, {"title": "Carry", "text": "A verb. " * 300}]
    file.write_text("\n\n".join(map(json.dumps, rows)))
    tool = search_in(str(file))
    assert tool.call({"query": "dance"}) == "[1] Bees\nThey dance."
    assert tool.call({"query": "ants", "k": 1}) == "[1] wiki/3\nAnts carry."
    assert tool.call({"query": "verb carry", "k": 2}).count("[") == 2  # a long text is several passages


def test_search_builds_index_once_for_all_threads() -> None:
    made = []

    def passages() -> Iterator[Passage]:
        made.append(1)
        yield Passage("a", "apple")

    tool = search_in(passages)
    work = CallWork(1, "e", "search", {"query": "apple"}, "none")
    threads = [threading.Thread(target=run_tool, args=(tool, work)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert run_tool(tool, work).content == "[1] a\napple"
    assert made == [1]


def test_search_keeps_order_of_equal_passages() -> None:
    search_all = index(Passage(str(number), "same words") for number in range(50))
    assert [found.title for found in search_all("words", 20)] == [str(number) for number in range(20)]


@given(st.text())
def test_search_accepts_any_query_with_a_word(query: str) -> None:
    if re.search(r"\w", query):
        assert len(EVERYTHING(query, 3)) <= 3
    else:
        with pytest.raises(ToolFailure, match="no word"):
            EVERYTHING(query, 3)


EVERYTHING = index([Passage("NEAR AND OR NOT", 'title: "quoted" * ^ near(a b)')])


@given(st.text())
def test_search_passages_are_text_in_order_within_limit(text: str) -> None:
    found = list(split_text(text * 3))
    assert all(0 < len(piece) <= PASSAGE for piece in found)
    assert "".join("".join(found).split()) == "".join((text * 3).split())


@pytest.mark.parametrize("arguments", [{}, {"query": 5}, {"query": "a", "k": 0}, {"query": "a", "k": 21}, {"query": "?!"}])
def test_search_reports_bad_arguments(folder: Path, arguments: dict[str, object]) -> None:
    with pytest.raises(ToolFailure):
        search_in(folder).call(arguments)


def test_search_refuses_invalid_collection_before_run(tmp_path: Path) -> None:
    (tmp_path / "x.csv").touch()
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"title": "no text"}\n')
    for wrong in ("", tmp_path / "nowhere", tmp_path / "x.csv"):
        with pytest.raises(ConfigError, match="AGENTRL_SEARCH"):
            search_in(wrong).check()
    with pytest.raises(ConfigError, match=r"Line 2 of .*bad\.jsonl"):
        search_in(tmp_path / "bad.jsonl").call({"query": "a"})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no texts"):
        search_in(tmp_path / "empty").call({"query": "a"})


def test_search_tool_uses_collection_of_settings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_SEARCH", str(folder))
    settings.cache_clear()
    tool = search._tool(lambda: settings().search)
    tool.check()
    assert "queen" in tool.call({"query": "queen"})
    monkeypatch.setenv("AGENTRL_FETCH_HOSTS", " a.org, *.b.org ")
    settings.cache_clear()
    assert fetch._allowed_hosts() == ["a.org", "*.b.org"]
    settings.cache_clear()


def test_search_server_failure_is_system_failure() -> None:
    def answer(request: BaseHTTPRequestHandler, body: bytes) -> Answer:
        asked = json.loads(body)
        if asked["query"] == "down":
            return 503, {}, b"later"
        if asked["query"] == "odd":
            return 200, {}, b"[]"
        if asked["query"] == "long":
            return 422, {}, b"too long"
        return 200, {}, json.dumps({"results": [{"title": "T", "text": asked["query"]}] * 5}).encode()

    with answering(answer) as place:
        tool = search_in(f"http://{place}/search")
        assert tool.call({"query": "bees", "k": 2}) == "[1] T\nbees\n\n[2] T\nbees"
        with pytest.raises(ServiceError, match="503: later"):
            tool.call({"query": "down"})
        with pytest.raises(ServiceError, match="without a list of results"):
            tool.call({"query": "odd"})
        with pytest.raises(ToolFailure, match="too long"):
            tool.call({"query": "long"})
    with pytest.raises(ServiceError, match="does not answer"):
        tool.call({"query": "bees"})


HOSTILE_ANSWERS = {
    "more than may be": (b'{"results": [' + b" " * (MAX_BYTES + 1) + b"]}", "more than"),
    "nested without end": (b"[" * 1_000_000, "without a list of results"),
    "a row that is none": (b'{"results": [1]}', "without a list of results"),
    "a text that is none": (b'{"results": [{"text": ' + b"[" * 500 + b"]" * 500 + b"}]}", "without a list of results"),
    "a number of a million digits": (b'{"results": ' + b"9" * 1_000_000 + b"}", "without a list of results"),
    "no text": (b"\xff\xfe[\x00", "without a list of results"),
}


@pytest.mark.parametrize("name", HOSTILE_ANSWERS)
def test_search_server_hostile_answer_is_system_failure(name: str) -> None:
    body, said = HOSTILE_ANSWERS[name]
    with answering(lambda request, asked: (200, {}, body)) as place, pytest.raises(ServiceError, match=said) as told:
        search_in(f"http://{place}/").call({"query": "half \ud800 a pair"})
    assert len(told.value.message) < 1000


DRIPS = {"its head": b"HTTP/1.1 200 OK\r\nX: ", "its body": b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"}


@contextmanager
def dripping(beginning: bytes) -> Iterator[str]:
    """`HOST:PORT` of a server that begins so and goes on a letter at a time, until whoever asked has had enough."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            asked, _ = listening.accept()
            with asked, suppress(OSError):
                asked.sendall(beginning)
                while True:
                    asked.sendall(b" ")
                    time.sleep(0.01)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("beginning", DRIPS.values(), ids=DRIPS)
def test_search_server_dripping_answer_is_system_failure(monkeypatch: pytest.MonkeyPatch, beginning: bytes) -> None:
    monkeypatch.setattr(search, "ANSWER_SECONDS", 0.3)
    with dripping(beginning) as place:
        tool = replace(search_in(f"http://{place}/"), timeout_seconds=5.0)
        before = threading.active_count()
        with pytest.raises(InfraError, match="took longer than"):
            run_tool(tool, CallWork(0, "", "search", {"query": "bees"}, "none"))
        assert threading.active_count() <= before


# --- fetch --------------------------------------------------------------------------------------------------------------------

PAGES: dict[str, Answer] = {
    "/": (
        200,
        {"Content-Type": "text/html; charset=utf-8"},
        b"<h1>Hi</h1><script>x()</script><p>a &amp;\n b<br>c<pre>d\ne</pre>",
    ),
    "/latin": (200, {"Content-Type": "text/plain; charset=latin-1"}, b"caf\xe9"),
    "/odd": (200, {"Content-Type": "text/plain; charset=no-such"}, b"caf\xe9"),
    "/json": (200, {"Content-Type": "application/json"}, b'{"a": 1}'),
    "/binary": (200, {"Content-Type": "image/png"}, b"\x89PNG"),
    "/large": (200, {"Content-Type": "text/plain"}, b"x" * 1_500_000),
    "/zipped": (200, {"Content-Type": "text/plain", "Content-Encoding": "gzip"}, b"\x1f\x8b"),
    "/gone": (404, {}, b"no"),
    "/puny": (200, {"Content-Type": "text/plain; charset=punycode"}, b"a" * 900_000 + b"-" + b"b" * 90_000),
    "/escaped": (200, {"Content-Type": "text/plain; charset=unicode_escape"}, b"\\x41"),
    "/comments": (200, {"Content-Type": "text/html"}, b"<!--" * 240_000),
    "/tags": (200, {"Content-Type": "text/html"}, b"<a b=" * 190_000),
    "/near": (302, {"Location": "/latin"}, b""),
    "/loop": (302, {"Location": "/loop"}, b""),
    "/far": (302, {"Location": "http://elsewhere.example/"}, b""),
    "/file": (302, {"Location": "file:///etc/passwd"}, b""),
    "/inward": (302, {"Location": "http://127.0.0.1:1/"}, b""),
}


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """A web server that is allowed by its address."""
    with answering(lambda request, body: PAGES[request.path]) as place:
        yield place


@pytest.mark.parametrize(
    ("path", "text"),
    [("/", "Hi\na & b\nc\nd\ne"), ("/latin", "café"), ("/odd", "caf\ufffd"), ("/json", '{"a": 1}'), ("/near", "café")],
)
def test_fetch_returns_text_of_allowed_page(site: str, path: str, text: str) -> None:
    assert fetch_from([site]).call({"url": f"http://{site}{path}"}) == text


@pytest.mark.parametrize("beginning", DRIPS.values(), ids=DRIPS)
def test_fetch_gives_up_dripping_page(monkeypatch: pytest.MonkeyPatch, beginning: bytes) -> None:
    monkeypatch.setattr(fetch, "SECONDS", 0.3)
    with dripping(beginning) as place:
        before = threading.active_count()
        with pytest.raises(ToolFailure, match="took longer than"):
            fetch_from([place]).call({"url": f"http://{place}/"})
        assert threading.active_count() <= before


def test_fetch_tries_no_unusual_encoding(site: str) -> None:
    began = time.process_time()
    assert fetch_from([site]).call({"url": f"http://{site}/puny"}).startswith("aaa")
    assert fetch_from([site]).call({"url": f"http://{site}/escaped"}) == "\\x41"
    assert time.process_time() - began < 10


@pytest.mark.parametrize("path", ["/comments", "/tags"])
@pytest.mark.slow
def test_fetch_gives_up_page_slow_to_parse(site: str, path: str) -> None:
    began = time.process_time()
    with pytest.raises(ToolFailure, match="finding the text in the page takes too long"):
        fetch_from([site]).call({"url": f"http://{site}{path}"})
    assert time.process_time() - began < 10, "and nothing of it was read here"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/binary", "image/png, not text"),
        ("/large", "longer than 1000000 bytes"),
        ("/zipped", "compressed"),
        ("/gone", "answers 404"),
        ("/loop", "redirected more than 3 times"),
        ("/far", "elsewhere.example:80 may not be fetched"),
        ("/file", "not an http:// or https:// URL"),
        ("/inward", "127.0.0.1:1 may not be fetched"),
    ],
)
def test_fetch_explains_what_it_does_not_fetch(site: str, path: str, said: str) -> None:
    with pytest.raises(ToolFailure, match=said):
        fetch_from([site]).call({"url": f"http://{site}{path}"})


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:{port}/", "http://127.1:{port}/", "http://2130706433:{port}/", "http://0x7f000001:{port}/",
        "http://[::1]:{port}/", "http://[::ffff:127.0.0.1]:{port}/", "http://127.0.0.1:{port}@localhost/", "http://127.0.0.1/",
        "http://user:word@127.0.0.1:{port}/", "ftp://127.0.0.1:{port}/", "file:///etc/passwd", "127.0.0.1:{port}/", "", "http://",
        "gopher://127.0.0.1:{port}/", "http://127.0.0.1:{port}.example.org/", "http://169.254.169.254/latest/meta-data",
        "http://127.0.0.1:99999999/", "http://\x00/", "http://" + "a" * 100_000,
    ],
)  # fmt: skip
def test_fetch_allows_no_spelling_past_the_list(site: str, url: str) -> None:
    with pytest.raises(ToolFailure):
        fetch_from([site, "*.example.org"]).call({"url": url.format(port=site.rpartition(":")[2])})


def test_fetch_refuses_name_with_private_address(site: str) -> None:
    port = site.rpartition(":")[2]
    with pytest.raises(ToolFailure, match="private address"):
        fetch_from([f"localhost:{port}"]).call({"url": f"http://localhost:{port}/"})


@pytest.mark.parametrize(
    ("allowed", "host", "port", "fits"),
    [
        ("a.org", "a.org", 443, True),
        ("a.org", "A.ORG", 80, True),
        ("a.org", "b.a.org", 443, False),
        ("*.a.org", "b.a.org", 443, True),
        ("*.a.org", "a.org", 443, False),
        ("*.a.org", "evila.org", 443, False),
        ("a.org", "a.org", 8080, False),
        ("a.org:8080", "a.org", 8080, True),
        ("a.org:8080", "a.org", 80, False),
        ("[::1]:8080", "::1", 8080, True),
        ("[::1]", "::1", 80, True),
    ],
)
def test_fetch_allowed_list_matches_hosts_and_ports(allowed: str, host: str, port: int, fits: bool) -> None:
    assert fetch._is_allowed(allowed, host, port) is fits


def test_fetch_is_off_until_hosts_are_named(home: Path) -> None:
    with pytest.raises(ConfigError, match="off: no host is allowed"):
        find("tools", "fetch").check()
    with pytest.raises(ConfigError, match="'a b' is not a host"):
        fetch_from(["a b"]).check()


@given(st.text())
def test_fetch_extracts_text_of_any_page(page: str) -> None:
    assert "\r" not in extract_text(page)
