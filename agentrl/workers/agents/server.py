"""A warm interpreter for agents. The interpreter has imported the agent's module, and forks guardians, the processes that start
and watch agents.

The command is `python -P -m agentrl.workers.agents.server FD SPEC PATHS`. The interpreter first sends a message over the socket
FD. The message has the imported files and the source of the agent's module, or the error of the import. After that, the
interpreter receives one file descriptor per guardian: the guardian's end of a socket. The environment of the interpreter
contains no secrets. The interpreter ends when the worker has closed the other end of FD and all of the interpreter's agents
have ended. For programs, SPEC is empty, because programs need no module.
"""

import asyncio
import gc
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from agentrl.workers.agents import guardian
from agentrl.workers.agents.warden import Warden

WORDS = 2000
REHEARSAL_SECONDS = 5.0
"""The longest wait for a request of the rehearsal, in seconds. The rehearsal makes local requests with the openai SDK, so that
forked agents start faster.
"""
_CHUNK = {"id": "r", "object": "chat.completion.chunk", "created": 0, "model": "none", "choices": []}
_RESPONSE = {
    "id": "r",
    "object": "chat.completion",
    "created": 0,
    "model": "none",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "none"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_ASKED: dict[str, Any] = {
    "model": "none",
    "messages": [{"role": "user", "content": "none"}],
    "tools": [{"type": "function", "function": {"name": "none", "parameters": {"type": "object", "properties": {}}}}],
}


def main(control: socket.socket, spec: str, paths: list[str]) -> None:
    """Import the agent's module, and fork guardians. Return when the worker has closed its socket and the last agent has
    ended.
    """
    sys.path[:] = paths
    try:
        function, source = _load(spec) if spec else (None, "")
        _rehearse()
    except BaseException as error:  # noqa: BLE001 - anybody's module; its words go to the worker
        guardian.send(control, {"error": f"{type(error).__name__}: {error}"[:WORDS]})
        return
    guardian.send(control, {"files": _own_files(), "source": source})
    gc.collect()
    gc.freeze()  # else a fork's collector writes into every page
    Warden(control, function).watch()


def _load(spec: str) -> tuple[Callable[..., Any], str]:
    """Import the agent. Return the function and the source of its module; the source is empty if it is not available."""
    from agentrl.workflow.agents.classes import as_function
    from agentrl.workflow.plugins import code_of, find

    function = as_function(find("agents", spec))
    try:
        return function, code_of("agents", spec)
    except (OSError, TypeError):
        return function, ""


def _rehearse() -> None:
    """If the agent's module has imported the openai SDK, make local requests with each of its clients.

    The first request imports modules and builds types, which takes about 80 ms of processor time. Every agent would repeat this
    work; after the rehearsal, every fork has its result. If an SDK cannot be rehearsed, agents only start more slowly.
    """
    openai = sys.modules.get("openai")
    if openai is None:
        return
    with suppress(Exception), HTTPServer(("127.0.0.1", 0), _Rehearsal) as server:  # an SDK of another version, say
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        options = {"base_url": url, "api_key": "none", "max_retries": 0, "timeout": REHEARSAL_SECONDS}
        try:
            with openai.OpenAI(**options) as client:
                client.chat.completions.create(**_ASKED)
                for _ in client.chat.completions.create(**_ASKED, stream=True):
                    pass
            asyncio.run(_call_with(openai.AsyncOpenAI(**options)))
        finally:
            server.shutdown()
            serving.join()  # no thread may run when agents are forked


async def _call_with(client: Any) -> None:
    async with client:
        await client.chat.completions.create(**_ASKED)


class _Rehearsal(BaseHTTPRequestHandler):
    """The server of the rehearsal. It has one response."""

    def do_POST(self) -> None:
        """Send the response, as a stream if the request asks for one."""
        body = self.rfile.read(int(self.headers["content-length"]))
        is_stream = bool(json.loads(body).get("stream"))
        reply = f"data: {json.dumps(_CHUNK)}\n\ndata: [DONE]\n\n" if is_stream else json.dumps(_RESPONSE)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if is_stream else "application/json")
        self.end_headers()
        self.wfile.write(reply.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def _own_files() -> list[str]:
    """Return the files of the imported modules that are not installed packages. If one of these files changes, the interpreter
    is stale.
    """
    installed = (sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(guardian.__file__)))
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return sorted(file for file in files if file and not file.startswith(installed))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], json.loads(sys.argv[3]))
    os._exit(0)  # whatever threads the module has
