"""The relay between a sandboxed agent and the endpoint, over real sockets."""

import asyncio
import socket
from pathlib import Path

from agentrl.workers.agents import relay


async def _other_tasks() -> int:
    return len(asyncio.all_tasks()) - 1


def test_relay_ends_idle_connections_with_the_attempt(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as endpoint, socket.socket(socket.AF_UNIX) as agent:
        endpoint.settimeout(10)
        agent.settimeout(10)
        with relay.relayed(tmp_path / "endpoint", *endpoint.getsockname()):
            agent.connect(str(tmp_path / "endpoint"))
            upstream, _ = endpoint.accept()
            upstream.settimeout(10)
            agent.sendall(b"x")
            assert upstream.recv(10) == b"x"
        left = asyncio.run_coroutine_threadsafe(_other_tasks(), relay._loop()).result(10)
        with upstream:
            assert (left, upstream.recv(10), agent.recv(10)) == (0, b"", b"")
