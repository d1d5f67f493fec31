"""The connection of a sandboxed agent to the endpoint: the end outside the sandbox, a Unix socket that forwards all bytes to
the endpoint.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrl.workflow.runtime.once_per_process import Once

MAX_CONNECTIONS = 64
"""The most connections that one agent can have open at once."""


@contextmanager
def relayed(path: Path, host: str, port: int) -> Iterator[None]:
    """During the `with` block, listen on the Unix socket `path` and forward each connection to the address. At its end, close
    the connections that are still open.
    """
    loop = _loop()
    connections = set[asyncio.Task[None]]()
    server = asyncio.run_coroutine_threadsafe(_listen(path, host, port, connections), loop).result()
    path.chmod(0o666)  # the sandbox's user connects; its folder keeps others away
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(_close(server, connections), loop).result()


async def _listen(path: Path, host: str, port: int, connections: "set[asyncio.Task[None]]") -> asyncio.Server:
    open_ones = asyncio.Semaphore(MAX_CONNECTIONS)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with open_ones:
                await _pass_on(reader, writer, host, port)
        finally:
            writer.close()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.ensure_future(pass_on(reader, writer))
        connections.add(connection)
        connection.add_done_callback(connections.discard)

    return await asyncio.start_unix_server(begin, path)


async def _close(server: asyncio.Server, connections: "set[asyncio.Task[None]]") -> None:
    server.close()
    still_open = list(connections)
    for connection in still_open:
        connection.cancel()
    await asyncio.gather(*still_open, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    try:
        answers, questions = await asyncio.open_connection(host, port)
    except OSError:
        return
    try:
        await asyncio.gather(_pump(reader, questions), _pump(answers, writer))
    finally:
        questions.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    with suppress(OSError):
        writer.write_eof()


@Once
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agents' relay", daemon=True).start()
    return loop
