"""The clients of `agentrl serve`: who is let in, whose episode a call belongs to, and when that ends."""

import asyncio
from collections.abc import Mapping, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentrl.workers.http.api_errors import ApiError, too_large
from agentrl.workers.http.calls import read_origins
from agentrl.workers.jobs.agent_calls import ANNOTATIONS
from agentrl.workers.serving import served_clients
from agentrl.workers.serving.attempt_keys import AttemptKeys
from agentrl.workers.serving.endpoint_app import Endpoint
from agentrl.workers.serving.served_clients import END, MAX_CLIENTS, MAX_END_BYTES, Read, ServedClients
from agentrl.workflow.agents import read_result
from agentrl.workflow.config import RolloutConfig
from agentrl.workflow.dialects.chat_completions import PATH as CHAT
from agentrl.workflow.dialects.client_sampling import key_asked, limits_asked, with_stop
from agentrl.workflow.errors import StateError
from agentrl.workflow.trajectory import SamplingKey

HERE = {"host": "localhost:8000"}
CREATED = 1_700_000_000


@dataclass(frozen=True)
class Opened:
    id: int
    key: str

    @property
    def emit_key(self) -> str:
        return f"of the annotations of {self.key}"


@dataclass
class Episodes:
    """Opens and ends at once, and notes it."""

    names: list[str] = field(default_factory=list)
    ends: list[tuple[int, str | None, Any]] = field(default_factory=list)
    fails: bool = False
    failed: set[int] = field(default_factory=set)
    slow: "Future[Any] | None" = None

    def open(self, client: str) -> "Future[Any]":
        made: Future[Any] = self.slow or Future()
        if self.slow is not None:
            return made
        if self.fails:
            made.set_exception(StateError("serve-1 is over."))
            return made
        self.names.append(client)
        made.set_result(Opened(len(self.names), f"key{len(self.names)}"))
        return made

    def is_open(self, episode: int) -> bool:
        return episode not in self.failed

    def end(self, episode: int, answer: str | None, rewards: Mapping[str, float] | None) -> "Future[None]":
        self.ends.append((episode, answer, rewards))
        made: Future[None] = Future()
        made.set_result(None)
        return made


def serving(episodes: Any, run: str, **how: Any) -> ServedClients:
    return ServedClients(episodes, run, created=CREATED, **how)


async def call(clients: ServedClients, shown: str = "", **headers: str) -> str:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with clients.enter(shown, HERE | named, CHAT) as key:
        return key


def body_of(sent: bytes) -> Read:
    """Reads what a client sent, as the endpoint does."""

    async def read(most: int) -> bytes:
        if len(sent) > most:
            raise too_large(most)
        return sent

    return read


def refused(clients: ServedClients, shown: str = "", headers: Mapping[str, str] = HERE) -> tuple[int, str]:
    with pytest.raises(ApiError) as caught:
        asyncio.run(clients.find_model(shown, headers))
    return caught.value.status, caught.value.code


def test_client_is_identified_by_key_and_header() -> None:
    async def play() -> list[str]:
        clients = serving(Episodes(), "serve-1")
        return [
            await call(clients),
            await call(clients),
            await call(clients, "sk-mine"),
            await call(clients, x_agentrl_episode="a"),
            await call(clients, "sk-mine", x_agentrl_episode="a"),
            await call(clients, "sk-mine"),
        ]

    assert asyncio.run(play()) == ["key1", "key1", "key2", "key3", "key4", "key2"]


def test_client_annotation_belongs_to_episode_of_its_calls() -> None:
    async def play() -> tuple[str, str]:
        clients = serving(Episodes(), "r")
        called = await call(clients, "alice")
        async with clients.enter("alice", HERE, ANNOTATIONS) as key:
            return called, key

    assert asyncio.run(play()) == ("key1", "of the annotations of key1")


def test_client_api_key_is_not_stored() -> None:
    episodes = Episodes()
    asyncio.run(call(serving(episodes, "serve-1"), "sk-secret"))
    assert episodes.names == ["client"]


def test_client_calls_at_once_share_first_opened_episode() -> None:
    async def play() -> set[str]:
        clients = serving(Episodes(), "serve-1")
        return set(await asyncio.gather(*(call(clients, x_agentrl_episode="one") for _ in range(20))))

    assert asyncio.run(play()) == {"key1"}


def test_client_episode_ends_by_silence_without_open_call() -> None:
    async def play() -> tuple[list[Any], list[Any], str]:
        episodes = Episodes()
        clients = serving(episodes, "serve-1", idle_seconds=0.05)
        async with clients.enter("", HERE, CHAT):
            await asyncio.sleep(0.2)
            during = list(episodes.ends)
        await asyncio.sleep(0.2)
        return during, episodes.ends, await call(clients)

    assert asyncio.run(play()) == ([], [(1, None, None)], "key2")


def test_client_episode_ends_by_call_with_answer_and_rewards() -> None:
    async def play() -> tuple[Any, list[Any]]:
        episodes = Episodes()
        clients = serving(episodes, "serve-1")
        await call(clients)
        told = await clients.end_episode("", HERE, body_of(b'{"text": "7", "rewards": {"liked": 1}}'))
        return told, episodes.ends

    told, ends = asyncio.run(play())
    assert told == {"episode": 1, "run": "serve-1", "status": "ended"}
    assert ends == [(1, "7", {"liked": 1.0})]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[" * 100_000,
        b"\xff",
        b'{"rewards": {"a": NaN}}',
        b'{"rewards": {"a": 1' + b"0" * 400 + b"}}",
        b'{"rewards": {"a": 1' + b"0" * 60_000 + b"}}",
        b'{"rewards": {"' + b"a" * 10_000 + b'": 1}}',
        b'{"text": 3}',
        b"true and false",
        b'{"rewards": {"a": -1e31}}',
        b"x" * 70_000,
    ],
)
def test_client_end_call_refused_leaves_episode_open(body: bytes) -> None:
    async def play() -> tuple[int, str]:
        clients = serving(Episodes(), "serve-1")
        await call(clients)
        with pytest.raises(ApiError) as caught:
            await clients.end_episode("", HERE, body_of(body))
        assert len(caught.value.message) < 600
        return caught.value.status, await call(clients)

    status, key = asyncio.run(play())
    assert status in (400, 413)
    assert key == "key1"


def test_client_without_open_episode_cannot_end_one() -> None:
    async def play() -> int:
        with pytest.raises(ApiError) as caught:
            await serving(Episodes(), "serve-1").end_episode("", HERE, body_of(b""))
        return caught.value.status

    assert asyncio.run(play()) == 404


def test_client_gets_new_episode_after_many_calls() -> None:
    async def play() -> tuple[list[str], list[Any]]:
        episodes = Episodes()
        clients = serving(episodes, "serve-1", most_calls=2)
        return [await call(clients) for _ in range(5)], episodes.ends

    keys, ends = asyncio.run(play())
    assert keys == ["key1", "key1", "key2", "key2", "key3"]
    assert [episode for episode, _, _ in ends] == [1, 2]


def test_served_client_with_key_admits_its_holder_from_anywhere() -> None:
    clients = serving(Episodes(), "serve-1", key="sesame")
    away = {"host": "gpu.example.org"}
    assert refused(clients) == refused(clients, "Sesame", away) == (401, "invalid_api_key")
    assert refused(clients, "\udcff", away) == (401, "invalid_api_key")
    assert asyncio.run(clients.find_model("sesame", away)) == ("serve-1", CREATED)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "attacker.example.org"},
        {"host": "localhost.example.org"},
        {"host": "["},
        {**HERE, "origin": "http://attacker.example.org"},
        {**HERE, "origin": "null"},
    ],
)
def test_served_client_without_key_refuses_pages_of_other_sites(headers: Mapping[str, str]) -> None:
    assert refused(serving(Episodes(), "serve-1"), headers=headers) == (403, "not_local")


APP, OTHER = b"https://app.example.org", b"https://app.example.org.attacker.example"


def answered(clients: ServedClients, method: str, path: str, headers: Mapping[bytes, bytes]) -> tuple[int, dict[bytes, bytes]]:
    """The status and the headers of an answer of the endpoint with that clients."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    app = Endpoint(AttemptKeys(lambda keys: {}), clients=clients)
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": list(headers.items())}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"])


def test_endpoint_lets_pages_of_named_origins_call_with_the_key() -> None:
    clients = serving(Episodes(), "serve-1", key="sesame", allowed_origins=frozenset({APP.decode()}))
    asks = {b"origin": APP, b"access-control-request-headers": b"authorization, x-stainless-os,x-evil"}
    status, said = answered(clients, "OPTIONS", CHAT, asks)
    assert (status, said[b"access-control-allow-origin"], said[b"access-control-allow-methods"]) == (204, APP, b"POST")
    assert b"x-stainless-os" in said[b"access-control-allow-headers"]
    assert b"x-evil" not in said[b"access-control-allow-headers"]
    for key, status in ((b"sesame", 200), (b"wrong", 401)):
        found = answered(clients, "GET", "/v1/models", {b"origin": APP, b"authorization": b"Bearer " + key})
        assert (found[0], found[1][b"access-control-allow-origin"], found[1][b"vary"]) == (status, APP, b"Origin")


@pytest.mark.parametrize(
    ("key", "origin", "path"),
    [
        ("sesame", OTHER, CHAT),
        ("sesame", b"http://app.example.org", CHAT),
        ("sesame", b"null", CHAT),
        ("sesame", b"", CHAT),
        ("sesame", APP, f"/attempt/sesame{CHAT}"),
        ("", APP, CHAT),
    ],
)
def test_endpoint_refuses_pages_of_other_origins(key: str, origin: bytes, path: str) -> None:
    clients = serving(Episodes(), "serve-1", key=key, allowed_origins=frozenset({APP.decode()}))
    for method in ("OPTIONS", "POST"):
        status, said = answered(clients, method, path, {b"origin": origin, b"host": b"localhost"})
        assert status != 204
        assert not [name for name in said if name.startswith(b"access-control")]


@pytest.mark.parametrize("text", ["*", "https://*.example.org", "app.example.org", "https://app.example.org/", "HTTPS://A.ORG"])
def test_read_origins_refuses_parts_of_origins(text: str) -> None:
    with pytest.raises(ValueError, match="is not an origin"):
        read_origins(f"http://localhost:3000,{text}")
    assert read_origins(" http://localhost:3000, https://[::1]:8 ,") == {"http://localhost:3000", "https://[::1]:8"}


def test_client_body_is_not_read_before_end_is_allowed() -> None:
    taken: list[int] = []

    async def read(most: int) -> bytes:
        taken.append(most)
        return b""

    async def play() -> list[int]:
        clients, statuses = serving(Episodes(), "serve-1", key="sesame"), []
        for shown in ("wrong", "sesame"):
            with pytest.raises(ApiError) as caught:
                await clients.end_episode(shown, HERE, read)
            statuses.append(caught.value.status)
        return statuses

    assert asyncio.run(play()) == [401, 404]
    assert taken == [MAX_END_BYTES]


def test_client_body_that_ends_episode_is_limited() -> None:
    sent: list[Any] = []
    left = [b" " * 40_000] * 4
    app = Endpoint(AttemptKeys(lambda keys: {}), clients=serving(Episodes(), "serve-1"))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(), "more_body": bool(left)}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": END, "raw_path": END.encode(), "headers": [(b"host", b"localhost:8000")]}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 413


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:8000"])
def test_served_client_without_key_admits_local_requests(host: str) -> None:
    assert asyncio.run(serving(Episodes(), "serve-1").find_model("", {"host": host})) == ("serve-1", CREATED)


@pytest.mark.parametrize("name", ["a" * 129, "a b", "\xff", "a\x00", "ü"])
def test_client_episode_name_must_be_short_and_plain(name: str) -> None:
    assert refused(serving(Episodes(), "serve-1"), headers={**HERE, "x-agentrl-episode": name}) == (400, "invalid_episode")


def test_client_beyond_limit_must_wait() -> None:
    async def play() -> int:
        clients = serving(Episodes(), "serve-1")
        for number in range(MAX_CLIENTS):
            await call(clients, x_agentrl_episode=str(number))
        with pytest.raises(ApiError) as caught:
            await call(clients, x_agentrl_episode="another")
        await call(clients, x_agentrl_episode="0")
        return caught.value.status

    assert asyncio.run(play()) == 429


def test_client_must_retry_if_no_episode_opens() -> None:
    episodes = Episodes(fails=True)
    clients = serving(episodes, "serve-1")

    async def play() -> tuple[int, str]:
        with pytest.raises(ApiError) as caught:
            await call(clients)
        episodes.fails = False
        return caught.value.status, await call(clients)

    assert asyncio.run(play()) == (503, "key1")


def test_client_gets_new_episode_after_failure() -> None:
    episodes = Episodes()
    clients = serving(episodes, "serve-1")

    async def play() -> list[str]:
        keys = [await call(clients)]
        episodes.failed.add(1)
        return [*keys, await call(clients), await call(clients)]

    assert asyncio.run(play()) == ["key1", "key2", "key2"]


def test_client_episode_opened_after_timeout_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_clients, "OPEN_SECONDS", 0.05)
    episodes = Episodes(slow=Future())
    clients = serving(episodes, "serve-1")

    async def play() -> int:
        with pytest.raises(ApiError) as caught:
            await call(clients)
        assert episodes.slow is not None
        episodes.slow.set_result(Opened(7, "late"))
        await asyncio.sleep(0.05)
        return caught.value.status

    assert asyncio.run(play()) == 503
    assert episodes.ends == [(7, None, None)]


LIMITS = RolloutConfig(temperature=0.7, top_k=9)
KEY = SamplingKey(3, "serve", 0, "client", 5)


def test_client_sets_sampling_and_temperature_0_is_greedy() -> None:
    found = limits_asked(LIMITS, {"temperature": 0.2, "top_p": 0.5, "top_k": -1, "created": 1})
    assert (found.temperature, found.top_p, found.top_k) == (0.2, 0.5, 0)
    for greedy in ({"temperature": 0}, {"temperature": 1e-320}, {"temperature": 9e-5}, {"top_p": 0.0, "temperature": 1.5}):
        assert (limits_asked(LIMITS, greedy).top_k, limits_asked(LIMITS, greedy).temperature) == (1, 1.0)
    assert limits_asked(LIMITS, {}) == LIMITS


def test_client_seed_draws_the_same_in_any_episode() -> None:
    other = SamplingKey(3, "serve", 0, "another", 6)
    assert key_asked(KEY, {"seed": -4}) == key_asked(other, {"seed": -4}) != key_asked(KEY, {"seed": 4})
    assert key_asked(KEY, {}) == KEY


def test_client_stop_strings_add_to_those_of_run() -> None:
    assert with_stop(RolloutConfig(stop=("a",)), ["b", "a"]).stop == ("a", "b")


def test_end_with_reward_that_is_no_number_names_it() -> None:
    with pytest.raises(TypeError, match=r"^rewards\.x must be a number, not str$"):
        read_result({"rewards": {"x": "y"}})
    with pytest.raises(TypeError, match=r"^an agent must return None"):
        read_result([1])
