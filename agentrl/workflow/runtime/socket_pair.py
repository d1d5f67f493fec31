"""Two sockets that talk to each other and wait for as long as it takes."""

import socket


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Make a pair whose ends block, whatever default the process has.

    A library may change that default for a moment, for all threads (Celery does where a worker shuts down). A socket with a
    timeout is non-blocking underneath, and stays so in the child that is handed its end.
    """
    ours, theirs = socket.socketpair()
    ours.settimeout(None)
    theirs.settimeout(None)
    return ours, theirs
