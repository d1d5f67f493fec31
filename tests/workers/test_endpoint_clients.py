"""The endpoint and clients that mean it no good, or are slow: each is answered or cut, and disturbs nobody else."""

import gzip
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import httpx2
import pytest

from agentrl.workers.http import http_server
from agentrl.workers.http.http_server import GuardedProtocol
from agentrl.workers.serving.endpoint_app import EndpointLimits
from agentrl.workflow.dialects.chat_completions import PATH as CHAT
from agentrl.workflow.store.connect import Database
from tests.support.scripted_worker import hang_up, scripted_worker, silence, stream, whole
from tests.support.served_endpoint import Attempt, Served, attempt, endpoint_over, raw

KEY = "sk-not-to-be-told"
HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n".encode()
BODY = b'{"messages":[]}'


@pytest.fixture
def made(sqlite: Database) -> Attempt:
    return attempt(sqlite, KEY)


@pytest.fixture
def served(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(http_server, "SWEEP_SECONDS", 0.05)
    with endpoint_over(sqlite) as found:
        yield found


def request(body: bytes = BODY, *headers: bytes) -> bytes:
    return HEAD + b"".join(b"%s\r\n" % each for each in (*headers, b"content-length: %d" % len(body))) + b"\r\n" + body


def error(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def opened(served: Served, sent: bytes) -> socket.socket:
    link = socket.create_connection(served.address, 20)
    link.sendall(sent)
    return link


def test_endpoint_refuses_10_mb_body_readably(made: Attempt, served: Served) -> None:
    body = b"x" * 10_000_000
    for sent in (request(body, b"connection: close"), chunked(body)):
        assert error(raw(served.address, sent)) == (413, "request_too_large")


def chunked(body: bytes) -> bytes:
    return HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def test_endpoint_forwards_8_mb_body(made: Attempt, served: Served) -> None:
    body = b"x" * (8 * 2**20)
    with scripted_worker(whole()) as worker:
        made.held_by(worker.address)
        assert httpx2.post(served.url + CHAT, content=body, headers=made.bearer).status_code == 200
        assert worker.requests[0].body == body


def test_endpoint_bounds_sum_of_held_bodies(made: Attempt, sqlite: Database) -> None:
    with endpoint_over(sqlite, EndpointLimits(held_bytes=1000)) as served:
        assert error(raw(served.address, request(b"x" * 2000, b"connection: close"))) == (429, "too_many_requests")
        with scripted_worker(whole()) as worker:
            made.held_by(worker.address)
            for _ in range(3):  # what a call held is free again
                assert httpx2.post(served.url + CHAT, content=b"x" * 900, headers=made.bearer).status_code == 200


@pytest.mark.parametrize("limits", [EndpointLimits(open_calls=2), EndpointLimits(open_per_attempt=2)])
def test_endpoint_beyond_limit_sends_retry_after(made: Attempt, sqlite: Database, limits: EndpointLimits) -> None:
    started = threading.Event()
    with scripted_worker(silence(started)) as worker, endpoint_over(sqlite, limits) as served:
        made.held_by(worker.address)
        links = [opened(served, request()) for _ in range(2)]
        until(lambda: len(worker.requests) == 2)
        answer = httpx2.post(served.url + CHAT, content=BODY, headers=made.bearer)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        for link in links:
            link.close()
        until(lambda: not served.app._open)  # their slots are free again


def test_endpoint_gives_up_stalled_body(made: Attempt, sqlite: Database) -> None:
    with (
        endpoint_over(sqlite, EndpointLimits(body_seconds=0.3)) as served,
        opened(served, HEAD + b"content-length: 100\r\n\r\n{") as link,
    ):
        until(lambda: not served.app._open)
        link.shutdown(socket.SHUT_WR)
        assert not served.app._held_bytes


@pytest.mark.parametrize("sent", [b"", b"GET /hea", HEAD, HEAD + b"x-slow: 1\r\n"], ids=["nothing", "line", "head", "header"])
def test_endpoint_cuts_client_without_full_head(served: Served, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedProtocol, "header_seconds", 0.3)
    assert raw(served.address, sent) == b""


def test_endpoint_cuts_dripping_head(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedProtocol, "header_seconds", 0.5)
    with opened(served, HEAD) as link:
        until(lambda: was_cut(link))


def was_cut(link: socket.socket) -> bool:
    time.sleep(0.05)
    try:
        link.sendall(b"a: b\r\n")
    except OSError:
        return True
    return False


def test_endpoint_cuts_client_that_never_reads_and_frees_worker(
    made: Attempt, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GuardedProtocol, "stall_seconds", 0.5)
    pieces = [b"data: " + b"x" * 60_000 + b"\n\n"] * 2000
    with scripted_worker(stream(*pieces)) as worker:
        made.held_by(worker.address)
        with opened(served, request(b'{"stream":true}')):
            until(lambda: len(worker.requests) == 1)
            assert httpx2.get(f"{served.url}/health").status_code == 200
            assert worker.requests[0].gone.wait(20)
            until(lambda: not served.app._open)


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\nx",
        HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n",
        HEAD + b"x: \x00\r\n\r\n",
        b"POST /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
def test_endpoint_refuses_invalid_http_in_openai_shape(made: Attempt, served: Served, sent: bytes) -> None:
    assert error(raw(served.address, sent)) == (400, "invalid_http")


@pytest.mark.parametrize("size", [40_000, 100_000])
def test_endpoint_refuses_or_cuts_long_head(made: Attempt, served: Served, size: int) -> None:
    sent = request(BODY, b"connection: close", b"x: " + b"y" * size)
    with scripted_worker(whole()) as worker:
        made.held_by(worker.address)
        with suppress(ConnectionResetError):  # it stops reading where the limit is
            assert error(raw(served.address, sent)) in ((431, "headers_too_large"), (400, "invalid_http"))
        assert httpx2.get(f"{served.url}/health").status_code == 200
        assert not worker.requests


def test_endpoint_refuses_compressed_body(made: Attempt, served: Served) -> None:
    sent = request(gzip.compress(BODY), b"content-encoding: gzip", b"connection: close")
    assert error(raw(served.address, sent)) == (415, "unsupported_encoding")


def test_endpoint_answers_pipelined_requests_in_order(made: Attempt, served: Served) -> None:
    with scripted_worker(whole(b'{"n":1}', pause=0.2), whole(b'{"n":2}')) as worker:
        made.held_by(worker.address)
        found = raw(served.address, request() + request(BODY, b"connection: close"))
        assert found.index(b'{"n":1}') < found.index(b'{"n":2}')


def test_endpoint_forwards_body_with_invalid_stream_field(made: Attempt, served: Served) -> None:
    deep = b'{"stream":' + b"[" * 200_000
    with scripted_worker(whole(b"{}", "400 Bad Request", pause=0.7)) as worker:
        made.held_by(worker.address)
        assert httpx2.post(served.url + CHAT, content=deep, headers=made.bearer).status_code == 400


def test_endpoint_logs_no_key(made: Attempt, served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with scripted_worker(hang_up, whole()) as worker:
        made.held_by(worker.address)
        httpx2_quiet = logging.getLogger("httpx2")
        httpx2_quiet.disabled = True
        for path in (f"/attempt/{KEY}{CHAT}", f"/attempt/{KEY}/v1/none", f"/attempt/{KEY}x{CHAT}"):
            answer = httpx2.post(served.url + path, content=BODY)
            assert KEY not in answer.text
        raw(served.address, HEAD + b"x: \x00\r\n\r\n")
    ours = [line.getMessage() for line in caplog.records if not line.name.startswith(("httpx2", "httpcore2"))]
    assert ours
    assert not any(KEY in line for line in ours)
