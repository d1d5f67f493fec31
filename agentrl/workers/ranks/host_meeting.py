"""The meeting of the hosts of an update, as the train worker sees it. Workers `ranks` on other hosts join (`rank_host`).

The train worker listens at AGENTRL_RANKS_HOST and writes a row with this address and a token. Another host opens a connection
for each of its devices, and sends a line of JSON on each, `RankOffer`. When enough hosts have joined, each connection becomes
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
from collections.abc import Iterator, Mapping
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
from agentrl.workflow.store.rank_meetings import RankMeeting, close_meeting, open_meeting

log = getLogger("agentrl.ranks")

MEETING_SECONDS = 120.0
"""How long a train worker waits for other hosts, in seconds."""

OFFER_SECONDS = 10.0
"""How long a connection may take to send its offer, in seconds."""

MAX_LINE_BYTES = 4096
"""The longest line of an offer or of its answer."""

MAX_UNKNOWN = 256
"""The most open connections that have not sent an offer with the token."""

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
class RankOffer:
    """What a host sends on the connection of each of its devices.

    Args:
        token: the token of the meeting.
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
        """Return the offer as a line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> "RankOffer":
        """Return the offer of a line. Raise ValueError if the line is no offer."""
        values = json.loads(line)
        if not isinstance(values, dict) or values.keys() != cls.__annotations__.keys():
            raise ValueError("not an offer")
        for name, kind in cls.__annotations__.items():
            if type(values[name]) is not kind:
                raise ValueError(f"{name} is not of the type {kind.__name__}")
        offer = cls(**values)
        if not 0 <= offer.index < offer.devices <= MAX_DEVICES:
            raise ValueError("no such device")
        return offer


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all hosts, as arguments of `RankOffer`."""
    return {"agentrl": __version__, "torch": metadata.version("torch")}


@dataclass(frozen=True)
class JoinedHost:
    """A host that takes part in updates: its name, and a connection for each of its devices."""

    name: str
    links: list[socket.socket]


@dataclass(frozen=True)
class HostMeeting:
    """The other hosts that a run needs. Equal meetings can use the same hosts.

    Args:
        hosts: `update.hosts`; this host is one of them.
        devices: `update.devices`, as text.
        numerics: `model.numerics`.
    """

    hosts: int
    devices: str
    numerics: str
    database: Database = field(compare=False, repr=False)
    fenced: threading.Event = field(compare=False, repr=False)

    def gather(self, device: str) -> list[JoinedHost]:
        """Wait until the other hosts have joined, and return them. `device` is the kind of this host's devices.

        Raise InfraError if they have not joined within MEETING_SECONDS. Raise Fenced if another worker has taken over the
        claim. Raise ConfigError if this host cannot listen. Raise ServiceError if the database does not respond.
        """
        token = secrets.token_urlsafe(32)
        with listen() as server:
            host, port = server.getsockname()
            meeting = RankMeeting(f"{host}:{port}", self.devices, self.numerics, token)
            open_meeting(self.database, meeting, MEETING_SECONDS)
            log.info("waiting for %d other hosts at %s", self.hosts - 1, meeting.address)
            try:
                return _Reception(server, token, device, self.hosts).receive(self.fenced)
            finally:
                with suppress(ServiceError):  # the row also expires
                    close_meeting(self.database, token)


@dataclass(eq=False)
class _Guest:
    """A connection to the meeting. `offer` is None until a valid offer with the token has arrived."""

    link: socket.socket
    peer: str
    deadline: float
    data: bytes = b""
    offer: RankOffer | None = None


@dataclass
class _Reception:
    """Takes connections, checks their offers, and refuses those that cannot take part."""

    server: socket.socket
    token: str
    device: str
    hosts: int
    guests: list[_Guest] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    """Why a host was refused, by its address."""

    def receive(self, fenced: threading.Event) -> list[JoinedHost]:
        began = time.monotonic()
        self.server.setblocking(False)
        chosen: list[JoinedHost] = []
        try:
            while len(chosen) < self.hosts - 1:
                if fenced.is_set():
                    raise Fenced("The wait for other hosts was stopped: another worker has taken over the claim.")
                if time.monotonic() - began > MEETING_SECONDS:
                    raise self._missing_error(len(chosen))
                self._serve_once()
                chosen = list(self._complete_hosts())[: self.hosts - 1]
            for link in (link for host in chosen for link in host.links):
                keep_alive(link)
            return chosen
        finally:
            links = [link for host in chosen for link in host.links] if len(chosen) == self.hosts - 1 else []
            for guest in self.guests:
                if guest.link not in links:
                    guest.link.close()

    def _missing_error(self, joined: int) -> InfraError:
        message = f"{joined + 1} of {self.hosts} hosts joined within {MEETING_SECONDS:g} s"
        refused = f"Refused: {' '.join(self.refusals.values())}" if self.refusals else ""
        return InfraError(f"{message}: start `agentrl worker ranks` on another host.", refused)

    def _serve_once(self) -> None:
        """Wait a moment for something to read, and read it. Close connections that have sent no offer in time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.server, selectors.EVENT_READ)
            for guest in self.guests:
                selector.register(guest.link, selectors.EVENT_READ, guest)
            ready = selector.select(POLL_SECONDS)
        for key, _ in ready:
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)
        for guest in [one for one in self.guests if one.offer is None and one.deadline < time.monotonic()]:
            self._refuse(guest, f"{guest.peer} sent no offer within {OFFER_SECONDS:.0f} s.")

    def _accept(self) -> None:
        with suppress(OSError):  # the client is gone
            link, (peer, _) = self.server.accept()
            link.setblocking(False)
            if sum(guest.offer is None for guest in self.guests) >= MAX_UNKNOWN:
                link.close()
                return
            self.guests.append(_Guest(link, peer, time.monotonic() + OFFER_SECONDS))

    def _read(self, guest: _Guest) -> None:
        try:
            data = guest.link.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or guest.offer is not None:  # a host sends nothing after its offer
            self._drop(guest)
            return
        guest.data += data
        if b"\n" in guest.data or len(guest.data) >= MAX_LINE_BYTES:
            self._check(guest)

    def _check(self, guest: _Guest) -> None:
        """Take the guest's offer, or refuse the guest. Only a guest with the token is told what it lacks."""
        try:
            offer = RankOffer.decode(guest.data)
            has_token = secrets.compare_digest(offer.token.encode(), self.token.encode())
        except (ValueError, RecursionError):
            self._refuse(guest, f"{guest.peer} sent no offer.")
            return
        if not has_token:
            self._refuse(guest, f"{guest.peer} sent a wrong token.")
            return
        mine = versions()
        theirs = {"agentrl": offer.agentrl, "torch": offer.torch}
        if offer.error:
            self._refuse(guest, f"{offer.host}: {offer.error}")
        elif mine != theirs:
            self._refuse(guest, f"{offer.host} has {_listed(theirs)}, and the train worker has {_listed(mine)}.")
        elif offer.device != self.device:
            self._refuse(guest, f"{offer.host} computes on {offer.device}, and the train worker on {self.device}.")
        else:
            guest.offer = offer

    def _refuse(self, guest: _Guest, reason: str) -> None:
        if self.refusals.get(guest.peer) != reason and len(self.refusals) < MAX_UNKNOWN:
            log.warning("refused a host: %s", reason)
            self.refusals[guest.peer] = reason
        with suppress(OSError):
            guest.link.send(json.dumps({"error": reason}).encode() + b"\n")
        self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        self.guests.remove(guest)
        guest.link.close()

    def _complete_hosts(self) -> Iterator[JoinedHost]:
        """Yield the hosts that have a connection for each of their devices."""
        members: dict[str, dict[int, _Guest]] = {}
        for guest in self.guests:
            if guest.offer is not None:
                members.setdefault(guest.offer.member, {})[guest.offer.index] = guest
        for guests in members.values():
            offers = [guest.offer for guest in guests.values() if guest.offer is not None]
            if {offer.index for offer in offers} == set(range(offers[0].devices)):
                yield JoinedHost(offers[0].host, [guests[index].link for index in sorted(guests)])


def _listed(values: Mapping[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in values.items())
