"""A warm interpreter makes one call to nobody with the SDK that its agent's module has imported, before any agent is forked.

What such an SDK imports and builds at its first call (the connection's modules, the answers' types) takes some 80 ms of a
processor, and every agent would do it again; the forks of an interpreter that has called once find it there. Nothing leaves
the process, and an SDK that cannot be rehearsed is as it was.
"""

import gc
import importlib
import sys
from contextlib import suppress
from typing import Any

ANSWER = {
    "id": "rehearsal",
    "object": "chat.completion",
    "created": 0,
    "model": "none",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "none"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
ASKED: dict[str, Any] = {
    "model": "none",
    "messages": [{"role": "user", "content": "none"}],
    "tools": [{"type": "function", "function": {"name": "none", "parameters": {"type": "object", "properties": {}}}}],
}


def rehearse() -> None:
    """Rehearses what the interpreter has imported; its memory is then shared with its forks for as long as may be."""
    openai = sys.modules.get("openai")
    if openai is not None:
        with suppress(Exception):  # of another version, say
            _call_nobody(openai)
    gc.collect()
    gc.freeze()  # else a fork's collector writes into every page


def _call_nobody(openai: Any) -> None:
    base = next(each for each in openai.DefaultHttpxClient.__mro__ if each.__module__.startswith("httpx"))
    httpx = importlib.import_module(base.__module__.partition(".")[0])
    for name in (httpx.__name__.replace("httpx", "httpcore"), "h11"):
        importlib.import_module(name)
    answered = httpx.MockTransport(lambda request: httpx.Response(200, json=ANSWER))
    given = {"base_url": "http://127.0.0.1/v1", "api_key": "none", "max_retries": 0}
    with openai.OpenAI(**given, http_client=httpx.Client(transport=answered)) as client:
        client.chat.completions.create(**ASKED)
        with client.chat.completions.create(**ASKED, stream=True):
            pass
