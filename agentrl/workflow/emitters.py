"""Emitters: agents, tools and hooks write annotations of their episode while they run.

    agentrl.emit_reward(0.5)                            # of the episode; emit_reward({"exact": 1, "short": 0.2}) names parts
    agentrl.emit_message("the plan is to add first")
    with agentrl.operation("search", query="Paris"): ...

In an agent's process, and in a process that it starts, they are sent to the endpoint and are rows when the call returns. Of a
tool and of a hook they are kept with what these return. Elsewhere they do nothing, so that the same agent runs without agentrl.
This module needs the standard library alone.
"""

import functools
import http.client
import inspect
import json
import os
import secrets
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self, TypeVar, overload
from urllib.parse import urlsplit

from agentrl.workflow.annotations import MAX_DATA, Annotation, check
from agentrl.workflow.errors import ConfigError, ServiceError

EMIT_URL, EMIT_KEY = "AGENTRL_EMIT_URL", "AGENTRL_EMIT_KEY"
"""The environment variables by which an agent's process knows where its annotations go, and the key that writes them."""
REWARD = "reward"
"""The name of a reward that is given none."""
PATIENCE_SECONDS = 60.0
"""How long an endpoint that is away is waited for."""
TIMEOUT_SECONDS = 30.0
MAX_TRACE = 8000
F = TypeVar("F", bound=Callable[..., Any])
Sink = Callable[[Annotation], None]
_sink: ContextVar[Sink | None] = ContextVar("agentrl_annotations", default=None)


def emit_reward(value: "float | Mapping[str, float]", step: int | None = None, name: str = REWARD) -> None:
    """Give the episode a reward, or parts by name. What is said again replaces what was said before.

    What agents and tools say counts where the run has no rewards of its own, or is told to count it
    (`agent: {own_rewards: true}`); it is kept in any case.

    Args:
        step: the index of the step that earned it; None: the episode.

    Raises:
        ConfigError: it is no finite number.
        ServiceError: it could not be written.
    """
    for part, number in (value if isinstance(value, Mapping) else {name: value}).items():
        item = getattr(number, "item", None)  # of numpy and torch
        data = {"value": item() if callable(item) and not isinstance(number, int | float) else number}
        data["value"] = float(data["value"]) if isinstance(data["value"], bool) else data["value"]
        _emit("reward", str(part), data if step is None else data | {"step": step}, step)


def emit_message(text: str, **more: Any) -> None:
    """Note a message, with anything beside it that is JSON.

    Raises:
        ConfigError, ServiceError: as `emit_reward`.
    """
    _emit("message", "", {"message": str(text)} | more)


def emit_object(value: Any, name: str = "") -> None:
    """Note any value that is JSON.

    Raises:
        ConfigError: it is none, or is too large.
        ServiceError: it could not be written.
    """
    _emit("object", name, {"object": value})


def emit_annotation(values: Mapping[str, Any], name: str = "", step: int | None = None) -> None:
    """Note values by name, of the episode or of one of its steps.

    Raises:
        ConfigError, ServiceError: as `emit_object`.
    """
    _emit("annotation", name, dict(values), step)


def emit_exception(error: BaseException) -> None:
    """Note an error that was caught: its class, its words and where it was raised.

    Raises:
        ServiceError: it could not be written.
    """
    lines = "".join(traceback.format_exception(error))[-MAX_TRACE:]
    _emit("exception", type(error).__name__[:100], {"message": str(error)[:MAX_TRACE], "traceback": lines})


class Operation:
    """What `operation` makes: a context manager, and a decorator of functions, sync and async."""

    def __init__(self, name: str, notes: Mapping[str, Any]) -> None:
        """Take its name and what is kept with it."""
        self._name, self._notes = name, notes

    def __enter__(self) -> Self:
        """Begin it."""
        self._began = time.monotonic()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Note its end."""
        failure = {} if error is None else {"error": f"{type(error).__name__}: {error}"[:1000]}
        _emit("operation", self._name, {**self._notes, **failure}, seconds=time.monotonic() - self._began)

    def __call__(self, function: F) -> F:
        """Return the function, each call of which is such an operation."""
        name = self._name or function.__name__

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with Operation(name, self._notes):
                return function(*args, **kwargs)

        @functools.wraps(function)
        async def timed_async(*args: Any, **kwargs: Any) -> Any:
            with Operation(name, self._notes):
                return await function(*args, **kwargs)

        return timed_async if inspect.iscoroutinefunction(function) else timed  # type: ignore[return-value]


@overload
def operation(name: str = "", **notes: Any) -> Operation: ...


@overload
def operation(name: F) -> F: ...


def operation(name: "str | Callable[..., Any]" = "", **notes: Any) -> Any:
    """Notes how long something took, and whether it raised.

    `with operation("search", query=text):`, `@operation` or `@operation("search")`.

    Args:
        name: what it is called; of a function that is decorated without one: the function's.
        notes: anything that is JSON, kept with it.

    Raises:
        ConfigError, ServiceError: as `emit_object`, at its end.
    """
    return Operation(name, notes) if isinstance(name, str) else Operation(name.__name__, notes)(name)


@contextmanager
def collected(into: list[Annotation], source: str, prefix: str) -> Iterator[None]:
    """What is emitted meanwhile in this context is added to the list, with ids that count from the prefix.

    Args:
        source: who says it.
    """

    def add(annotation: Annotation) -> None:
        into.append(
            Annotation(
                f"{prefix}:{len(into)}",
                annotation.kind,
                annotation.name,
                annotation.data,
                annotation.step,
                annotation.seconds,
                source,
            )
        )

    token = _sink.set(add)
    try:
        yield
    finally:
        _sink.reset(token)


@contextmanager
def sent(url: str, key: str) -> Iterator[None]:
    """What is emitted meanwhile in this context is sent to that URL of the endpoint, under that key."""
    token = _sink.set(functools.partial(_send, url, key))
    try:
        yield
    finally:
        _sink.reset(token)


def _emit(kind: str, name: str, data: Mapping[str, Any], step: int | None = None, seconds: float | None = None) -> None:
    sink = _sink.get() or _endpoint_sink()
    if sink is None:
        return
    annotation = Annotation(secrets.token_hex(16), kind, name, data, step, seconds)
    try:
        check(annotation)
    except ValueError as error:
        problem = str(error)
        raise ConfigError(f"{problem[:1].upper()}{problem[1:]}.", f"Pass at most {MAX_DATA} bytes of plain JSON.") from None
    sink(annotation)


def _endpoint_sink() -> Sink | None:
    url, key = os.environ.get(EMIT_URL), os.environ.get(EMIT_KEY)
    return functools.partial(_send, url, key) if url and key else None


def _send(url: str, key: str, annotation: Annotation) -> None:
    row = {
        "id": annotation.id,
        "kind": annotation.kind,
        "name": annotation.name,
        "data": annotation.data,
        "step": annotation.step,
        "seconds": annotation.seconds,
    }
    body = json.dumps({"annotations": [row]}).encode()
    deadline, pause = time.monotonic() + PATIENCE_SECONDS, 0.1
    while True:
        status, reply = _post(url, key, body)
        if status == 200:
            return
        if status not in (0, 429, 503) or time.monotonic() > deadline:
            raise ServiceError(f"An annotation could not be written: {reply[:300] or status}.")
        time.sleep(pause)
        pause = min(2.0, 2 * pause)


def _post(url: str, key: str, body: bytes) -> tuple[int, str]:
    """Status and words of the answer; 0 where there is none."""
    parts = urlsplit(url)
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = make(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)
    try:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request("POST", parts.path, body, headers)
        answer = connection.getresponse()
        return answer.status, _words(answer.read(64 * 1024))
    except (OSError, http.client.HTTPException) as error:
        return 0, f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def _words(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
