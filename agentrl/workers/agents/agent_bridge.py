"""The connection of a sandboxed program to the endpoint: the end inside the sandbox.

`agent_bridge.py SOCKET COMMAND...` listens on 127.0.0.1:8500 and forwards each connection to the Unix socket SOCKET, in
threads. It runs the command as a child process. This file runs inside the sandbox and imports only the standard library.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading

PORT = 8500


def main(path: str, command: "list[str]") -> int:
    """Run the command while the bridge listens. Return the command's exit code."""
    listener = socket.create_server(("127.0.0.1", PORT), backlog=128)
    threading.Thread(target=_serve, args=(listener, path), daemon=True).start()
    ended = subprocess.run(command, check=False, env=dict(os.environ)).returncode
    return ended if ended >= 0 else 128 - ended


def _serve(listener: socket.socket, path: str) -> None:
    while True:
        caller, _ = listener.accept()
        endpoint = socket.socket(socket.AF_UNIX)
        try:
            endpoint.connect(path)
        except OSError:
            caller.close()
            continue
        for source, target in ((caller, endpoint), (endpoint, caller)):
            threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            end.shutdown(how)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
