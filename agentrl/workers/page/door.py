"""Access control of the page: host name, token (if other machines can reach it) and origin of each request.

A page of another site can make this browser ask at 127.0.0.1, also under a name of its own that leads there: so a foreign
`Host` is refused, and what is more than reading wants a header that no other site can send. Nothing here is cross-origin.
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
"""The largest body of a request: a question in SQL, the words of an action."""
BODY_SECONDS = 10.0
"""How long a body may take to come."""
OWN_HEADER = b"x-agentrl"
"""The header of what the page itself asks to be done."""
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
    """What the door lets in.

    Args:
        names: the host names, without a port, under which the page may be called, in lower case.
        port: where it listens.
        addresses: whether any IP address is a name too: where it listens for other machines.
        token: what every request must know; empty: nothing.
        action_token: what actions must know; empty: there are none.
        once: what the first address may have in its place, once: other users can read the command line of a browser.
    """

    names: frozenset[str]
    port: int
    addresses: bool = False
    token: str = ""
    action_token: str = ""
    once: str = ""

    @property
    def cookie(self) -> str:
        """The cookie's name: browsers send cookies to all ports of a host."""
        return f"agentrl_ui_{self.port}"


class RequestGuard:
    """A guard that refuses requests before the application sees them, and adds security headers to responses."""

    def __init__(self, app: App, rules: Rules) -> None:
        """Stand before the application."""
        self.app, self.rules = app, rules
        self._once = rules.once

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
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
        elif (given := _query_token(scope)) is not None:
            await self._take(given, bound)
        else:
            await self.app(scope, _hurried(receive), bound)

    def _refuse(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[int, str, str] | None:
        """The status, what is so and what to do, of a request that may not pass."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if not self._is_name(host):
            return (
                421,
                "This page is not served under this host name.",
                f"Open http://127.0.0.1:{self.rules.port}/, or use its address.",
            )
        known = self._knows(headers, self.rules.token)
        if not known and _query_token(scope) is None:
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
        given = _cookies(headers.get(b"cookie", b""), self.rules.cookie)
        bearer = headers.get(b"authorization", b"").decode("latin-1").removeprefix("Bearer ")
        return any(hmac.compare_digest(each.encode(), token.encode()) for each in (*given, bearer))

    async def _take(self, given: str, send: Send) -> None:
        """Turns a right token of the address into a cookie, and takes it out of the address."""
        wanted = self.rules.token or self.rules.action_token
        first = bool(self._once) and hmac.compare_digest(given.encode(), self._once.encode())
        if first:
            self._once = ""
        if not wanted or not (first or hmac.compare_digest(given.encode(), wanted.encode())):
            await _answer(send, 401, "The token is wrong.", "Open the link that `agentrl ui` printed last.", as_json=False)
            return
        cookie = f"{self.rules.cookie}={wanted}; HttpOnly; SameSite=Strict; Path=/"
        await send(
            {"type": "http.response.start", "status": 303, "headers": [(b"location", b"/"), (b"set-cookie", cookie.encode())]}
        )
        await send({"type": "http.response.body", "body": b""})


def _hurried(receive: Receive) -> Receive:
    """Takes a body for BODY_SECONDS; one that is not whole then is as if its sender had hung up."""
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
    """Return the names of a page that listens at `host`: those of loopback, the address itself, and `own` names of this
    machine.
    """
    return frozenset(name.lower() for name in ("127.0.0.1", "localhost", "::1", host, *own) if name)


def _headers(scope: Scope) -> dict[bytes, bytes]:
    """The headers; one that was sent twice and must not be is as if it were wrong."""
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        found[name] = b"," if name in found and name in (b"host", b"origin", b"content-length") else value
    return found


def _split_host(host: str) -> tuple[str, str]:
    """The name and the port of a `Host`; the port is empty where there is none, the name where it is no host."""
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
    """The host and port of an `Origin`; of what is none, nothing that a page could be called."""
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
    """The values of the cookies of that name: pages on other ports of this host may have left some too."""
    pairs = (part.strip().partition("=") for part in text.decode("latin-1").split(";"))
    return [value for found, _, value in pairs if found == name]


def _query_token(scope: Scope) -> str | None:
    """The token of the first page's address."""
    if scope["path"] != "/" or scope["method"] != "GET" or b"token=" not in scope["query_string"]:
        return None
    try:
        found: str = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=10).get("token", [""])[0]
    except ValueError:
        return ""
    return found


async def _answer(send: Send, status: int, said: str, hint: str, as_json: bool) -> None:
    """A refusal as JSON, or as a plain page."""
    if as_json:
        body, kind = json.dumps({"error": said, "hint": hint}).encode(), b"application/json"
    else:
        body, kind = (
            f"<!doctype html><title>agentrl</title><p>{escape(said)}<p>{escape(hint)}".encode(),
            b"text/html; charset=utf-8",
        )
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
