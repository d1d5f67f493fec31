"""The access control of the page. For each request, it checks the host name, the origin and, if other machines can reach the
page, a token.

A web page of another site can make the user's browser send requests to 127.0.0.1, even under a host name of that site.
Therefore a request with an unknown `Host` is refused. A request that does more than read needs a header that other sites cannot
send. Cross-origin access is never allowed.
"""

import asyncio
import hmac
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from html import escape
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, urlsplit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 100_000
"""The largest body of a request, in bytes. A body is an SQL query or the parameters of an action."""
BODY_SECONDS = 10.0
OWN_HEADER = b"x-agentrl"
"""The header that only the page itself can send. Requests that do more than read need this header."""
ACTIONS = "/api/actions/"
PRINTED = "Open the link that `agentrl ui` printed; it ends in ?token=..."
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
)
_PORT = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of access to the page.

    Args:
        names: the valid host names, without a port, in lower case.
        port: the port of the page.
        addresses: True if any IP address is a valid host name too. This is so if other machines can reach the page.
        token: the token that every request needs; empty if no token is needed.
        action_token: the token that actions need; empty if actions are off.
        once: a token that is valid for one request only. It is passed on the command line that starts the user's browser, where
            other users can read it.
    """

    names: frozenset[str]
    port: int
    addresses: bool = False
    token: str = ""
    action_token: str = ""
    once: str = ""

    @property
    def cookie(self) -> str:
        """The name of the token's cookie. It contains the port, because browsers send a cookie to all ports of a host."""
        return f"agentrl_ui_{self.port}"


class RequestGuard:
    """ASGI middleware that refuses forbidden requests and adds security headers to all responses."""

    def __init__(self, app: App, rules: Rules) -> None:
        self.app, self.rules = app, rules
        self._once = rules.once

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the request, and pass it to the application if it is allowed."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = _headers(scope)
        api = scope["path"].startswith("/api/")

        async def bound(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [*HEADERS, (b"cache-control", b"no-store" if api else b"no-cache")]
                message["headers"] = [*(pair for pair in message["headers"] if pair[0].lower() != b"cache-control"), *own]
            await send(message)

        refusal = self._refuse(scope, headers)
        if refusal is not None:
            await _answer(bound, *refusal, as_json=api)
        elif (token := _query_token(scope)) is not None:
            await self._take(token, bound)
        else:
            await self.app(scope, _hurried(receive), bound)

    def _refuse(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[int, str, str] | None:
        """Return the status, the message and the hint of the refusal; None if the request is allowed."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if not self._is_name(host):
            return (
                421,
                "This page is not served under this host name.",
                f"Open http://127.0.0.1:{self.rules.port}/, or use its address.",
            )
        has_token = self._knows(headers, self.rules.token)
        if not has_token and _query_token(scope) is None:
            return 401, "The token is missing.", PRINTED
        if scope["method"] in ("GET", "HEAD"):
            return None
        return self._refuse_doing(scope, headers, host)

    def _refuse_doing(self, scope: Scope, headers: dict[bytes, bytes], host: str) -> tuple[int, str, str] | None:
        if scope["method"] != "POST":
            return 405, "Only GET and POST are supported.", ""
        if b"origin" in headers and _host_of(headers[b"origin"]) != host:
            return 403, "The request comes from another site.", ""
        if headers.get(OWN_HEADER) != b"1":
            return 403, "Only the page itself may send this request.", "Programs must send the header X-Agentrl: 1."
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or len(length) > 9 or int(length) > MAX_BODY_BYTES or b"transfer-encoding" in headers:
            return 413, f"The request needs a Content-Length of at most {MAX_BODY_BYTES} bytes.", ""
        if not scope["path"].startswith(ACTIONS):
            return None
        if not self.rules.action_token:
            return 403, "This page is read-only.", "Restart it with actions: agentrl ui --actions"
        if not self._knows(headers, self.rules.action_token):
            return 401, "Actions need the token.", "Open the link that `agentrl ui --actions` printed; it ends in ?token=..."
        return None

    def _is_name(self, host: str) -> bool:
        name, port = _split_host(host)
        if port != (str(self.rules.port) if self.rules.port != 80 else port):
            return False
        return name in self.rules.names or (self.rules.addresses and _is_address(name))

    def _knows(self, headers: dict[bytes, bytes], token: str) -> bool:
        if not token:
            return True
        cookie_tokens = _cookies(headers.get(b"cookie", b""), self.rules.cookie)
        bearer = headers.get(b"authorization", b"").decode("latin-1").removeprefix("Bearer ")
        return any(hmac.compare_digest(candidate.encode(), token.encode()) for candidate in (*cookie_tokens, bearer))

    async def _take(self, token: str, send: Send) -> None:
        """Check the token in the URL. If it is right, respond with a cookie and a redirect to the URL without the token."""
        secret = self.rules.token or self.rules.action_token
        first = bool(self._once) and hmac.compare_digest(token.encode(), self._once.encode())
        if first:
            self._once = ""
        if not secret or not (first or hmac.compare_digest(token.encode(), secret.encode())):
            await _answer(send, 401, "The token is wrong.", "Open the link that `agentrl ui` printed last.", as_json=False)
            return
        cookie = f"{self.rules.cookie}={secret}; HttpOnly; SameSite=Strict; Path=/"
        await send(
            {"type": "http.response.start", "status": 303, "headers": [(b"location", b"/"), (b"set-cookie", cookie.encode())]}
        )
        await send({"type": "http.response.body", "body": b""})


def _hurried(receive: Receive) -> Receive:
    """Return a `receive` that shows a disconnected client if a body takes longer than BODY_SECONDS."""
    until = time.monotonic() + BODY_SECONDS
    whole = False

    async def take() -> Message:
        nonlocal whole
        if whole:
            return await receive()  # the end of the connection, for which an answer may listen as long as it likes
        try:
            message = await asyncio.wait_for(receive(), max(0.0, until - time.monotonic()))
        except TimeoutError:
            return {"type": "http.disconnect"}
        whole = not message.get("more_body", False)
        return message

    return take


def names_of(host: str, own: Iterable[str]) -> frozenset[str]:
    """Return the valid host names of a page that listens on `host`: loopback names, `host`, the names in `own`."""
    return frozenset(name.lower() for name in ("127.0.0.1", "localhost", "::1", host, *own) if name)


def _headers(scope: Scope) -> dict[bytes, bytes]:
    """Return the headers by name. If a header that must be unique occurs twice, its value is replaced by an invalid one."""
    headers: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        headers[name] = b"," if name in headers and name in (b"host", b"origin", b"content-length") else value
    return headers


def _split_host(host: str) -> tuple[str, str]:
    if host.startswith("["):
        name, closed, rest = host[1:].partition("]")
        if not closed or not _is_address(name):
            return "", ""
    else:
        name, colon, after = host.partition(":")
        rest = colon + after
    if not rest:
        return name, ""
    port = rest.removeprefix(":")
    return (name, port) if rest.startswith(":") and _PORT.fullmatch(port) else ("", "")


def _host_of(origin: bytes) -> str:
    """Return the host and port of an `Origin` header. For an invalid header, return a text that equals no valid host."""
    try:
        return urlsplit(origin.decode("latin-1").lower()).netloc
    except ValueError:
        return "?"


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _cookies(text: bytes, name: str) -> list[str]:
    """Return all cookies with this name. Pages on other ports of this host can set cookies too."""
    pairs = (part.strip().partition("=") for part in text.decode("latin-1").split(";"))
    return [value for cookie, _, value in pairs if cookie == name]


def _query_token(scope: Scope) -> str | None:
    if scope["path"] != "/" or scope["method"] != "GET" or b"token=" not in scope["query_string"]:
        return None
    try:
        token: str = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=10).get("token", [""])[0]
    except ValueError:
        return ""
    return token


async def _answer(send: Send, status: int, message: str, hint: str, as_json: bool) -> None:
    if as_json:
        body, kind = json.dumps({"error": message, "hint": hint}).encode(), b"application/json"
    else:
        body, kind = (
            f"<!doctype html><title>agentrl</title><p>{escape(message)}<p>{escape(hint)}".encode(),
            b"text/html; charset=utf-8",
        )
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
