"""The rendezvous of the hosts of an update, in the train worker, which leads it. Workers `ranks` join from other hosts.

The train worker listens at AGENTRL_RANKS_HOST and writes a row with this address and a token. Another host opens a connection
for each of its devices, and sends a line of JSON on each, `JoinRequest`. When enough hosts have joined, each connection becomes
the link between the train worker and a rank. All that arrives before the token is hostile: size and time are limited.
"""

import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fcntl import ioctl
from importlib import metadata
from logging import getLogger

from agentrl import __version__
from agentrl.workflow.config import MAX_DEVICES
from agentrl.workflow.errors import ConfigError, Fenced, InfraError, ServiceError
from agentrl.workflow.settings import settings
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.rendezvous_rows import RendezvousRow, close_rendezvous, open_rendezvous

log = getLogger("agentrl.ranks")

RENDEZVOUS_SECONDS = 120.0
"""How long a train worker waits for other hosts, in seconds."""

REQUEST_SECONDS = 10.0
"""How long a connection may take to send its request, in seconds."""

MAX_LINE_BYTES = 4096
"""The longest line of a request or of its answer."""

MAX_UNKNOWN = 256
"""The most open connections that have not sent a request with the token."""

SILENCE_SECONDS = 30
"""The time without an answer from the other host after which a connection counts as lost, in seconds."""

POLL_SECONDS = 0.2
SIOCGIFADDR = 0x8915
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The environment variables that name the interface of the connections between ranks."""


def check_hosts(hosts: int) -> None:
    """Raise ConfigError if this process cannot lead updates on so many hosts, which is `update.hosts`."""
    if hosts > 1 and not settings().ranks_host:
        message = f"update.hosts={hosts} needs an address of the train worker's machine, and AGENTRL_RANKS_HOST is not set."
        raise ConfigError(message, "Set it to an address in a private network, for example 10.0.0.1.")


def keep_alive(link: socket.socket) -> None:
    """Let the kernel close the connection if the other host does not answer for SILENCE_SECONDS."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, SILENCE_SECONDS // 3),
        (socket.TCP_KEEPINTVL, SILENCE_SECONDS // 6),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, SILENCE_SECONDS * 1000),
        (socket.TCP_NODELAY, 1),
    ):
        link.setsockopt(socket.IPPROTO_TCP, option, value)


def interfaces_at(address: str) -> dict[str, str]:
    """Return environment variables with which gloo and NCCL use the network interface that has this IPv4 address. Raise
    ConfigError if no interface has it, unless the environment names an interface.
    """
    if all(os.environ.get(name) for name in INTERFACES):
        return {}
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            request = ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(request[20:24]) == address:
                return dict.fromkeys(INTERFACES, name)
    message = f"No network interface of {socket.gethostname()} has {address} as its first IPv4 address."
    raise ConfigError(message, f"Name the interface in {' and '.join(INTERFACES)}.")


def listen() -> socket.socket:
    """Listen on a free port at AGENTRL_RANKS_HOST. Raise ConfigError if it is not an IPv4 address of this machine."""
    host = settings().ranks_host
    server = socket.socket(socket.AF_INET)
    try:
        server.bind((host, 0))
        server.listen(MAX_UNKNOWN)
    except OSError as error:
        server.close()
        message = f"Cannot listen at AGENTRL_RANKS_HOST={host}: {error.strerror or error}."
        raise ConfigError(message, "Set it to an IPv4 address of this machine.") from error
    return server


@dataclass(frozen=True)
class JoinRequest:
    """What a host sends on the connection of each of its devices.

    Args:
        token: the token of the row.
        agentrl, torch: the versions of these packages.
        host: the host's name, for messages.
        member: a random name of the worker `ranks`: the same on all of its connections.
        device: the kind of its devices, `cpu` or `cuda`.
        devices: the number of its devices.
        index: the number of the device of this connection, from 0.
        error: why the host cannot take part; empty if it can.
    """

    token: str = field(repr=False)
    agentrl: str
    torch: str
    host: str
    member: str
    device: str
    devices: int
    index: int
    error: str = ""

    def encode(self) -> bytes:
        """Return the request as a line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> "JoinRequest":
        """Return the request of a line. Raise ValueError if the line is no request."""
        values = json.loads(line)
        if not isinstance(values, dict) or values.keys() != cls.__annotations__.keys():
            raise ValueError("not a request")
        for name, kind in cls.__annotations__.items():
            if type(values[name]) is not kind:
                raise ValueError(f"{name} is not of the type {kind.__name__}")
        request = cls(**values)
        if not 0 <= request.index < request.devices <= MAX_DEVICES:
            raise ValueError("no such device")
        return request


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all hosts, as arguments of `JoinRequest`."""
    return {"agentrl": __version__, "torch": metadata.version("torch")}


@dataclass(frozen=True)
class JoinedHost:
    """A host that takes part in updates: its name, and a connection for each of its devices."""

    name: str
    links: list[socket.socket]


@dataclass(frozen=True)
class Rendezvous:
    """The other hosts that a run needs. If two are equal, they can use the same hosts.

    Args:
        hosts: `update.hosts`; this host is one of them.
        devices: `update.devices`, as text.
        numerics: `model.numerics`.
        fenced: is set when another worker has taken over the claim.
        stopping: is set when this process is asked to stop.
    """

    hosts: int
    devices: str
    numerics: str
    database: Database = field(compare=False, repr=False)
    fenced: threading.Event = field(compare=False, repr=False)
    stopping: threading.Event = field(compare=False, repr=False)

    def gather(self, device: str) -> list[JoinedHost]:
        """Wait until the other hosts have joined, and return them. `device` is the kind of this host's devices.

        Raise InfraError if they have not joined within RENDEZVOUS_SECONDS. Raise Fenced if another worker has taken over the
        claim. Raise ConfigError if this host cannot listen. Raise ServiceError if the database does not respond, or this
        process is asked to stop.
        """
        token = secrets.token_urlsafe(32)
        with listen() as server:
            host, port = server.getsockname()
            row = RendezvousRow(f"{host}:{port}", self.devices, self.numerics, token)
            open_rendezvous(self.database, row, RENDEZVOUS_SECONDS)
            log.info("waiting for %d other hosts at %s", self.hosts - 1, row.address)
            try:
                return _JoinServer(server, token, device, self.hosts).receive(self._check_wanted)
            finally:
                with suppress(ServiceError):  # the row also expires
                    close_rendezvous(self.database, token)

    def _check_wanted(self) -> None:
        """Raise Fenced or ServiceError if this process must not wait any longer."""
        if self.fenced.is_set():
            raise Fenced("The wait for other hosts was stopped: another worker has taken over the claim.")
        if self.stopping.is_set():
            raise ServiceError("The wait for other hosts was stopped: this worker is ending.")


@dataclass(eq=False)
class _JoinConnection:
    """A connection to the train worker. `request` is None until a valid request with the token has arrived."""

    link: socket.socket
    peer: str
    deadline: float
    data: bytes = b""
    request: JoinRequest | None = None


@dataclass
class _JoinServer:
    """The server of a rendezvous. It takes connections, checks their requests, and refuses hosts that cannot take part."""

    server: socket.socket
    token: str
    device: str
    hosts: int
    connections: list[_JoinConnection] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    """Why a host was refused, by its address."""

    def receive(self, check_wanted: Callable[[], None]) -> list[JoinedHost]:
        """Return the other hosts when enough have joined. All other connections are closed."""
        deadline = time.monotonic() + RENDEZVOUS_SECONDS
        self.server.setblocking(False)
        used: list[socket.socket] = []
        try:
            while len(joined := list(self._complete_hosts())) < self.hosts - 1:
                check_wanted()
                if time.monotonic() > deadline:
                    raise self._missing_error(len(joined))
                self._serve_once()
            chosen = joined[: self.hosts - 1]
            links = [link for host in chosen for link in host.links]
            for link in links:
                keep_alive(link)
            used = links
            return chosen
        finally:
            for connection in self.connections:
                if connection.link not in used:
                    connection.link.close()

    def _missing_error(self, joined: int) -> InfraError:
        message = f"{joined + 1} of {self.hosts} hosts joined within {RENDEZVOUS_SECONDS:g} s"
        refused = f"Refused: {' '.join(self.refusals.values())}" if self.refusals else ""
        return InfraError(f"{message}: start `agentrl worker ranks` on another host.", refused)

    def _serve_once(self) -> None:
        """Wait a moment for something to read, and read it. Close connections that have sent no request in time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.server, selectors.EVENT_READ)
            for connection in self.connections:
                selector.register(connection.link, selectors.EVENT_READ, connection)
            ready = selector.select(POLL_SECONDS)
        for key, _ in ready:
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)
        for connection in [one for one in self.connections if one.request is None and one.deadline < time.monotonic()]:
            self._refuse(connection, f"{connection.peer} sent no request within {REQUEST_SECONDS:.0f} s.")

    def _accept(self) -> None:
        with suppress(OSError):  # the client is gone
            link, (peer, _) = self.server.accept()
            link.setblocking(False)
            if sum(connection.request is None for connection in self.connections) >= MAX_UNKNOWN:
                link.close()
                return
            self.connections.append(_JoinConnection(link, peer, time.monotonic() + REQUEST_SECONDS))

    def _read(self, connection: _JoinConnection) -> None:
        try:
            data = connection.link.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or connection.request is not None:  # a host sends nothing after its request
            self._drop(connection)
            return
        connection.data += data
        if b"\n" in connection.data or len(connection.data) >= MAX_LINE_BYTES:
            self._check(connection)

    def _check(self, connection: _JoinConnection) -> None:
        """Keep the connection's request, or refuse it. Only a host with the token learns what it lacks."""
        try:
            request = JoinRequest.decode(connection.data)
            has_token = secrets.compare_digest(request.token.encode(), self.token.encode())
        except (ValueError, RecursionError):
            self._refuse(connection, f"{connection.peer} sent no valid request.")
            return
        if not has_token:
            self._refuse(connection, f"{connection.peer} sent a wrong token.")
            return
        mine = versions()
        theirs = {"agentrl": request.agentrl, "torch": request.torch}
        if request.error:
            self._refuse(connection, f"{request.host}: {request.error}")
        elif mine != theirs:
            self._refuse(connection, f"{request.host} has {_listed(theirs)}, and the train worker has {_listed(mine)}.")
        elif request.device != self.device:
            self._refuse(connection, f"{request.host} computes on {request.device}, and the train worker on {self.device}.")
        else:
            connection.request = request

    def _refuse(self, connection: _JoinConnection, reason: str) -> None:
        if self.refusals.get(connection.peer) != reason and len(self.refusals) < MAX_UNKNOWN:
            log.warning("refused a host: %s", reason)
            self.refusals[connection.peer] = reason
        with suppress(OSError):
            connection.link.send(json.dumps({"error": reason}).encode() + b"\n")
        self._drop(connection)

    def _drop(self, connection: _JoinConnection) -> None:
        self.connections.remove(connection)
        connection.link.close()

    def _complete_hosts(self) -> Iterator[JoinedHost]:
        """Yield the hosts that have a connection for each of their devices."""
        members: dict[str, list[tuple[JoinRequest, socket.socket]]] = {}
        for connection in self.connections:
            if connection.request is not None:
                members.setdefault(connection.request.member, []).append((connection.request, connection.link))
        for joined in members.values():
            links = {request.index: link for request, link in joined}
            first, _ = joined[0]
            if links.keys() == set(range(first.devices)):
                yield JoinedHost(first.host, [links[index] for index in sorted(links)])


def _listed(values: Mapping[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in values.items())
