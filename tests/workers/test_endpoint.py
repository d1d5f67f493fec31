"""The endpoint: who is let in, what reaches the worker, and what a client gets when workers come and go."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import httpx2
import pytest
from sqlalchemy import select

from agentrl.workers.jobs.agent_calls import Begin, ForwardedRequest, Write
from agentrl.workers.serving.endpoint_app import EndpointLimits
from agentrl.workers.serving.forwarding import Samplers
from agentrl.workflow.dialects import RequestError
from agentrl.workflow.dialects.chat_completions import PATH as CHAT
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.endpoint_reads import find_places
from agentrl.workflow.tables import schema
from tests.support.played_runs import EXPIRED
from tests.support.scripted_worker import hang_up, scripted_worker, silence, stream, whole
from tests.support.served_endpoint import Attempt, Served, add_attempt, attempt, endpoint_over

ASKED = {"model": "m", "messages": [{"role": "user", "content": "6*7"}]}
STREAMED = {**ASKED, "stream": True}
PIECES = (b'data: {"a":1}\n\n', b'data: {"a":2}\n\n', b"data: [DONE]\n\n")


@pytest.fixture
def made(sqlite: Database) -> Attempt:
    return attempt(sqlite)


@pytest.fixture
def served(sqlite: Database) -> Iterator[Served]:
    with endpoint_over(sqlite) as found:
        yield found


def ask(served: Served, key: str = "secret", body: Any = ASKED, path: str = CHAT, **headers: str) -> httpx2.Response:
    bearer = {"authorization": f"Bearer {key}"}
    return httpx2.post(served.url + path, json=body, headers=bearer | headers, timeout=30, verify=False)


def code(answer: httpx2.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["code"]


def later(seconds: float, work: Callable[[], object]) -> None:
    threading.Timer(seconds, work).start()


def test_endpoint_forwards_call_and_answer_unchanged(database: Database) -> None:
    made = attempt(database)
    with scripted_worker(whole(b'{"choices":[]}')) as worker, endpoint_over(database) as served:
        made.held_by(worker.address)
        answer = ask(served, **{"x-stainless-retry-count": "2"})
        assert (answer.status_code, answer.json()) == (200, {"choices": []})
        [request] = worker.requests
        assert request.line == f"POST {CHAT} HTTP/1.1"
        assert json.loads(request.body) == ASKED
        assert request.headers["authorization"] == "Bearer secret"
        assert len(request.headers["x-agentrl-request"]) == 32
        assert abs(int(request.headers["x-agentrl-created"]) - time.time()) < 60
        assert request.headers["x-agentrl-retry"] == "2"


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        (CHAT, {"authorization": "Bearer secret"}),
        (CHAT, {"x-api-key": "secret"}),
        (f"/attempt/secret{CHAT}", {}),
        (f"/attempt/secret{CHAT}", {"authorization": "Bearer whatever-the-sdk-sends"}),
    ],
)
def test_endpoint_accepts_key_in_either_header_or_path(
    made: Attempt, served: Served, path: str, headers: dict[str, str]
) -> None:
    with scripted_worker(whole()) as worker:
        made.held_by(worker.address)
        answer = httpx2.post(served.url + path, json=ASKED, headers=headers)
        assert answer.status_code == 200
        assert worker.requests[0].line == f"POST {CHAT} HTTP/1.1"
        assert worker.requests[0].headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer other"}, {"x-api-key": "k" * 300}, {"authorization": "Basic x"}]
)
def test_endpoint_refuses_unknown_key_in_openai_shape(made: Attempt, served: Served, headers: dict[str, str]) -> None:
    body = {**ASKED, "key": "secret", "api_key": "secret", "metadata": {"episode": made.episode}}
    answer = httpx2.post(served.url + CHAT, json=body, headers=headers)
    assert code(answer) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ("episodes", {"status": "cancelled"}),
        ("episodes", {"attempt": 7}),
        ("agent_attempts", {"status": "ended"}),
        ("agent_attempts", {"status": "lost"}),
    ],
)
def test_endpoint_refuses_calls_of_finished_episode(made: Attempt, served: Served, table: str, values: dict[str, Any]) -> None:
    made.set(table, made.episode if table == "episodes" else 1, **values)
    answer = ask(served)
    assert code(answer) == (409, "episode_over")
    assert answer.headers["x-should-retry"] == "false"


def test_endpoint_reads_attempts_alike_in_both_databases(database: Database) -> None:
    made = attempt(database, "first", "host:1")
    add_attempt(made, "older", 50)
    expired = attempt(database, "expired", "host:2", lease=EXPIRED)
    known = {key: sha256(key.encode()).hexdigest() for key in ("first", "older", "expired", "nobody's")}
    found = find_places(database, list(known.values()))
    assert set(found) == {known[key] for key in ("first", "older", "expired")}
    first = found[known["first"]]
    assert (first.run, first.episode, first.over, first.address) == ("run-first", made.episode, "", "host:1")
    assert "attempt" in found[known["older"]].over
    assert (found[known["expired"]].episode, found[known["expired"]].address) == (expired.episode, None)


def test_endpoint_answers_models_and_health_without_worker(made: Attempt, served: Served) -> None:
    assert httpx2.get(f"{served.url}/health").json() == {"status": "ok"}
    head = httpx2.head(f"{served.url}/health")
    assert (head.status_code, head.content) == (200, b"")
    listed = httpx2.get(f"{served.url}/v1/models", headers=made.bearer).json()
    created = made.database.ask(lambda tx: tx.execute(select(schema.runs.c.created_at)).scalar_one())
    assert [(model["id"], model["created"]) for model in listed["data"]] == [("run-secret", int(created.timestamp()))]
    assert code(httpx2.get(f"{served.url}/v1/models")) == (401, "invalid_api_key")
    assert httpx2.get(f"{served.url}/attempt/secret/v1/models").status_code == 200


def test_endpoint_finds_model_by_name_of_run(made: Attempt, served: Served) -> None:
    models = f"{served.url}/v1/models"
    assert httpx2.get(f"{models}/run-secret", headers=made.bearer).json()["id"] == "run-secret"
    assert code(httpx2.get(f"{models}/gpt/4", headers=made.bearer)) == (404, "model_not_found")
    assert code(httpx2.get(f"{models}/run-secret")) == (401, "invalid_api_key")


def test_endpoint_answer_has_id_of_forwarded_call(made: Attempt, served: Served) -> None:
    with scripted_worker(whole(), whole()) as worker:
        made.held_by(worker.address)
        answers = [ask(served), ask(served), ask(served, key="unknown"), httpx2.get(f"{served.url}/health")]
        names = [answer.headers["x-request-id"] for answer in answers]
        forwarded = [request.headers["x-agentrl-request"] for request in worker.requests]
    assert len(set(names)) == 4
    assert [f"req_{name}" for name in forwarded] == names[:2]


def test_endpoint_refuses_attempt_key_from_page(made: Attempt, served: Served) -> None:
    asking = {"origin": "https://app.example.org", "access-control-request-method": "POST"}
    for path in (CHAT, f"/attempt/secret{CHAT}"):
        answer = httpx2.request("OPTIONS", served.url + path, headers=asking)
        assert answer.status_code == 405
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/audio/speech", "/", "/v1/chat/completions/", "/attempt/secret/v1/files"]
)
def test_endpoint_unknown_path_lists_known_paths(made: Attempt, served: Served, path: str) -> None:
    answer = ask(served, path=path)
    assert code(answer) == (404, "unknown_url")
    assert CHAT in answer.json()["error"]["message"]
    assert "secret" not in answer.text


def test_endpoint_wrong_method_lists_allowed_methods(served: Served) -> None:
    answer = httpx2.get(served.url + CHAT)
    assert code(answer) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


def test_endpoint_call_waits_for_worker(made: Attempt, served: Served) -> None:
    with scripted_worker(whole()) as worker:
        later(0.7, lambda: made.held_by(worker.address))
        assert ask(served).status_code == 200


def test_endpoint_call_without_worker_gets_retry_after(made: Attempt, sqlite: Database) -> None:
    with endpoint_over(sqlite, EndpointLimits(wait_seconds=0.3)) as served:
        answer = ask(served)
        assert code(answer) == (503, "no_holder")
        assert int(answer.headers["retry-after"]) > 0


def test_endpoint_moves_from_stale_worker_to_current_one(made: Attempt, served: Served) -> None:
    with scripted_worker(whole(status="421 Misdirected Request")) as old, scripted_worker(whole(b'{"new":1}')) as new:
        made.held_by(old.address)
        later(0.5, lambda: made.held_by(new.address))
        assert ask(served).json() == {"new": 1}
        assert old.connections == 1  # kept open all the while
        assert {request.headers["x-agentrl-request"] for request in (*old.requests, *new.requests)} == {
            new.requests[0].headers["x-agentrl-request"]
        }


def test_endpoint_forwards_again_with_same_id_after_worker_loss(made: Attempt, served: Served) -> None:
    with scripted_worker(hang_up, hang_up, whole()) as worker:
        made.held_by(worker.address)
        assert ask(served).status_code == 200
        assert len(worker.requests) == 3
        assert len({request.headers["x-agentrl-request"] for request in worker.requests}) == 1
        assert len({request.headers["x-agentrl-created"] for request in worker.requests}) == 1


def test_endpoint_call_id_derives_from_idempotency_key(made: Attempt, served: Served) -> None:
    with scripted_worker(whole()) as worker:
        made.held_by(worker.address)
        for _ in range(2):
            ask(served, **{"idempotency-key": "mine"})
        wanted = sha256(b"key:mine").hexdigest()[:32]
        assert [request.headers["x-agentrl-request"] for request in worker.requests] == [wanted, wanted]


def test_endpoint_stream_resumes_where_it_broke(made: Attempt, served: Served) -> None:
    half = PIECES[1][:6]
    with scripted_worker(stream(PIECES[0], half, breaks=True), stream(PIECES[0], breaks=True), stream(*PIECES)) as worker:
        made.held_by(worker.address)
        answer = ask(served, body=STREAMED)
        assert without_comments(answer.content) == b"".join(PIECES)
        assert answer.headers["x-accel-buffering"] == "no"
        assert len(worker.requests) == 3


def test_endpoint_stream_that_differs_on_retry_ends_in_error(made: Attempt, served: Served) -> None:
    with scripted_worker(stream(PIECES[0], breaks=True), stream(PIECES[1], *PIECES)) as worker:
        made.held_by(worker.address)
        assert events_of_failed_stream(served) == [json.loads(PIECES[0][6:]), "reply_broke"]


def test_endpoint_stream_shorter_on_retry_ends_in_error(made: Attempt, served: Served) -> None:
    with scripted_worker(stream(*PIECES[:2], breaks=True), stream(PIECES[0])) as worker:
        made.held_by(worker.address)
        assert events_of_failed_stream(served)[-1] == "reply_broke"


def test_endpoint_stream_reports_end_of_episode(made: Attempt, served: Served) -> None:
    with scripted_worker(stream(PIECES[0], breaks=True), whole(b'{"error":{"code":"episode_over"}}', "409 Conflict")) as worker:
        made.held_by(worker.address)
        assert events_of_failed_stream(served)[-1] == "episode_over"


def test_endpoint_completes_answer_that_broke_in_the_middle(made: Attempt, served: Served) -> None:
    async def half(request: Any, writer: Any) -> None:
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 13\r\n\r\n{"ans')
        writer.close()

    with scripted_worker(half, whole()) as worker:
        made.held_by(worker.address)
        assert ask(served).json() == {"answer": 42}


def test_endpoint_sends_comments_to_waiting_stream(made: Attempt, served: Served) -> None:
    with scripted_worker(stream(*PIECES)) as worker:
        content = b""
        with httpx2.stream("POST", served.url + CHAT, json=STREAMED, headers=made.bearer) as answer:
            for piece in answer.iter_raw():
                if not content:  # the stream has begun with a comment, and goes on once somebody holds the episode
                    made.held_by(worker.address)
                content += piece
        assert content.startswith(b": waiting\n")
        assert without_comments(content) == b"".join(PIECES)


@pytest.mark.slow
def test_endpoint_sends_comments_only_between_lines(made: Attempt, served: Served) -> None:
    with scripted_worker(stream(PIECES[0], PIECES[1][:5], PIECES[1][5:], PIECES[2], pause=0.7)) as worker:
        made.held_by(worker.address)
        answer = ask(served, body=STREAMED)
        assert b": waiting\n" in answer.content
        assert without_comments(answer.content) == b"".join(PIECES)


def test_endpoint_error_after_comments_is_an_event(made: Attempt, served: Served) -> None:
    with scripted_worker(whole(b'{"error":{"code":"context_length_exceeded"}}', "400 Bad Request")) as worker:
        assert events_of_failed_stream(served, lambda: made.held_by(worker.address)) == ["context_length_exceeded"]


def test_endpoint_sends_no_comments_without_streaming(made: Attempt, served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"default": {"stream": True}}}}]
    with scripted_worker(whole(status="400 Bad Request", pause=1.0)) as worker:
        made.held_by(worker.address)
        answer = ask(served, body={**ASKED, "tools": tools})
        assert (answer.status_code, answer.content) == (400, b'{"answer":42}')


def test_endpoint_leaves_silent_worker_for_new_holder(made: Attempt, served: Served) -> None:
    started = threading.Event()
    with scripted_worker(silence(started)) as old, scripted_worker(whole()) as new:
        made.held_by(old.address)
        later(0.5, lambda: made.held_by(new.address))
        assert ask(served).status_code == 200
        assert old.requests[0].gone.wait(10)


def test_endpoint_disconnect_ends_call_at_worker(made: Attempt, served: Served) -> None:
    started = threading.Event()
    with scripted_worker(silence(started)) as worker:
        made.held_by(worker.address)
        with pytest.raises(httpx2.TimeoutException):
            httpx2.post(served.url + CHAT, json=ASKED, headers=made.bearer, timeout=0.5)
        assert worker.requests[0].gone.wait(10)


def test_endpoint_reuses_connections_to_worker(made: Attempt, served: Served) -> None:
    with scripted_worker(whole()) as worker:
        made.held_by(worker.address)
        for _ in range(5):
            assert ask(served).status_code == 200
        assert worker.connections == 1


EVENTS = [(b"content-type", b"text/event-stream")]


@pytest.mark.parametrize(("first", "last"), [(PIECES[0] + PIECES[1][:5], None), (b"data: {}\n\n", "reply_broke")])
def test_endpoint_resumes_stream_of_sampler_in_its_process(
    made: Attempt, sqlite: Database, first: bytes, last: str | None
) -> None:
    requests: list[ForwardedRequest] = []

    async def sample(request: ForwardedRequest, begin: Begin, write: Write) -> None:
        requests.append(request)
        if len(requests) == 1:
            raise RequestError(421, "Not yet.")
        await begin(200, EVENTS)
        if len(requests) == 2:
            await write(first, True)
            raise RequestError(421, "No longer.")
        for piece in PIECES:
            await write(piece, True)
        await write(b"", False)

    made.held_by("this process")
    with endpoint_over(sqlite, samplers=Samplers(sample)) as served:
        if last is None:
            assert without_comments(ask(served, body=STREAMED).content) == b"".join(PIECES)
        else:
            assert events_of_failed_stream(served)[-1] == last
    assert requests == [requests[0]] * 3
    assert (requests[0].key, json.loads(requests[0].body)) == ("secret", STREAMED)


def test_endpoint_answers_errors_of_sampler_in_its_process(made: Attempt, sqlite: Database) -> None:
    cancelled = threading.Event()

    async def sample(request: ForwardedRequest, begin: Begin, write: Write) -> None:
        if b"wait" not in request.body:
            raise RequestError(429, "No more.", code="max_calls")
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    made.held_by("this process")
    with endpoint_over(sqlite, samplers=Samplers(sample)) as served:
        answer = ask(served)
        assert code(answer) == (429, "max_calls")
        assert answer.headers["x-should-retry"] == "false"
        with pytest.raises(httpx2.TimeoutException):
            httpx2.post(served.url + CHAT, content=b"wait", headers=made.bearer, timeout=0.5)
        assert cancelled.wait(10)


def without_comments(content: bytes) -> bytes:
    return content.replace(b": waiting\n", b"")


def events_of_failed_stream(served: Served, at_comment: Callable[[], object] = lambda: None) -> list[Any]:
    """The events of a stream that fails and ends: an error's code, or the event; `at_comment` is called at each comment."""
    found = []
    with httpx2.stream("POST", served.url + CHAT, json=STREAMED, headers={"x-api-key": "secret"}) as answer:
        lines = answer.iter_lines()
        while line := next_line(lines):
            if line.startswith(":"):
                at_comment()
            if line.startswith("data: "):
                event = json.loads(line[6:])
                found.append(event["error"]["code"] if "error" in event else event)
    return found


def next_line(lines: Iterator[str]) -> str | None:
    """The next line with text, or None at the end; fails where the connection was cut."""
    return next((line for line in lines if line), None)
