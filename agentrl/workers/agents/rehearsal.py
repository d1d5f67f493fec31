"""The rehearsal of an agent's SDK. Before any agent is forked, the warm interpreter makes one local request with the SDK.

The first request of an SDK imports modules and builds types, which takes about 80 ms of processor time. Without the rehearsal,
every agent would repeat this work; after it, every fork has the result. A TLS context takes another 25 ms, because the client
reads all certificates although it uses plain HTTP. So the contexts that the SDK requested are prepared once more, and each fork
finds them ready. Nothing leaves the process. If an SDK cannot be rehearsed, agents work as before but start more slowly.
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
"""The functions that clients call to get a TLS context. A function that calls another one of them comes first."""
SPARES = 2
"""The number of prepared contexts of each kind: one for a synchronous client, one for an asynchronous client."""
TRUSTED = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""The environment variables that decide which certificates a context trusts."""


def rehearse() -> None:
    """Rehearse the SDKs that this interpreter has imported. Then freeze the garbage collector's objects, so that forks share as
    much memory as possible with the interpreter.
    """
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
    options = {"base_url": "http://127.0.0.1/v1", "api_key": "none", "max_retries": 0}
    _keep_contexts_ready(lambda: openai.OpenAI(**options).close())
    with openai.OpenAI(**options, http_client=httpx.Client(transport=answered)) as client:
        client.chat.completions.create(**ASKED)
        with client.chat.completions.create(**ASKED, stream=True):
            pass


def _keep_contexts_ready(make_client: Callable[[], object]) -> None:
    """Make a client once, and record which TLS contexts it requests. Prepare the same contexts for later clients."""
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
    """A replacement for a function that makes TLS contexts. It returns each prepared context once, and makes further contexts
    as before.
    """

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
        """Make SPARES contexts of each kind that was requested during the rehearsal."""
        self._is_rehearsal = False
        for kind, make in self._asked.items():
            self._ready[kind] = [make() for _ in range(SPARES)]
