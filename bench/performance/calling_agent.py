"""Agents that time their own calls of the model, over one connection, and return the times as their answer."""

import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from agentrl.workflow.agents import Answer

CALLS = 12
TOKENS = 16
NEXT = "And then?"


def whole(task: Any, llm: Any) -> Answer:
    """Seconds of each of some calls, each answered whole, in one growing conversation."""
    return _timed(task, llm, stream=False)


def streamed(task: Any, llm: Any) -> Answer:
    """Seconds to the first piece of text of each of some streams, each of one token: its turn's seconds are that token's."""
    return _timed(task, llm, stream=True)


def _timed(task: Any, llm: Any, stream: bool) -> Answer:
    messages, seconds = list(task.messages), []
    with _connected(llm) as connection:
        for _ in range(CALLS):
            began = time.perf_counter()
            first, content = _call(connection, llm, messages, stream)
            seconds.append(first - began)
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": NEXT * (10 if stream else 1)}]
    return Answer(json.dumps(seconds))


class _connected:  # noqa: N801 - reads as a phrase
    def __init__(self, llm: Any) -> None:
        self._made = HTTPConnection(urlsplit(llm.base_url).netloc, timeout=120)

    def __enter__(self) -> HTTPConnection:
        self._made.connect()
        return self._made

    def __exit__(self, *error: object) -> None:
        self._made.close()


def _call(connection: HTTPConnection, llm: Any, messages: Any, stream: bool) -> tuple[float, str]:
    """(when its first text was there, all of its text)."""
    body = json.dumps({"model": llm.model, "messages": messages, "max_tokens": 1 if stream else TOKENS, "stream": stream})
    headers = {"Authorization": f"Bearer {llm.api_key}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    if not stream:
        said = json.loads(answer.read())
        return time.perf_counter(), said["choices"][0]["message"]["content"] or ""
    first, pieces = 0.0, []
    for delta in _deltas(answer):
        if delta.get("content"):
            first = first or time.perf_counter()
            pieces.append(delta["content"])
    assert pieces, "the stream had no text"
    return first, "".join(pieces)


def _deltas(answer: Any) -> Iterator[dict[str, Any]]:
    for line in answer:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                yield choice["delta"]
