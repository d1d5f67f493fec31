"""A pair of connected blocking sockets."""

import socket


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that block, whatever default timeout the process has.

    A library may change the default timeout for a moment, for all threads; Celery does this when a worker shuts down. For the
    operating system, a socket with a timeout is non-blocking. It would stay non-blocking in a child process that receives it.
    """
    ours, theirs = socket.socketpair()
    ours.settimeout(None)
    theirs.settimeout(None)
    return ours, theirs
