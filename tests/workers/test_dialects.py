"""The endpoint in every dialect, called by the dialect's official client: turns, rows, retries, limits and refusals."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from agentrl.workers.serving.endpoint_app import EndpointLimits
from agentrl.workflow.dialects import completions
from agentrl.workflow.dialects.paths import DIALECTS
from agentrl.workflow.store.connect import Database
from agentrl.workflow.trajectory import Message, ToolCall
from tests.support.agents_stage import AGENT, Stage, end_agent, episode_of, group_of, run_agent, staged, wait_for, write
from tests.support.dialect_clients import (
    CALCULATOR,
    CHAT_DIALECT,
    CLIENTS,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    DialectClient,
    anthropic_client,
    openai_client,
)
from tests.support.played_runs import values
from tests.support.served_endpoint import endpoint_over
from tests.workers.test_agent_endpoint import held
from tests.workers.test_agent_rollout import ANSWER, ASK, CALL, CHAT, OTHER, Gated, Policy
from tests.workers.test_agent_rollout import db as db
from tests.workers.test_workers import in_memory as in_memory

QUESTION = "How much is 6*7?"
TWICE = CHAT.turn(Message("assistant", "Look:", tool_calls=(CALL, ToolCall("calculator", {"expression": "6*8"}))))
THOUGHT = CHAT.turn(Message("assistant", "#### 42", thought="six sevens"))
chat_dialects = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.path[4:])
every_dialect = pytest.mark.parametrize("client", [*CLIENTS, COMPLETIONS], ids=lambda client: client.path[4:])


@dataclass(frozen=True)
class Place:
    """A rollout behind an endpoint, and the key of its first episode."""

    db: Database
    stage: Stage
    url: str
    key: str

    def post(self, client: DialectClient, body: Any, **headers: str) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {"authorization": f"Bearer {self.key}"} | named
        return httpx2.post(self.url + client.path, content=content, headers=sent, timeout=60)


@contextmanager
def placed(db: Database, engine: Any, window: int = 2048, size: int = 1, **agent: Any) -> Iterator[Place]:
    group = group_of(db, size, {**AGENT, **agent})
    with staged(Stage(db, group, engine, CHAT, window)) as stage, endpoint_over(db) as served:
        held(stage)
        yield Place(db, stage, served.url, run_agent(db, 1, "key-of-1"))


@chat_dialects
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_dialect_tool_round_trip_is_one_chain(db: Database, client: DialectClient, stream: bool) -> None:
    with placed(db, Policy(TWICE, THOUGHT, ANSWER).engine) as place:
        history = [client.user(QUESTION)]
        asked = client.ask(place.url, place.key, history, stream, tools=[CALCULATOR])
        assert asked.text == "Look:"
        assert [(name, given["expression"]) for _, name, given in asked.calls] == [("calculator", "6*7"), ("calculator", "6*8")]
        history += [*asked.items, *client.results(asked.calls, ["42", "48"])]
        second = client.ask(place.url, place.key, history, stream, tools=[CALCULATOR])
        assert second.text == "#### 42"
        history += [*second.items, client.user("sure?")]
        assert client.ask(place.url, place.key, history, stream, tools=[CALCULATOR]).text == "#### 42"
        steps = episode_of(db, 1).steps
        assert [(step.chain, step.shared, step.new_row) for step in steps] == [(0, None, None)] * 3
        assert [result.content for result in steps[0].results or ()] == ["42", "48"]
        assert steps[1].message.thought == "six sevens"
        end_agent(place.stage, 1)
        place.stage.over()
    assert episode_of(db, 1).stop_reason == "answered"


def test_dialects_render_same_prompt_and_may_take_turns(db: Database) -> None:
    policy = Policy(TWICE, TWICE, TWICE, ANSWER)
    with placed(db, policy.engine) as place:
        for client in CLIENTS:
            turn = client.ask(place.url, place.key, [client.user(QUESTION)], tools=[CALCULATOR])
        assert len({request.prompt_ids for request in policy.requests}) == 1
        calls = [{"type": "tool_use", "id": call[0], "name": call[1], "input": call[2]} for call in turn.calls]
        history = [
            MESSAGES.user(QUESTION),
            {"role": "assistant", "content": [{"type": "text", "text": turn.text}, *calls]},
            *MESSAGES.results(turn.calls, ["42", "48"]),
        ]
        MESSAGES.ask(place.url, place.key, history, tools=[CALCULATOR])
        last = episode_of(db, 1).steps[-1]
        assert (last.chain, last.parent) == (0, 0), "it continues the chat completion, which was the first of equal turns"


@every_dialect
def test_dialect_stream_has_tokens_of_whole_reply(db: Database, client: DialectClient) -> None:
    with placed(db, Policy(ANSWER).engine) as place:
        turns = [client.ask(place.url, place.key, [client.user(QUESTION)], stream) for stream in (False, True)]
        assert [turn.text for turn in turns] == ["#### 42", "#### 42"]
        body = client.body([client.user(QUESTION)])
        headers = {"x_stainless_retry_count": "1"}
        whole, streamed = (place.post(client, {**body, "stream": stream}, **headers) for stream in (False, True))
        assert client.text_of(whole.json()) == "#### 42"
        assert streamed.content.endswith(client.streams_end)
        assert len(episode_of(db, 1).steps) == 2


@every_dialect
def test_dialect_retry_gets_recorded_reply_bytes(db: Database, client: DialectClient) -> None:
    policy = Policy(ANSWER, OTHER)
    with placed(db, policy.engine) as place:
        body = client.body([client.user(QUESTION)])
        first = place.post(client, body)
        again = place.post(client, body, x_stainless_retry_count="1")
        assert (again.status_code, again.content) == (200, first.content)
        fresh = place.post(client, body)
        assert client.text_of(fresh.json()) == "#### 48", "an equal body alone is no retry"
        assert len(policy.requests) == 2


@every_dialect
def test_dialect_idempotency_key_ignores_stream(db: Database, client: DialectClient) -> None:
    policy = Policy(ANSWER, OTHER)
    with placed(db, policy.engine) as place:
        body = client.body([client.user(QUESTION)])
        streamed = place.post(client, {**body, "stream": True}, idempotency_key="one")
        assert streamed.status_code == 200
        whole = place.post(client, body, idempotency_key="one")
        assert client.text_of(whole.json()) == "#### 42"
        other = place.post(client, {**body, "top_p": 0.5}, idempotency_key="one")
        assert other.status_code == 422
        assert "Idempotency-Key" in client.error_of(other.json())
        assert len(policy.requests) == 1


def test_same_body_in_another_api_is_another_request(db: Database) -> None:
    """In chat completions, this body asks for two choices; in the Messages API, which has one, for one."""
    body = {"model": "m", "n": 2, "max_tokens": 50, "messages": [{"role": "user", "content": QUESTION}]}
    gated = Gated()
    with placed(db, gated.engine) as place, ThreadPoolExecutor(2) as pool:
        chat = pool.submit(place.post, CHAT_DIALECT, body, idempotency_key="one")
        assert gated.begun.acquire(timeout=30)
        other = pool.submit(place.post, MESSAGES, body, x_stainless_retry_count="1")
        assert all(gated.begun.acquire(timeout=30) for _ in range(2)), "it joins no turn that is in flight"
        gated.let.release(100)
        assert len(chat.result(60).json()["choices"]) == 2
        assert MESSAGES.text_of(other.result(60).json()) == "#### 42"
        assert len(set(gated.keys)) == 3
        reused = place.post(MESSAGES, body, idempotency_key="one")
        assert reused.status_code == 422
        assert "Idempotency-Key" in MESSAGES.error_of(reused.json())


@every_dialect
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_dialect_repeats_broken_stream_as_same_turn(db: Database, client: DialectClient, streams: bool) -> None:
    """Claude Code asks again without `stream`, Codex as before; neither says that it retries."""
    gated = Gated()
    with placed(db, gated.engine) as place:
        body = client.body([client.user(QUESTION)])
        host = place.url.removeprefix("http://")
        connection = HTTPConnection(host, timeout=60)
        headers = {"x-api-key": place.key}
        connection.request("POST", client.path, json.dumps({**body, "stream": True}), headers)
        gated.let.release(2)
        assert connection.getresponse().readline()
        assert gated.begun.acquire(timeout=30)
        connection.close()
        wait_for(lambda: all(turn.stopped for turn in place.stage.driver._conversations[1].open))
        gated.let.release(100)
        again = place.post(client, {**body, "stream": streams})
        assert again.status_code == 200
        assert streams or client.text_of(again.json()) == "#### 42"
        assert len(set(gated.keys)) == 1, "the draws of the call that broke"
        steps = episode_of(db, 1).steps
        assert [step.delivered for step in steps] == [False, True][-len(steps) :]
        gated.let.release(100)
        assert place.post(client, body).status_code == 200
        assert len(set(gated.keys)) == 2, "the call was repeated once"


def test_repeated_samples_keep_their_own_draws(db: Database) -> None:
    """Two samples of one prompt break; each is repeated as itself, and a third request is another sample."""
    gated = Gated()
    with placed(db, gated.engine) as place:
        body = CHAT_DIALECT.body([CHAT_DIALECT.user(QUESTION)])
        connections = [HTTPConnection(place.url.removeprefix("http://"), timeout=60) for _ in range(2)]
        for connection in connections:
            connection.request("POST", CHAT_DIALECT.path, json.dumps({**body, "stream": True}), {"x-api-key": place.key})
            assert connection.getresponse().readline()
            assert gated.begun.acquire(timeout=30)
        for connection in connections:
            connection.close()
        wait_for(lambda: all(turn.stopped for turn in place.stage.driver._conversations[1].open))
        gated.let.release(300)
        assert [place.post(CHAT_DIALECT, body).status_code for _ in range(3)] == [200] * 3
        assert sorted(gated.keys[:2]) == sorted(gated.keys[2:4])
        assert len(set(gated.keys)) == 3


@every_dialect
def test_dialect_stream_goes_on_after_lost_worker(db: Database, client: DialectClient) -> None:
    group, gated = group_of(db), Gated(THOUGHT)
    stage = Stage(db, group, gated.engine, CHAT).enter()
    held(stage)
    key = run_agent(db, 1)
    with endpoint_over(db) as served, ThreadPoolExecutor(1) as pool:
        turn = pool.submit(client.ask, served.url, key, [client.user(QUESTION)], True)
        assert gated.begun.acquire(timeout=60)
        gated.let.release(4)
        wait_for(lambda: len(stage.driver._conversations[1].open[0]._heard[0]) >= 4)
        write(db, "UPDATE groups SET lease_until = 0")
        stage.leave()
        gated.let.release(100)
        with staged(Stage(db, group, Policy(THOUGHT).engine, CHAT)) as heir:
            held(heir)
            assert turn.result(60).text.endswith("#### 42")
            assert [step.delivered for step in episode_of(db, 1).steps] == [True]


@every_dialect
def test_dialect_client_raises_error_within_stream(db: Database, client: DialectClient) -> None:
    with (
        staged(Stage(db, group_of(db), Policy(ANSWER).engine, CHAT)),
        endpoint_over(db, EndpointLimits(wait_seconds=1.5, quiet_seconds=0.3)) as served,
    ):
        write(db, "UPDATE groups SET lease_until = 0")
        failed: Any = (openai.APIError, anthropic.APIError)
        with pytest.raises(failed, match="No rollout worker has served this episode"):
            client.ask(served.url, run_agent(db, 1), [client.user(QUESTION)], stream=True)


def test_request_that_counts_tokens_is_never_a_stream(db: Database) -> None:
    with (
        staged(Stage(db, group_of(db), Policy(ANSWER).engine, CHAT)),
        endpoint_over(db, EndpointLimits(wait_seconds=1.5, quiet_seconds=0.3)) as served,
    ):
        write(db, "UPDATE groups SET lease_until = 0")
        body = MESSAGES.body([MESSAGES.user(QUESTION)], stream=True)
        headers = {"x-api-key": run_agent(db, 1)}
        answer = httpx2.post(f"{served.url}/v1/messages/count_tokens", json=body, headers=headers, timeout=60)
        assert answer.status_code == 503
        assert "No rollout worker" in MESSAGES.error_of(answer.json())


@every_dialect
def test_dialect_client_raises_refusals(db: Database, client: DialectClient) -> None:
    with placed(db, Policy(ANSWER).engine, max_calls=1) as place:
        refused: Any = (openai.AuthenticationError, anthropic.AuthenticationError)
        with pytest.raises(refused):
            client.ask(place.url, "unknown", [client.user(QUESTION)])
        client.ask(place.url, place.key, [client.user(QUESTION)])
        limited: Any = (openai.RateLimitError, anthropic.RateLimitError)
        with pytest.raises(limited, match="all of its 1 model calls"):
            client.ask(place.url, place.key, [client.user("more")])
        end_agent(place.stage, 1)
        place.stage.over()
        conflict: Any = (openai.ConflictError, anthropic.ConflictError)
        with pytest.raises(conflict, match="no longer accepted"):
            client.ask(place.url, place.key, [client.user("more")])


@every_dialect
def test_dialect_cuts_max_tokens_and_refuses_long_prompts(db: Database, client: DialectClient) -> None:
    policy = Policy(ANSWER)
    with placed(db, policy.engine, window=120) as place:
        client.ask(place.url, place.key, [client.user(QUESTION)], max_tokens=1_000_000)
        (request,) = policy.requests
        assert len(request.prompt_ids) + request.max_new_tokens <= 120
        client.ask(place.url, place.key, [client.user("a")], max_tokens=1)
        assert policy.requests[1].max_new_tokens == 1
        long = [client.user("x y " * 30_000)]
        too_long: Any = (openai.BadRequestError, anthropic.BadRequestError)
        with pytest.raises(too_long, match="maximum context length is 120 tokens"):
            client.ask(place.url, place.key, long)
        error = place.post(client, client.body(long)).json()["error"]
        assert "more than 120 tokens" in error["message"]
        field = {"/v1/responses": "input", "/v1/completions": "prompt"}.get(client.path, "messages")
        assert f"{field}: " in error["message"]
        assert error.get("param", field) == field


@every_dialect
def test_dialect_accepts_each_place_of_key_and_base_url(db: Database, client: DialectClient) -> None:
    with placed(db, Policy(ANSWER).engine) as place:
        body = client.body([client.user(QUESTION)])
        bare = client.path.removeprefix("/v1")
        both = {"authorization": "Bearer nobody", "x-api-key": place.key}
        for path, headers in (
            (client.path, {"x-api-key": place.key}),
            (client.path, {"authorization": f"Bearer {place.key}"}),
            (client.path, both),
            (client.path, {"authorization": f"Bearer {place.key}", "x-api-key": "nobody"}),
            (f"{client.path}?beta=true", {"x-api-key": place.key}),
            (bare, {"x-api-key": place.key}),
            (f"/v1{client.path}", {"x-api-key": place.key}),
            (f"/attempt/{place.key}{client.path}", {"x-api-key": "whatever"}),
            (f"/attempt/{place.key}{bare}", {}),
            (f"/attempt/{place.key}/v1{client.path}", {}),
        ):
            answer = httpx2.post(place.url + path, json=body, headers=headers, timeout=60)
            assert (answer.status_code, client.text_of(answer.json())) == (200, "#### 42"), path
        for base in ("/", "/v1", f"/attempt/{place.key}", f"/attempt/{place.key}/"):
            assert httpx2.head(place.url + base).status_code == 204
        wrong = httpx2.post(place.url + client.path, json=body, headers={"x-api-key": "nobody"})
        assert wrong.status_code == 401
        assert "Unknown API key" in client.error_of(wrong.json())
        long = httpx2.post(place.url + client.path, json=body, headers={"x-api-key": "k" * 40_000})
        assert long.status_code == 431
        assert client.error_of(long.json())
        other = httpx2.post(f"{place.url}{client.path}/batches", json=body, headers={"x-api-key": place.key})
        assert other.status_code == 404
        assert "Unknown path" in client.error_of(other.json())


MOVED: Sequence[tuple[DialectClient, Callable[[Any], Any]]] = (
    (CHAT_DIALECT, lambda item: {**item, "name": "u1"}),
    (RESPONSES, lambda item: {**item, "id": "msg_1", "status": "completed"}),
    (
        MESSAGES,
        lambda item: {**item, "content": [{**block, "cache_control": {"type": "ephemeral"}} for block in item["content"]]},
    ),
)


@pytest.mark.parametrize(("client", "move"), MOVED, ids=["chat", "responses", "messages"])
def test_dialect_fields_that_move_keep_the_chain(db: Database, client: DialectClient, move: Callable[[Any], Any]) -> None:
    with placed(db, Policy(ANSWER).engine) as place:
        first = client.ask(place.url, place.key, [move(client.user(QUESTION))], metadata={"user_id": "1"})
        history = [client.user(QUESTION), *first.items, move(client.user("and?"))]
        client.ask(place.url, place.key, history, metadata={"user_id": "2"}, extra_headers={"anthropic-beta": "new"})
        assert [step.chain for step in episode_of(db, 1).steps] == [0, 0]


def parts_of(client: DialectClient, *parts: Any) -> Any:
    return {"role": "user", "content": list(parts)}


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"properties": {"a": value}}
    return value


HOSTILE: dict[str, Callable[[DialectClient], Any]] = {
    "no object": lambda client: [],
    "no json": lambda client: b"{",
    "no utf-8": lambda client: b'{"messages": "\xff"}',
    "deep": lambda client: b"[" * 100_000,
    "constant": lambda client: b'{"temperature": NaN}',
    "nothing": lambda client: {},
    "history is a number": lambda client: {**client.body([]), "messages": 1, "input": 1},
    "item is a text": lambda client: client.body(["x"]),
    "role": lambda client: client.body([{"role": "robot", "content": "x"}]),
    "image": lambda client: client.body([parts_of(client, {"type": "image", "source": {"type": "url", "url": "file:///"}})]),
    "image url": lambda client: client.body([parts_of(client, {"type": "image_url", "image_url": {"url": "http://x"}})]),
    "audio": lambda client: client.body([parts_of(client, {"type": "input_audio", "input_audio": {"data": "x"}})]),
    "no such call": lambda client: client.body([client.user("x"), *client.results([("call_other",)], ["7"])]),
    "600 tools": lambda client: client.body([client.user("x")], tools=[(f"t{n}", "", {}) for n in range(600)]),
    "deep schema": lambda client: client.body([client.user("x")], tools=[("t", "", deep(100))]),
    "no name": lambda client: client.body([client.user("x")], tools=[("", "", {})]),
    "name is a list": lambda client: client.body([client.user("x")], tools=[([], "", {})]),  # type: ignore[list-item]
    "large number": lambda client: client.body([client.user("x")], max_tokens=10**40),
    "temperature": lambda client: client.body([client.user("x")], temperature=3),
    "stream": lambda client: client.body([client.user("x")], stream="yes"),
    "surrogate": lambda client: client.body([client.user("\ud800")]),
}


@chat_dialects
@pytest.mark.parametrize("name", HOSTILE)
def test_dialect_refuses_hostile_request_in_its_shape(db: Database, client: DialectClient, name: str) -> None:
    with placed(db, Policy(ANSWER).engine) as place:
        answer = place.post(client, HOSTILE[name](client))
        assert answer.status_code == 400, answer.text
        assert 0 < len(client.error_of(answer.json())) < 1000
        assert client.ask(place.url, place.key, [client.user(QUESTION)]).text == "#### 42"


@chat_dialects
def test_dialect_refuses_tool_name_that_no_row_can_hold(db: Database, client: DialectClient) -> None:
    """A longer name would be cut in the row, and the chain would break once another worker reads it."""
    name, group, history, key = "t" * 128, group_of(db), [client.user(QUESTION)], ""
    policy = Policy(CHAT.turn(Message("assistant", "", tool_calls=(ToolCall(name, {}),))))
    for _ in range(2):
        with staged(Stage(db, group, policy.engine, CHAT)) as stage, endpoint_over(db) as served:
            held(stage)
            key = key or run_agent(db, 1)
            place = Place(db, stage, served.url, key)
            said = client.ask(place.url, key, history, tools=[(name, "", {})])
            history += [*said.items, *client.results([call[:1] for call in said.calls], ["42"])]
            refused = place.post(client, client.body(history, tools=[(name + "t", "", {})]))
            assert refused.status_code == 400
            assert "at most 128" in client.error_of(refused.json())
    first, second = episode_of(db, 1).steps
    assert (first.message.tool_calls[0].name, second.chain) == (name, 0)


@chat_dialects
def test_dialect_bears_large_requests(db: Database, client: DialectClient) -> None:
    with placed(db, Policy(ANSWER).engine, window=500) as place:
        tools = [(f"tool_{number}", "It does what its name says.", {}) for number in range(200)]
        for more in ({"tools": tools}, {"tools": [("t", "", {"properties": {"x" * 1_000_000: {}}})]}):
            answer = place.post(client, client.body([client.user("x")], **more))
            assert answer.status_code == 400, more
            assert "maximum context length" in client.error_of(answer.json())
        long = "You help. " * 12_000
        fields: Any = {
            CHAT_DIALECT: {"messages": [{"role": "system", "content": long}, client.user("x")]},
            RESPONSES: {"instructions": long},
            MESSAGES: {"system": long},
        }
        answer = place.post(client, client.body([client.user("x")]) | fields[client])
        assert "maximum context length" in client.error_of(answer.json())
        large = place.post(client, b"x" * (9 * 2**20))
        assert large.status_code == 413
        assert client.error_of(large.json())


def test_every_path_of_a_dialect_is_served(db: Database) -> None:
    with placed(db, Policy(ANSWER).engine) as place:
        for path in DIALECTS:
            answer = httpx2.post(place.url + path, json={}, headers={"x-api-key": place.key})
            assert answer.status_code == 400
            assert httpx2.get(place.url + path).headers["allow"] == "POST"


# what only one dialect has


def test_completions_of_ids_are_one_chain(db: Database) -> None:
    policy = Policy(ANSWER, OTHER)
    with placed(db, policy.engine) as place, openai_client(place.url, place.key) as client:
        prompt = [*CHAT.opening([Message("user", QUESTION)])]
        asked: Any = {"model": "m", "max_tokens": 50, "extra_body": {"return_token_ids": True}}
        first: Any = client.completions.create(prompt=prompt, logprobs=0, **asked)
        assert (first.choices[0].text, first.choices[0].token_ids) == ("#### 42", list(ANSWER))
        assert first.choices[0].logprobs.text_offset[:2] == [0, len(first.choices[0].logprobs.tokens[0])]
        more = CHAT.continuation([Message("user", "and?")], turn=ANSWER)[0]
        assert more
        longer = [*prompt, *ANSWER, *more]
        second = client.completions.create(prompt=[longer], stream=True, **asked)  # type: ignore[arg-type]
        assert "".join(choice.text for piece in second for choice in piece.choices) == "#### 48"
        two = episode_of(db, 1).steps[1]
        assert (two.chain, two.parent, two.shared, two.prompt_ids) == (0, 0, None, more)
        assert policy.requests[1].prompt_ids == tuple(longer)
        client.completions.create(prompt=CHAT.decode(prompt), **asked)
        third = episode_of(db, 1).steps[2]
        with pytest.raises(openai.BadRequestError, match="no response with this id"):
            client.responses.create(input="x", previous_response_id=first.id.replace("cmpl-", "resp_"))
        assert (third.chain, third.shared, third.new_row) == (
            1,
            len(prompt),
            "the prompt extends the tokens of no earlier turn",
        )


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"prompt": [1, "a"]},
        {"prompt": [True]},
        {"prompt": [-1]},
        {"prompt": [2**40]},
        {"prompt": [999_999]},
        {"prompt": {}},
        {"echo": True},
        {"suffix": "x"},
        {"n": 1000},
        {"logprobs": 6},
    ],
)
def test_completions_refuse_hostile_prompts(db: Database, more: Any) -> None:
    with placed(db, Policy(ANSWER).engine) as place:
        answer = place.post(COMPLETIONS, COMPLETIONS.body(["x"]) | more)
        assert answer.status_code == 400, answer.text
        assert COMPLETIONS.error_of(answer.json())


def test_completions_refuse_many_ids_before_other_work(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "identity_of", lambda *_: pytest.fail("it was hashed"))
    with placed(db, Policy(ANSWER).engine, window=120) as place:
        answer = place.post(COMPLETIONS, COMPLETIONS.body(["x"]) | {"prompt": [1] * 500_000, "echo": True})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert "it has 500000 tokens" in error["message"]


def test_messages_count_tokens_samples_nothing(db: Database) -> None:
    policy = Policy(ANSWER)
    with placed(db, policy.engine) as place, anthropic_client(place.url, place.key) as client:
        asked: Any = {"model": "any", "messages": [MESSAGES.user(QUESTION)], "system": "Be brief."}
        counted = client.messages.count_tokens(**asked).input_tokens
        said = client.messages.create(**asked, max_tokens=100)
        assert counted == said.usage.input_tokens == len(policy.requests[0].prompt_ids)
        assert len(episode_of(db, 1).steps) == len(policy.requests) == 1
        body = {"input": QUESTION}
        answer = httpx2.post(f"{place.url}/v1/responses/input_tokens", json=body, headers={"x-api-key": place.key})
        assert answer.json()["input_tokens"] < counted


def test_messages_continue_thread_by_message_id(db: Database) -> None:
    with placed(db, Policy(ASK, ANSWER, OTHER).engine, size=2) as place, anthropic_client(place.url, place.key) as client:
        tools: Any = MESSAGES.body([], tools=[CALCULATOR])["tools"]
        thread = client.beta.messages.thread(max_tokens=100, model="m", tools=tools, system="Be brief.")
        call: Any = thread.send(MESSAGES.user(QUESTION)).content[0]
        with thread.stream(*MESSAGES.results([(call.id,)], ["42"])) as events:
            assert events.get_final_text() == "#### 42"
        assert thread.previous_message_id
        thread.send(MESSAGES.user("and 6*8?"))
        assert [step.chain for step in episode_of(db, 1).steps] == [0, 0, 0]
        assert [result.content for result in episode_of(db, 1).steps[0].results or ()] == ["42"]
        body = MESSAGES.body(
            [MESSAGES.user("x")], thread={"type": "continue", "previous_message_id": thread.previous_message_id}
        )
        assert place.post(MESSAGES, body | {"system": "x"}).status_code == 400
        kept = place.post(MESSAGES, body | {"tool_choice": {"type": "none"}})
        assert kept.headers["x-agentrl-not-applied"] == "tool_choice", "a thread keeps its tools"
        other = place.post(MESSAGES, body, authorization=f"Bearer {run_agent(db, 2)}")
        assert (other.status_code, other.json()["error"]["details"]["error_code"]) == (400, "thread_not_found")


@chat_dialects
def test_dialect_response_names_the_policy_version(db: Database, client: DialectClient) -> None:
    with placed(db, Policy(ANSWER).engine) as place:
        for stream in (False, True):
            answer = place.post(client, client.body([client.user(f"{QUESTION} {stream}")], stream=stream))
            assert (answer.status_code, answer.headers["x-agentrl-policy-version"]) == (200, "0")


def test_messages_fields_without_effect_are_named(db: Database) -> None:
    with placed(db, Policy(ANSWER).engine) as place:
        body = MESSAGES.body([MESSAGES.user("x")], thinking={"type": "enabled", "budget_tokens": 31999})
        body["tools"] = [{"type": "web_search_20250305", "name": "web_search"}]
        answer = place.post(MESSAGES, body | {"é\n": 1})
        assert answer.headers["x-agentrl-not-applied"] == "tools[web_search_20250305], thinking, ??"
        (stored,) = values(db, "SELECT asked FROM steps")
        assert json.loads(stored)["not_applied"][:2] == ["tools[web_search_20250305]", "thinking"]


@pytest.mark.parametrize("stream", [False, True])
def test_responses_continue_by_previous_response_id(db: Database, stream: bool) -> None:
    with placed(db, Policy(ASK, ANSWER, OTHER).engine, size=2) as place, openai_client(place.url, place.key) as client:
        tools: Any = RESPONSES.body([], tools=[CALCULATOR])["tools"]

        def respond(**more: Any) -> Any:
            asked: Any = {"model": "any", "tools": tools, "instructions": "Be brief.", **more}
            if not stream:
                return client.responses.create(**asked)
            with client.responses.stream(**asked) as events:
                return events.get_final_response()

        first = respond(input=QUESTION)
        (call,) = first.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
        second = respond(input=[result], previous_response_id=first.id)
        assert (second.output_text, second.previous_response_id) == ("#### 42", first.id)
        assert respond(input="and 6*8?", previous_response_id=second.id).output_text == "#### 48"
        assert [step.chain for step in episode_of(db, 1).steps] == [0, 0, 0]
        assert [result.content for result in episode_of(db, 1).steps[0].results or ()] == ["42"]
        branched = client.responses.create(model="any", input=[result], previous_response_id=first.id, instructions="Be long.")
        assert branched.output_text == "#### 48"
        assert episode_of(db, 1).steps[3].chain == 1
        with openai_client(place.url, run_agent(db, 2)) as other, pytest.raises(openai.BadRequestError) as refused:
            other.responses.create(model="any", input="x", previous_response_id=first.id)
        assert refused.value.code == "previous_response_not_found"


def test_responses_survive_restart_and_references(db: Database) -> None:
    policy, group = Policy(ASK, ANSWER), group_of(db)
    tools: Any = RESPONSES.body([], tools=[CALCULATOR])["tools"]
    key = ""
    for turn in range(2):
        with staged(Stage(db, group, policy.engine, CHAT)) as stage, endpoint_over(db) as served:
            held(stage)
            key = key or run_agent(db, 1)
            with openai_client(served.url, key) as client:
                if turn == 0:
                    first = client.responses.create(model="any", tools=tools, input=QUESTION)
                    continue
                references = [{"type": "item_reference", "id": item.id} for item in first.output]
                results = RESPONSES.results([(first.output[0].call_id,)], ["42"])  # type: ignore[union-attr]
                items: Any = [{"role": "user", "content": QUESTION}, *references, *results]
                assert client.responses.create(model="any", tools=tools, input=items).output_text == "#### 42"
    assert [step.chain for step in episode_of(db, 1).steps] == [0, 0]


def test_responses_restore_namespaces(db: Database) -> None:
    turn = CHAT.turn(Message("assistant", "", tool_calls=(ToolCall("agents__spawn", {"task": "x"}),)))
    with placed(db, Policy(turn, ANSWER).engine) as place:
        tools = [
            {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn", "parameters": {}}]},
            {"type": "web_search", "external_web_access": True},
        ]
        answer = place.post(RESPONSES, {"model": "any", "input": QUESTION, "tools": tools})
        (call,) = answer.json()["output"]
        assert (call["namespace"], call["name"], answer.headers["x-agentrl-not-applied"]) == (
            "agents",
            "spawn",
            "tools[web_search]",
        )
        items = [RESPONSES.user(QUESTION), call, *RESPONSES.results([(call["call_id"],)], ["done"])]
        assert place.post(RESPONSES, {"model": "any", "input": items, "tools": tools}).status_code == 200
        assert [step.chain for step in episode_of(db, 1).steps] == [0, 0]
