"""The listening sockets of HTTP servers such as the endpoint: how a socket is bound, passed to another process, and turned into
a URL.
"""

import socket
from ipaddress import ip_address
from urllib.parse import urlsplit

from agentrl.workflow.errors import ServiceError

LISTENER = "AGENTRL_ENDPOINT_LISTENER"
"""The environment variable with the file descriptor of the listening socket that the supervisor passes to the endpoint."""

LOOPBACK = "127.0.0.1"
BACKLOG = 1024
CONNECT_SECONDS = 5.0


def bind(host: str, port: int, hint: str = "Set AGENTRL_ENDPOINT_PORT to a free port, or to 0.") -> socket.socket:
    """Return a socket that listens on the address. With port 0, the system selects a free port. `host` is the host name or
    address. `hint` says what the user can do if the address is in use. Raise ServiceError if the process cannot listen on the
    address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServiceError(f"Cannot listen at {host!r:.100}: {error}.", "Use an address of this host.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it, so that a client that vanished is noticed.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
                listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ServiceError(f"Cannot listen at {host}:{port}: {error.strerror}.", hint) from error
    return listener


def is_loopback(listening: socket.socket) -> bool:
    """Return whether only this machine can reach the socket."""
    return ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback


def url_of(listening: socket.socket) -> str:
    """Return the URL of a listening socket. If the socket listens on all addresses, the URL contains this host's name."""
    host, port = listening.getsockname()[:2]
    address = ip_address(host.partition("%")[0])
    if address.is_unspecified:
        return f"http://{socket.gethostname()}:{port}"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"


def accepts_connections(url: str) -> bool:
    """Return whether the server at the URL accepts a TCP connection within CONNECT_SECONDS; False if the URL is invalid."""
    try:
        parts = urlsplit(url)
        address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection(address, CONNECT_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True
