"""A pair of connected blocking sockets."""

import socket


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that block, whatever default timeout the process has.

    A library may change that default for a moment, for all threads; Celery does this when a worker shuts down. A socket with a
    timeout is non-blocking at the level of the operating system, and stays so in a child process that receives it.
    """
    ours, theirs = socket.socketpair()
    ours.settimeout(None)
    theirs.settimeout(None)
    return ours, theirs
