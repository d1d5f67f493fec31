"""A connection to a server that samples. JSON responses are parsed, and refusals become agentrl's errors. This module needs no
torch.
"""

import json
import threading
import time
from collections.abc import Callable, Set
from contextlib import closing
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from ssl import SSLContext
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import httpx2

from agentrl.workflow.errors import AgentRLError, ConfigError, InfraError, ModelError, ServiceError
from agentrl.workflow.inference.server_responses import Card, Cards, ServerResponse, Shape, read
from agentrl.workflow.settings import Settings

Answer = TypeVar("Answer")
Who = Literal["engine", "critic"]
CONNECT_SECONDS = 10.0
CHECK_SECONDS = 2.0
"""The longest wait for a server that is only checked, in seconds."""

ANSWER_SECONDS = 900.0
"""The longest wait for a response, in seconds. After that the server is treated as unavailable, and the turn fails."""

MAX_BYTES = 64 * 1024 * 1024
"""The largest response, in bytes. A turn of 100,000 tokens with likeliest alternatives for each takes half of that."""

MAX_SERVERS = 64
"""The most servers of one engine."""

MAX_URL_CHARS = 500
"""The most characters of a server's URL, which errors quote."""

HIDDEN = "[the key]"
SECRET_CHARS = 12
"""The fewest characters of a key that is hidden in every response, not only in errors."""

QUOTED_CHARS = 200
"""The most characters of a response that an error quotes."""

_UNAVAILABLE_STATUSES = (429, 502, 503, 504)
"""The HTTP statuses of a server, or of a proxy in front of it, that is temporarily unavailable."""


class RequestRefused(ModelError):
    """A server refused a request. `reason` is the text of its response, `status` the HTTP status."""

    def __init__(self, url: str, path: str, status: int, reason: str) -> None:
        super().__init__(f"The server at {url} refused {path}: {status} {reason:.{QUOTED_CHARS}}")
        self.status = status
        self.reason = reason


@cache
def _tls_context() -> SSLContext:
    """Load the certificates of trusted authorities, once for all connections of this process."""
    return httpx2.create_ssl_context()


class Connection:
    """A client for one server, with its open connections.

    Args:
        settings: the settings with the server's URL and key: `engine_url` and `engine_key`, or `critic_url` and `critic_key`.
        who: the part of agentrl that uses the server: the engine or the critic.
        url: the server's URL, one of `server_urls`; None: the first.
        max_bytes: the largest response, in bytes; None: `MAX_BYTES`.
        seconds: the longest wait for a response, in seconds.

    Raises:
        ConfigError: a URL is missing or invalid.
    """

    def __init__(
        self,
        settings: Settings,
        who: Who = "engine",
        max_bytes: int | None = None,
        seconds: float = ANSWER_SECONDS,
        url: str | None = None,
    ) -> None:
        self._who, self._variable = who, f"AGENTRL_{who.upper()}"
        self._max_bytes, self._seconds = max_bytes or MAX_BYTES, seconds
        self.url = url or server_urls(settings, who)[0]
        self._key = str(getattr(settings, f"{who}_key"))
        self._client = httpx2.Client(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            follow_redirects=False,  # the key must not reach another server
            timeout=httpx2.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS)),
            verify=_tls_context(),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=settings.slots),
        )

    def close(self) -> None:
        """Close the connections. Requests that are still waiting for a response raise ServiceError."""
        self._client.close()

    def read(self, shape: type[Shape], path: str, body: Any = None) -> Shape:
        """Send a request, by POST if there is a body, and return the response in the given shape.

        Raises:
            ServiceError: the server does not respond, or is not ready.
            ConfigError: the server refuses the API key.
            RequestRefused: the server refuses the request.
            InfraError: the server failed, or its response has another shape.
            ModelError: the response is not a JSON object.
        """
        tree = _json(self.url, path, self._ask("GET" if body is None else "POST", path, body))
        return read(shape, tree, self.url, path)

    def tell(self, path: str, body: Any) -> None:
        """Post the body and ignore the response. Raises as `read` does."""
        self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Any) -> bytes:
        until = time.monotonic() + self._seconds
        try:
            with self._client.stream(method, self.url + path, json=body) as response:
                status, answer = response.status_code, self._without_key(self._body(path, response, until))
        except (httpx2.TransportError, httpx2.DecodingError, RuntimeError) as error:  # RuntimeError: closed meanwhile
            text = f"The {self._who}'s server at {self.url} does not answer: {type(error).__name__}: {error}."
            raise ServiceError(text, f"Start it, or correct {self._variable}_URL.") from error
        if status < 300:
            return answer
        text = " ".join(answer.decode(errors="replace").split())
        text = text.replace(self._key, HIDDEN) if self._key else text
        if status in _UNAVAILABLE_STATUSES:
            raise ServiceError(f"The {self._who}'s server at {self.url} is not ready: {status} {text:.{QUOTED_CHARS}}")
        if status in (401, 403):
            raise ConfigError(f"The server at {self.url} refuses the API key ({status}).", f"Set {self._variable}_KEY.")
        if status >= 500:
            raise InfraError(f"The server at {self.url} failed: {status} {text:.{QUOTED_CHARS}}")
        raise RequestRefused(self.url, path, status, text)

    def _without_key(self, answer: bytes) -> bytes:
        """Hide the key, because errors quote responses and are stored. A short key is no secret, and may be a word of JSON."""
        return answer.replace(self._key.encode(), HIDDEN.encode()) if len(self._key) >= SECRET_CHARS else answer

    def _body(self, path: str, response: httpx2.Response, until: float) -> bytes:
        body = bytearray()
        for part in response.iter_bytes():
            body += part
            if len(body) > self._max_bytes:
                raise InfraError(f"The server at {self.url} answered {path} with more than {self._max_bytes} bytes.")
            if time.monotonic() > until:  # the client's own limit begins anew with each byte
                raise httpx2.ReadTimeout(f"its answer has not ended after {self._seconds:g} seconds")
        return bytes(body)


def base_card(connection: Connection, names: Set[str]) -> Card:
    """Return the server's entry in `/v1/models` for the base, which must have one of these names.

    Raises:
        ModelError: the server has no such base. Only the name can be checked.
        ServiceError, ConfigError, InfraError: see `Connection.read`.
    """
    cards = [card for card in connection.read(Cards, "/v1/models").data if not card.parent]
    names_by_card = [{Path(name).name for name in (card.id, card.root) if name} for card in cards]
    card = next((card for card, its_names in zip(cards, names_by_card, strict=True) if its_names & names), None)
    if card is None:
        served = " ".join(sorted(set().union(*names_by_card))) or "nothing"
        ours = sorted(names)[0]
        raise ModelError(
            f"The server at {connection.url} serves {served:.300}, and not {ours}.",
            f"Start it with that model, or with --served-model-name {ours}.",
        )
    return card


def ask_servers(settings: Settings, ask: Callable[[Connection], Answer]) -> "dict[str, Answer | AgentRLError]":
    """Call `ask` with a connection to each of the engine's servers, all at once. Return the results, or the exceptions, by URL.

    A server whose answer is not complete after CHECK_SECONDS has a ServiceError.

    Raises:
        ConfigError: a URL is missing or invalid.
    """
    silent = f"has not answered within {CHECK_SECONDS:g} seconds"
    hint = "Start it, or correct AGENTRL_ENGINE_URL."
    answers: dict[str, Answer | AgentRLError] = {
        url: ServiceError(f"The engine's server at {url} {silent}.", hint) for url in server_urls(settings)
    }

    def run(url: str) -> None:
        try:
            with closing(Connection(settings, url=url, seconds=CHECK_SECONDS)) as connection:
                answers[url] = ask(connection)
        except AgentRLError as error:
            answers[url] = error

    # Daemon threads: a header that arrives letter by letter cannot be interrupted, so such a server is left behind.
    asking = [threading.Thread(target=run, args=(url,), daemon=True) for url in answers]
    for thread in asking:
        thread.start()
    end = time.monotonic() + 2 * CHECK_SECONDS
    for thread in asking:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(answers)


def check_bases(settings: Settings, names: Set[str]) -> None:
    """Check that each server that responds now has the base under one of these names.

    Raises:
        ModelError: a server has no such base.
        ConfigError: a URL is missing or invalid, or a server refuses the key.
    """
    for answer in ask_servers(settings, lambda connection: base_card(connection, names)).values():
        if isinstance(answer, AgentRLError) and not isinstance(answer, ServiceError | InfraError):
            raise answer


def check_urls(settings: Settings, names: Set[str] = frozenset()) -> None:
    """Check only the URLs in the settings, for servers whose name of the base is unknown. Raise ConfigError if a URL is missing
    or invalid.
    """
    server_urls(settings)


def has_development_routes(settings: Settings, url: str) -> bool:
    """Return whether the server is a vLLM with VLLM_SERVER_DEV_MODE. The development routes of such a server ask for no key,
    and anyone who can reach these routes can run methods of the server's processes (`/collective_rpc`). False if the server
    does not respond.
    """
    with closing(Connection(settings, url=url, max_bytes=2**20, seconds=CHECK_SECONDS)) as connection:
        try:
            connection.read(ServerResponse, "/server_info")
        except AgentRLError:
            return False
        return True


def connections(settings: Settings) -> list[Connection]:
    """Return a connection to each of the engine's servers. Raises as `server_urls` does."""
    return [Connection(settings, url=url) for url in server_urls(settings)]


def names_loopback(url: str) -> bool:
    """Return whether the URL's host is this machine's loopback address: `localhost` or 127.0.0.1, for example."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def server_urls(settings: Settings, who: Who = "engine") -> tuple[str, ...]:
    """Return the URLs in the settings, without `/v1`. The setting of an engine may list several URLs, separated by commas; that
    of a critic has one.

    Raises:
        ConfigError: there is no URL, one is not an http URL with a host, two are equal, or there are too many.
    """
    setting, hint = getattr(settings, f"{who}_url"), f"Set AGENTRL_{who.upper()}_URL=http://HOST:PORT"
    if not setting:
        later = "for the workers. If workers are running, stop them with `agentrl down` and submit again"
        raise ConfigError(f"This {who} needs a server's URL.", f"{hint} {later}.")
    if set(setting) & set("@?#"):  # in no part of the list, because a password may contain a comma
        message = f"The URL of the {who}'s server must not contain a password, a query or a fragment, because errors quote it."
        raise ConfigError(message, f"Set AGENTRL_{who.upper()}_KEY to its API key, and leave @, ? and # out of the URL.")
    parts = setting.split(",")
    limit = MAX_SERVERS if who == "engine" else 1
    if len(parts) > limit:
        raise ConfigError(f"AGENTRL_{who.upper()}_URL names {len(parts)} servers; at most {limit} is allowed.", "Name fewer.")
    urls = tuple(_checked_url(part.strip(), hint) for part in parts)
    same = [str(httpx2.URL(url)) for url in urls]  # as the client names it: host in lower case, no default port
    twice = next((url for place, url in enumerate(urls) if same[place] in same[:place]), None)
    if twice:
        raise ConfigError(f"AGENTRL_{who.upper()}_URL names {twice} twice.", "Name each server once.")
    return urls


def _checked_url(url: str, hint: str) -> str:
    if len(url) > MAX_URL_CHARS:
        raise ConfigError(f"A server's URL has {len(url)} characters; at most {MAX_URL_CHARS} are allowed.", f"{hint}.")
    try:
        parsed_url = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"{url!r} is not a server's URL: {error}.", f"{hint}.") from error
    port = parsed_url.port
    wrong = parsed_url.scheme not in ("http", "https") or not parsed_url.host or " " in url
    if wrong or not (port is None or 0 < port < 2**16):
        raise ConfigError(f"{url!r} is not an http:// or https:// URL with a host and a valid port.", f"{hint}.")
    return url.rstrip("/").removesuffix("/v1")


def _json(url: str, path: str, answer: bytes) -> Any:
    text = answer[:100].decode(errors="replace")
    try:
        tree = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"The server at {url} answered {path} with invalid JSON: {text!r}.") from error
    if not isinstance(tree, dict):
        raise ModelError(f"The server at {url} answered {path} with JSON that is not an object: {text!r}.")
    return tree
