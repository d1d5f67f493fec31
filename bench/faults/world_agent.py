"""The agent of the fault loop's fourth world: two calls of the model, one as a stream, with tools that it runs by itself.

It knows nothing of faults. What breaks or fails on the way it sends again, as clients of the API do, who say how often they
tried.
"""

import json
import time
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

RETRIES = 40
PAUSE_SECONDS = 0.1
MAX_SECONDS = 60.0
"""Longer than any fault lasts."""

_NUMBER = {"type": "integer"}


def _tool(name: str, what: str, *numbers: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": dict.fromkeys(numbers, _NUMBER), "required": list(numbers)}
    return {"type": "function", "function": {"name": name, "description": what, "parameters": parameters}}


TOOLS = [_tool("plus", "Adds.", "a", "b"), _tool("note", "Writes a digit down.", "digit")]


def solve(task: Any, llm: Any) -> None:
    """Two turns, whatever the model says."""
    messages: list[Any] = list(task.messages)
    for stream in (True, False):
        said = _ask(llm, messages, stream)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": _result(call["function"])} for call in said["tool_calls"]
        ]
        messages += [said, *(results or [{"role": "user", "content": "Go on."}])]


def _result(function: Mapping[str, str]) -> str:
    try:
        given = json.loads(function["arguments"])
        return str(given["a"] + given["b"]) if function["name"] == "plus" else "noted"
    except (ValueError, TypeError, KeyError):
        return "That is no call."


def _ask(llm: Any, messages: list[Any], stream: bool) -> dict[str, Any]:
    """The model's next message."""
    body = json.dumps({"model": llm.model, "messages": messages, "tools": TOOLS, "stream": stream}).encode()
    headers = {"Authorization": f"Bearer {llm.api_key}", "Content-Type": "application/json"}
    for tried in range(RETRIES):
        asked = Request(f"{llm.base_url}/chat/completions", body, {**headers, "X-Stainless-Retry-Count": str(tried)})
        try:
            with urlopen(asked, timeout=MAX_SECONDS) as answer:
                return _streamed(answer) if stream else _message(json.load(answer)["choices"][0]["message"])
        except HTTPError as error:
            if error.code < 500 and error.code != 429:
                raise
        except (OSError, HTTPException, ValueError):
            pass
        time.sleep(PAUSE_SECONDS * (1 + tried))
    raise TimeoutError("nobody answers")


def _message(said: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": said.get("content") or "", "tool_calls": said.get("tool_calls") or []}


def _streamed(lines: Any) -> dict[str, Any]:
    """The message of a stream that came whole.

    Raises:
        ValueError: it ends early, or with an error.
    """
    text, calls = "", dict[int, dict[str, Any]]()
    for line in lines:
        kind, _, data = line.decode().partition(": ")
        if kind != "data":
            continue
        if data.strip() == "[DONE]":
            return _message({"content": text, "tool_calls": list(calls.values())})
        event = json.loads(data)
        if "error" in event:
            raise ValueError(event["error"])
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls") or []:
                _add(calls.setdefault(piece["index"], {"type": "function", "function": {"name": "", "arguments": ""}}), piece)
    raise ValueError("the stream ends early")


def _add(call: dict[str, Any], piece: Mapping[str, Any]) -> None:
    if piece.get("id"):
        call["id"] = piece["id"]
    for name, more in (piece.get("function") or {}).items():
        call["function"][name] += more or ""
