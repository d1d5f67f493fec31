"""Renders chat templates in a separate process that may be killed.

A template is a program that the model's author wrote. jinja's sandbox keeps it from files and from other programs, but not
from endless work: two nested loops, or one multiplication of a text, can take hours or all memory. So each rendering has
limits. Only the template of the model `tiny`, which is agentrl's own, is rendered in the caller's process.

This module has the code of both processes: `check_syntax` and `render_template` send requests, and `main` answers them.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.workflow.chat.tiny_template import TEMPLATE
from agentrl.workflow.errors import ModelError
from agentrl.workflow.runtime.limited_process import LimitedProcess, LimitError, ProcessKilled, limit_processor_time, serve
from agentrl.workflow.runtime.warm_processes import Warm

CPU_SECONDS = 5
MEMORY_BYTES = 1 << 30
WALL_SECONDS = 20.0 * CPU_SECONDS
"""The time limit of a rendering, in seconds. `CPU_SECONDS` limits its processor time, and `MEMORY_BYTES` the memory of the
process.
"""
MAX_ADDED_CHARS, MAX_GROWTH = 1 << 20, 4
"""A template may render `MAX_ADDED_CHARS` characters, and `MAX_GROWTH` more for each byte of its input as JSON. Otherwise its
text could take too long to tokenize.
"""
MAX_ERROR_CHARS = 10_000
OTHER_TEMPLATE = "Pass --chat-template FILE, or another model."


def check_syntax(source: str) -> None:
    """Compile a template. Raise TemplateError if it is invalid, and ModelError if it takes too much time or memory."""
    _answer(source, None, "")


def render_template(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    generate: bool,
    variables: Mapping[str, Any],
    clock: datetime,
) -> str:
    """Return the text that a template renders from messages and tools.

    Args:
        generate: whether to open the assistant's turn.
        variables: the special tokens that the template names, and other variables that it reads. They are JSON.
        clock: the time that the template gets (`strftime_now`). transformers would pass the present time, which changes between
            two turns.

    Raises:
        TemplateError: the template refuses its input. For the template of `tiny`, one of `template_probe.FAULTS`.
        ModelError: the template takes too much time or memory, or renders too long a text.
    """
    values = {
        "documents": None,
        **variables,
        "messages": [dict(message) for message in messages],
        "tools": [dict(tool) for tool in tools] or None,
        "add_generation_prompt": generate,
    }
    return _answer(source, values, clock.isoformat())


def _answer(source: str, values: dict[str, Any] | None, clock: str) -> str:
    if source == TEMPLATE:
        return _render(source, values, clock)
    request = {"source": source, "values": values, "clock": clock, "seconds": CPU_SECONDS}
    try:
        try:
            answer = _ask(request)
        except ProcessKilled:  # perhaps not because of the template
            answer = _ask(request)
    except LimitError as error:
        raise _limit_error() from error
    if "text" in answer:
        return str(answer["text"])
    if "error" in answer:
        raise _template_error(answer["error"], answer["line"])
    if "length" in answer:
        raise ModelError(f"The chat template renders {answer['length']} characters, far more than its input.", OTHER_TEMPLATE)
    raise _limit_error()


def _ask(request: Mapping[str, Any]) -> dict[str, Any]:
    with renderers.one() as process:
        return process.ask(request, WALL_SECONDS)


def _template_error(message: str, line: int | None) -> TemplateError:
    if line is None:
        return TemplateError(message)
    error = TemplateSyntaxError(message, line)
    error.translated = True  # otherwise its text would also have the line
    return error


def _limit_error() -> ModelError:
    limits = f"{CPU_SECONDS} s of processor time, {WALL_SECONDS:.0f} s in all, or {MEMORY_BYTES >> 30} GiB of memory"
    return ModelError(f"The chat template exceeds a limit: {limits}.", OTHER_TEMPLATE)


renderers = Warm(lambda: LimitedProcess("agentrl.workflow.chat.template_process", "renders chat templates"))


# the code of the child process


def main() -> None:
    """Render templates for the parent process."""
    serve(_answer_text, MEMORY_BYTES)


def _answer_text(request: dict[str, Any]) -> str:
    limit_processor_time(request.pop("seconds"))
    try:
        text = _render(**request)
        return json.dumps({"length": len(text)} if _is_too_long(text, request["values"]) else {"text": text})
    except MemoryError:
        return json.dumps({"memory": True})
    except Exception as error:  # noqa: BLE001 - a template can make any function of jinja fail
        line = error.lineno if isinstance(error, TemplateSyntaxError) else None
        return json.dumps({"error": str(error)[:MAX_ERROR_CHARS], "line": line})


def _is_too_long(text: str, values: object) -> bool:
    added = len(text) - MAX_ADDED_CHARS
    return added > 0 and added > MAX_GROWTH * len(json.dumps(values))


def _render(source: str, values: Mapping[str, Any] | None, clock: str) -> str:
    """Return the rendered text; empty if `values` is None and the template is only compiled."""
    template = _compile(source)
    if values is None:
        return ""
    return template.render(**values, strftime_now=lambda form: datetime.fromisoformat(clock).strftime(form))


class _Generation(Extension):
    """The block `{% generation %}...{% endgeneration %}`, which marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own spelling

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


@lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


if __name__ == "__main__":
    main()
