"""Emitters: functions with which agents, tools and hooks write annotations of their episode while they run.

    agentrl.emit_reward(0.5)                            # of the episode; emit_reward({"exact": 1, "short": 0.2}) names parts
    agentrl.emit_message("the plan is to add first")
    with agentrl.operation("search", query="Paris"): ...

In an agent's process and its child processes, an emitter sends the annotation to the endpoint and returns when the annotation
is stored. In a tool or a hook, the annotation is stored together with the result. In any other process the emitters do nothing,
so the same agent also runs without agentrl. This module imports only the standard library.
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
"""The environment variables of an agent's process that hold the URL for its annotations, and the key for that URL."""
REWARD = "reward"
PATIENCE_SECONDS = 60.0
"""The longest time for which a request is repeated while the endpoint is unavailable, in seconds."""
TIMEOUT_SECONDS = 30.0
MAX_TRACE = 8000
F = TypeVar("F", bound=Callable[..., Any])
Sink = Callable[[Annotation], None]
_sink: ContextVar[Sink | None] = ContextVar("agentrl_annotations", default=None)


def emit_variables(base_url: str, emit_key: str) -> dict[str, str]:
    """Return the environment variables with which an agent sends annotations and OpenTelemetry exports. If `emit_key` is
    empty, there are none. `base_url` is the endpoint's URL, which ends with `/v1`.
    """
    if not emit_key:
        return {}
    return {
        EMIT_URL: f"{base_url}/annotations",
        EMIT_KEY: emit_key,
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{base_url}/traces",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"x-api-key={emit_key}",
    }


def emit_reward(value: "float | Mapping[str, float]", step: int | None = None, name: str = REWARD) -> None:
    """Emit a reward of the episode, or several named parts of it.

    A later value replaces an earlier value of the same name and step. Rewards from agents and tools are always stored. They are
    trained on only if the run has no rewards of its own, or has `agent: {own_rewards: true}`. Raise ConfigError if the value is
    not a finite number. Raise ServiceError if the reward could not be stored.

    Args:
        value: a number, or numbers by name.
        step: the index of the step that earned the reward; None: the whole episode earned it.
        name: the name of the part, if `value` is a number.
    """
    for part, number in (value if isinstance(value, Mapping) else {name: value}).items():
        item = getattr(number, "item", None)  # of numpy and torch
        data = {"value": item() if callable(item) and not isinstance(number, int | float) else number}
        data["value"] = float(data["value"]) if isinstance(data["value"], bool) else data["value"]
        _emit("reward", str(part), data if step is None else data | {"step": step}, step)


def emit_message(text: str, **more: Any) -> None:
    """Emit a message, with further JSON values by name. Raise ConfigError if a value is not JSON, or is too large. Raise
    ServiceError if the message could not be stored.
    """
    _emit("message", "", {"message": str(text)} | more)


def emit_object(value: Any, name: str = "") -> None:
    """Emit a JSON value. Raise ConfigError if the value is not JSON, or is too large. Raise ServiceError if the value could not
    be stored.
    """
    _emit("object", name, {"object": value})


def emit_annotation(values: Mapping[str, Any], name: str = "", step: int | None = None) -> None:
    """Emit JSON values by name, which belong to the episode or to one of its steps. Raise ConfigError if a value is not JSON,
    or is too large. Raise ServiceError if the annotation could not be stored.
    """
    _emit("annotation", name, dict(values), step)


def emit_exception(error: BaseException) -> None:
    """Emit a caught exception: its class, its message and its traceback. Raise ServiceError if the exception could not be
    stored.
    """
    lines = "".join(traceback.format_exception(error))[-MAX_TRACE:]
    _emit("exception", type(error).__name__[:100], {"message": str(error)[:MAX_TRACE], "traceback": lines})


class Operation:
    """An operation that is emitted with its duration: a context manager, and a decorator of sync and async functions."""

    def __init__(self, name: str, notes: Mapping[str, Any]) -> None:
        self._name, self._notes = name, notes

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Emit the operation with its duration, and with the exception if one was raised."""
        failure = {} if error is None else {"error": f"{type(error).__name__}: {error}"[:1000]}
        _emit("operation", self._name, {**self._notes, **failure}, seconds=time.monotonic() - self._began)

    def __call__(self, function: F) -> F:
        """Wrap the function. Each call of the wrapped function is emitted as an operation."""
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
    """Emit the duration of an operation, and the exception that it raised.

    Use it as `with operation("search", query=text):`, `@operation` or `@operation("search")`. When the operation ends, raise
    ConfigError if a note is not JSON or is too large, and ServiceError if the operation could not be stored.

    Args:
        name: the name of the operation; a decorator without a name uses the name of the function.
        notes: JSON values that are stored with the operation.
    """
    return Operation(name, notes) if isinstance(name, str) else Operation(name.__name__, notes)(name)


@contextmanager
def collected(into: list[Annotation], source: str, prefix: str) -> Iterator[None]:
    """Append the annotations that this context emits to the list `into`, instead of sending them. `source` is the writer, one
    of `annotations.SOURCES`. `prefix` is the first part of each annotation's id. The second part is the annotation's index in
    the list.
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
    """Send the annotations that this context emits to the given URL of the endpoint, with the given key."""
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
