"""A rehearsal: a warm interpreter makes one local call with the agent's SDK before any agent is forked.

What such an SDK imports and builds at its first call (the connection's modules, the answers' types) takes some 80 ms of a
processor, and every agent would do it again; the forks of an interpreter that has called once find it there. Another 25 ms
takes the context for TLS, for which a client reads all certificates although its calls are plain HTTP: what the SDK asked for
is made once more, and lies ready for each fork. Nothing leaves the process; an SDK that cannot be rehearsed is as it was.
"""

import functools
import gc
import importlib
import os
import sys
from collections import defaultdict
from collections.abc import Callable
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
MAKERS = (("httpcore2", "default_ssl_context"), ("ssl", "create_default_context"))
"""What clients call for a TLS context, the outer ones first."""
SPARES = 2
"""Contexts that lie ready of each kind: for a client, and for one that waits asynchronously."""
TRUSTED = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""What of the environment says which certificates."""


def rehearse() -> None:
    """Rehearse what the interpreter has imported; its memory is then shared with its forks for as long as may be."""
    openai = sys.modules.get("openai")
    if openai is not None:
        with suppress(Exception):  # of another version, say
            _call_nobody(openai)
    gc.collect()
    gc.freeze()  # else a fork's collector writes into every page


def _call_nobody(openai: Any) -> None:
    base = next(base_class for base_class in openai.DefaultHttpxClient.__mro__ if base_class.__module__.startswith("httpx"))
    httpx = importlib.import_module(base.__module__.partition(".")[0])
    for name in (httpx.__name__.replace("httpx", "httpcore"), "h11"):
        importlib.import_module(name)
    answered = httpx.MockTransport(lambda request: httpx.Response(200, json=ANSWER))
    given = {"base_url": "http://127.0.0.1/v1", "api_key": "none", "max_retries": 0}
    _keep_contexts_ready(lambda: openai.OpenAI(**given).close())
    with openai.OpenAI(**given, http_client=httpx.Client(transport=answered)) as client:
        client.chat.completions.create(**ASKED)
        with client.chat.completions.create(**ASKED, stream=True):
            pass


def _keep_contexts_ready(make_client: Callable[[], object]) -> None:
    """Makes a client, and from now on has the contexts ready that it asks for."""
    stand_ins = []
    for module, name in MAKERS:
        if module in sys.modules:
            stand_in = _Contexts(getattr(sys.modules[module], name))
            setattr(sys.modules[module], name, functools.wraps(stand_in.make)(stand_in))
            stand_ins.append(stand_in)
    make_client()
    for stand_in in stand_ins:
        stand_in.prepare()


class _Contexts:
    """Stands for a function that makes TLS contexts, and hands out each that lies ready once, as if it were made now."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make
        self._asked: dict[object, Callable[[], Any]] = {}
        self._ready: defaultdict[object, list[Any]] = defaultdict(list)
        self._is_rehearsal = True

    def __call__(self, *args: Any, **options: Any) -> Any:
        make = functools.partial(self.make, *args, **options)
        kind = repr((args, sorted(options.items()), [os.environ.get(name) for name in TRUSTED]))
        if self._is_rehearsal:
            self._asked[kind] = make
        ready = self._ready.get(kind)
        return ready.pop() if ready else make()

    def prepare(self) -> None:
        """Makes those that were asked for, to lie ready."""
        self._is_rehearsal = False
        for kind, make in self._asked.items():
            self._ready[kind] = [make() for _ in range(SPARES)]
