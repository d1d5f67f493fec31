"""A rollout worker at the endpoint's edge: a real HTTP server whose answers are scripted, one function for each request."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

Script = Callable[["Request", asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Request:
    """What came, and whether the connection was closed since."""

    line: str
    headers: dict[str, str]
    body: bytes
    gone: threading.Event
    rest: asyncio.StreamReader


@dataclass
class ScriptedWorker:
    """The server; the last script is used again where there are no more."""

    scripts: list[Script]
    address: str = ""
    requests: list[Request] = field(default_factory=list)
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                request = await _read(reader)
                self.requests.append(request)
                script = self.scripts[min(len(self.requests), len(self.scripts)) - 1]
                await script(request, writer)
                if writer.is_closing():
                    break
        writer.close()


async def _read(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    line, *fields = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in fields)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(line, headers, body, threading.Event(), reader)


def whole(body: bytes = b'{"answer":42}', status: str = "200 OK", pause: float = 0.0) -> Script:
    """A whole answer."""

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(pause)
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    return answer


def stream(*pieces: bytes, breaks: bool = False, pause: float = 0.0) -> Script:
    """An event stream, which may break off after its last piece."""

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            for piece in pieces:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
                await asyncio.sleep(pause)
        except OSError:
            request.gone.set()
            raise
        if breaks:
            writer.close()
        else:
            writer.write(b"0\r\n\r\n")

    return answer


def hang_up(request_: Request, writer: asyncio.StreamWriter) -> Awaitable[None]:
    """No answer at all."""
    writer.close()
    return asyncio.sleep(0)


def silence(started: threading.Event) -> Script:
    """No answer, for as long as the connection lasts; `gone` is set at its end."""

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        started.set()
        await request.rest.read()
        request.gone.set()

    return answer


@contextmanager
def scripted_worker(*scripts: Script) -> Iterator[ScriptedWorker]:
    """The server, in a thread of its own."""
    worker = ScriptedWorker(list(scripts))
    ready, ended = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        server = await asyncio.start_server(worker.serve, "127.0.0.1", 0, limit=2**24)
        host, port = server.sockets[0].getsockname()
        worker.address = f"{host}:{port}"
        loops.append(asyncio.get_running_loop())
        ready.set()
        await ended.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    ready.wait()
    try:
        yield worker
    finally:
        loops[0].call_soon_threadsafe(ended.set)
        thread.join()
