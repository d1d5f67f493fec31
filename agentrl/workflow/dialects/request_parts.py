"""The parts of requests that several dialects read, and the limits of these parts."""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from agentrl.workflow.call_json import decode_json
from agentrl.workflow.chat.grammar import ANY_TOOL, MAX_SCHEMA_CHARS
from agentrl.workflow.dialects import RequestError
from agentrl.workflow.dialects.fields import Fields, clean_tree
from agentrl.workflow.tool_formats import Schema
from agentrl.workflow.trajectory import Message

MAX_MESSAGES, MAX_TOOLS, MAX_CALLS, MAX_PARTS = 10_000, 512, 1000, 10_000
MAX_CHOICES, MAX_STOPS, MAX_STOP, MAX_NAME = 128, 16, 256, 256
MAX_TOP_LOGPROBS = 20
MAX_COUNT = 2**31 - 1
MAX_TOOL_NAME = 128
"""The most characters of an offered tool's name, with its namespace. The row of a call holds no more."""

NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({"type": "object", "properties": {}})
"""The parameters of a function without parameters. Chat templates read both keys, so missing keys are added."""
SAMPLING = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0)}
BOOKKEEPING = frozenset(
    {
        *("metadata", "user", "safety_identifier", "service_tier", "store", "client_metadata", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "cache_control"),
    }
)
"""The fields that change no sampled token in any API. They are accepted without being named."""
NAMED_FIELDS = 50
"""The most fields without effect that are named."""


def identity_of(path: str, values: Mapping[str, Any]) -> str:
    """Return the hash that a request has in common with its repetitions.

    The path of the API is part of it, because the same body may be another request in another API.

    A client may repeat a broken stream as a request without `stream`, so the fields that only change the form of the response
    are left out.
    """
    common = {name: value for name, value in values.items() if name not in ("stream", "stream_options")}
    return hashlib.sha256(json.dumps([path, common], sort_keys=True).encode()).hexdigest()


def read_sampling(fields: Fields, *names: str) -> dict[str, Any]:
    """Return those of the sampling options `names` that the request sets."""
    options: dict[str, Any] = {name: fields.number(name, *bounds) for name, bounds in SAMPLING.items() if name in names}
    if "top_k" in names:
        options["top_k"] = fields.integer("top_k", -1, MAX_COUNT)
    if "seed" in names:
        options["seed"] = fields.integer("seed", -(2**63), 2**63 - 1)
    return {name: value for name, value in options.items() if value is not None}


def list_not_applied(fields: Fields, honoured: frozenset[str], usual: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Return the names of the fields that would have an effect in the API, and have none here.

    Args:
        honoured: the fields that have an effect.
        usual: for some fields, the values with which the field has no effect in the API either.
    """
    names = [
        name[:MAX_NAME].encode("utf-8", "replace").decode()
        for name, value in fields.values.items()
        if value is not None and name not in honoured | BOOKKEEPING and value not in usual.get(name, ())
    ]
    return names[:NAMED_FIELDS]


def read_schema(fields: Fields, name: str) -> str:
    """Return a JSON schema of the request as compact JSON.

    Raises:
        RequestError: it is not an object, or has more than `MAX_SCHEMA_CHARS` characters (status 400).
    """
    schema = dict(clean_tree(fields, name, fields.object(name).values))
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    if len(text) > MAX_SCHEMA_CHARS:
        raise fields.error(name, f"the schema has {len(text)} characters, at most {MAX_SCHEMA_CHARS} are accepted")
    return text


def read_format(fields: Fields, name: str) -> str:
    """Return the JSON schema that a format object requires: `{}` for any JSON object, empty for text.

    Args:
        fields: the object in the request that has the format.
        name: the name of the field with the format. The format's type is `text`, `json_object` or `json_schema`. The schema is
            part of the format, or of its field `json_schema`.

    Raises:
        RequestError: the type is unknown, or the schema is invalid (status 400).
    """
    if not fields.has(name):
        return ""
    form = fields.object(name)
    match form.text("type", MAX_NAME):
        case "text":
            return ""
        case "json_object":
            return "{}"
        case "json_schema":
            holder = form.object("json_schema") if form.has("json_schema") else form
            return read_schema(holder, "schema")
        case kind:
            raise form.error("type", f"{kind[:40]!r} is not supported: text, json_object or json_schema", "unsupported_value")


def strict_tools(tools: Iterable[Fields]) -> tuple[str, ...]:
    """Return the names of the functions whose calls must follow their schemas."""
    return tuple(tool.text("name", MAX_NAME) for tool in tools if tool.flag("strict"))


def check_tool(fields: Fields, tool: str, tools: Sequence[Schema]) -> str:
    """Return the name of a tool that the request requires.

    Raises:
        RequestError: the request offers no such tool, or none at all (status 400).
    """
    names = [offered["function"]["name"] for offered in tools]
    if (tool != ANY_TOOL and tool not in names) or not names:
        problem = f"no tool is called {tool[:40]!r}" if tool != ANY_TOOL else "it needs tools"
        raise fields.error("tool_choice", problem)
    return tool


def unsupported_part(part: Fields, kind: str) -> RequestError:
    """Return the error for a part of a message that is not text."""
    return part.error("type", f"{kind[:40]!r} is not supported: the policy reads only text", "unsupported_value")


def function_schema(function: Fields, values: Mapping[str, Any]) -> Schema:
    """Return a tool in the form that chat templates take.

    Args:
        function: the object in the request that has the tool's `name`.
        values: the fields that a template may read. `parameters` is the JSON schema of the arguments.

    Raises:
        RequestError: a field is invalid (status 400).
    """
    if not function.text("name", MAX_NAME):
        raise function.error("name", "it is missing")
    if (size := len(values["name"])) > MAX_TOOL_NAME:
        raise function.error("name", f"a tool's name has {size} characters, at most {MAX_TOOL_NAME} are accepted")
    function.text("description")
    parameters = _with_defaults(Fields(values, function.at).object("parameters").values, NO_PARAMETERS)
    schema = _with_defaults(values, {"description": "", "parameters": {}}) | {"parameters": parameters}
    return {"type": "function", "function": clean_tree(function, "parameters", schema)}


def _with_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not null, followed by the defaults of missing keys.

    The order of the values stays the same, because a template may write the keys in order.
    """
    present = {name: value for name, value in values.items() if value is not None}
    return present | {name: value for name, value in defaults.items() if name not in present}


def read_arguments(function: Fields) -> Mapping[str, Any]:
    """Return the arguments of a call from the field `arguments`, which is JSON as a text.

    Raises:
        RequestError: they are not a JSON object (status 400).
    """
    text = function.text("arguments")
    if not text.strip():
        return {}
    try:
        value, why = decode_json(text)
    except ValueError as error:
        raise function.error("arguments", f"they must be a JSON object as text: {str(error)[:200]}") from error
    if why or not isinstance(value, dict):
        raise function.error("arguments", f"they must be a JSON object as text{f': {why}' if why else ''}")
    return dict(clean_tree(function, "arguments", value))


def read_encoded(fields: Fields, name: str) -> str:
    """Return the text that a response gave the client in base64, as an API's encrypted thought.

    Raises:
        RequestError: the value is not base64 of a text (status 400).
    """
    try:
        text = base64.b64decode(fields.text(name), validate=True).decode()
    except ValueError as error:
        raise fields.error(name, "no response of this server contained it") from error
    return Fields({name: text}, fields.at).text(name)


def result_place(call_number: int, results: int) -> int:
    """Return the key by which `in_order` sorts a tool result: first by the number of its call, then by arrival."""
    return call_number * MAX_MESSAGES + results


def in_order(results: Mapping[int, Message]) -> list[Message]:
    """Sort the results by the order of their calls. Their order in the request has no meaning."""
    return [results[place] for place in sorted(results)]
