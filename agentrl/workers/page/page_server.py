"""The server of the page: one process that listens on one address."""

import asyncio
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_urlsafe
from types import FrameType

import uvicorn

from agentrl.workers.http.http_server import make_server, serve
from agentrl.workers.page.door import RequestGuard, Rules, names_of
from agentrl.workers.page.read_only import ReadOnlyStore
from agentrl.workers.page.service import application
from agentrl.workers.stack.listening import is_loopback
from agentrl.workflow.settings import settings

MAX_HEAD_BYTES = 16 * 1024
GOODBYE_SECONDS = 1
"""The time after Ctrl-C in which open responses may still be completed, in seconds. Live updates end at once."""


@dataclass(frozen=True, slots=True)
class PageAddress:
    """The address of the page: its rules of access, its link, and a second link for a browser on this machine."""

    rules: Rules
    link: str
    first_link: str


def prepare_door(listening: socket.socket, token: str, actions: bool) -> PageAddress:
    """Return the rules of access and the links (with the token, if one is needed) of a page on this socket."""
    host, port = listening.getsockname()[:2]
    local = is_loopback(listening)
    everywhere = host in ("0.0.0.0", "::")
    own = () if local else (socket.gethostname(), socket.getfqdn())
    required_token = "" if local else token
    once = token_urlsafe(24)
    rules = Rules(names_of("" if everywhere else host, own), port, not local, required_token, token if actions else "", once)
    # The compose stack publishes the port at the host's own loopback address.
    everywhere_name = "127.0.0.1" if settings().image else socket.gethostname()
    public_host = everywhere_name if everywhere else f"[{host}]" if ":" in host else host
    at, secret = f"http://{public_host}:{port}/", bool(required_token or actions)
    return PageAddress(rules, f"{at}?token={token}" if secret else at, f"{at}?token={once}" if secret else at)


def serve_page(store: ReadOnlyStore, listening: socket.socket, rules: Rules) -> None:
    """Serve the page until SIGINT, SIGTERM or SIGHUP."""
    app = application(store, actions=bool(rules.action_token))
    server = make_server(RequestGuard(app, rules), MAX_HEAD_BYTES, GOODBYE_SECONDS)
    signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, _end)
    with suppress(KeyboardInterrupt):  # uvicorn raises the signal again that ended it
        asyncio.run(_serve(server, app.state, listening))


async def _serve(server: uvicorn.Server, state: object, listening: socket.socket) -> None:
    state.is_ending = lambda: server.should_exit  # type: ignore[attr-defined]
    await serve(server, listening)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
