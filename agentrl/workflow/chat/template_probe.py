"""Probes of a chat template: its tool format, what it drops, and whether a rendered conversation can be continued.

A probe renders a conversation of words that occur nowhere else, and searches the result for these words. The caller passes the
function that renders, so a command needs neither torch nor transformers.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError

from agentrl.workflow.chat.parsing import END_THINK, THINK, parse_text
from agentrl.workflow.plugins import find, names
from agentrl.workflow.tool_formats import AUTO, HERMES, Schema, ToolFormat
from agentrl.workflow.trajectory import Message, ToolCall

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Schema], bool], str]
"""A function from messages in the form of templates, tools, and whether to open the assistant's turn, to the rendered text."""

FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""The exceptions that a template raises if it cannot render its input."""

NAME, ARGUMENT = "zq_probe", "zqvalue"
_PROBE_TOOL: Schema = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "zqdescription",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_CALL = ToolCall(NAME, {"word": ARGUMENT})
_USER = Message("user", "zquser")
_ANSWER = Message("assistant", "zqanswer", thought="zqthought")
_RESULT = Message("tool", "zqresult", name=NAME)


@dataclass(frozen=True, slots=True)
class Manner:
    """The form in which a template takes messages and calls.

    Args:
        tool_format: the format of calls.
        native: whether the template itself writes a turn's calls, in that format. Otherwise agentrl writes them into the turn's
            content.
        many: whether the template can write several calls of one turn.
        ids: whether the template needs an id for each call and result.
    """

    tool_format: ToolFormat
    native: bool = True
    many: bool = True
    ids: bool = False

    def plain(self, messages: Sequence[Message], tools: Sequence[Schema]) -> Iterator[dict[str, Any]]:
        """Yield the messages as the dictionaries that chat templates read."""
        answered = 0
        for message in messages:
            answered = answered + 1 if message.role == "tool" else 0
            if message.role == "assistant":
                yield self._assistant_turn(message, tools)
            else:
                fields = {"name": message.name} if message.name else {}
                fields |= {"tool_call_id": _id(answered - 1)} if answered and self.ids else {}
                yield {"role": message.role, "content": message.content, **fields}

    def _assistant_turn(self, message: Message, tools: Sequence[Schema]) -> dict[str, Any]:
        thought = f"{THINK}\n{message.thought}\n{END_THINK}\n\n" if message.thought else ""
        # An unreadable call's text is in the content.
        readable_calls = [call for call in message.tool_calls if call.error is None]
        if readable_calls and not (self.native and (self.many or len(readable_calls) == 1)):
            return {"role": "assistant", "content": thought + self.tool_format.write(message.content, readable_calls, tools)}
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            | ({"id": _id(number)} if self.ids else {})
            for number, call in enumerate(readable_calls)
        ]
        return {"role": "assistant", "content": thought + message.content, **({"tool_calls": calls} if calls else {})}


def _id(number: int) -> str:
    """Return the id of a call, from its number: nine letters and digits, as Mistral's templates require."""
    return f"call{number:05d}"


def manner_of(render: Render, source: str, format_name: str = AUTO) -> Manner:
    """Find the tool-call format of a chat template, and how messages must be passed to the template.

    With AUTO, the first of these rules that selects a format decides:

    1. The format parses the calls that the template writes. If several do, the one that leaves the least text as content.
    2. The template's text contains all marks of the format. If several do, the one with the longest marks.
    3. Hermes.

    Args:
        render: renders messages with the template.
        source: the template's text.
        format_name: the name of a format, or AUTO.

    Raises:
        ConfigError: no format has this name.
    """
    formats: list[ToolFormat] = [
        find("tool_formats", name) for name in (names("tool_formats") if format_name == AUTO else [format_name])
    ]
    for with_ids in (False, True):
        text = _render_calls(render, 1, with_ids)
        readers = [tool_format for tool_format in formats if _reads(text, tool_format, 1)]
        if readers:
            # The one that leaves the least content reads the end marks.
            chosen = min(readers, key=lambda tool_format: len(parse_text(text, tool_format, [_PROBE_TOOL]).content))
            ids = with_ids or _wants_ids(render, chosen)
            return Manner(chosen, many=_reads(_render_calls(render, 2, ids), chosen, 2), ids=ids)
    if format_name != AUTO:
        return Manner(formats[0], native=False, ids=_wants_ids(render, formats[0]))
    marked = [tool_format for tool_format in formats if tool_format.marks and all(mark in source for mark in tool_format.marks)]
    chosen = max(marked, key=lambda tool_format: len("".join(tool_format.marks)), default=find("tool_formats", HERMES))
    return Manner(chosen, native=False, ids=_wants_ids(render, chosen))


def _render_calls(render: Render, count: int, ids: bool) -> str:
    """Return the text of a turn with `count` calls as the template writes it; empty if the template cannot write it."""
    manner = Manner(find("tool_formats", HERMES), ids=ids)  # the template writes the calls: the format does not matter
    question = list(manner.plain([_USER], [_PROBE_TOOL]))
    try:
        prompt = render(question, [_PROBE_TOOL], True)
        whole = render([*question, *manner.plain([_probe_turn(count)], [_PROBE_TOOL])], [_PROBE_TOOL], False)
    except FAULTS:
        return ""
    return whole[len(prompt) :] if whole.startswith(prompt) else whole.partition(_USER.content)[2]


def _probe_turn(count: int) -> Message:
    return Message("assistant", "", tool_calls=(_CALL,) * count)


def _reads(text: str, tool_format: ToolFormat, count: int) -> bool:
    return parse_text(text, tool_format, [_PROBE_TOOL]).tool_calls == _probe_turn(count).tool_calls


def _wants_ids(render: Render, tool_format: ToolFormat) -> bool:
    """Return True if the template renders a tool's result only with an id."""
    plain, with_ids = (Manner(tool_format, native=False, ids=ids) for ids in (False, True))
    return not _renders(render, plain) and _renders(render, with_ids)


def _renders(render: Render, manner: Manner) -> bool:
    try:
        render(list(manner.plain([_USER, _ANSWER, _RESULT], [_PROBE_TOOL])), [_PROBE_TOOL], True)
    except FAULTS:
        return False
    return True


def find_trouble(render: Render, manner: Manner, system: bool, tools: bool, later_system: bool = False) -> str:
    """Return why training with the template is impossible, as the end of a sentence; empty if it is possible."""
    try:
        parts = _dropped_parts(render, manner, system, tools, later_system)
        return f"drops {parts}" if parts else _rewrites(render, manner) if tools else ""
    except FAULTS as error:
        return f"cannot render a conversation with {_parts(system, tools)}: {' '.join(str(error).split())[:200]}"


def can_ask_after_results(render: Render, manner: Manner) -> bool:
    """Return True if the template renders a user message right after a tool's result without changing the text before it."""
    calling = Message("assistant", "", tool_calls=(_CALL,))
    question = Message("user", "zqagain")
    try:
        before = render(list(manner.plain([_USER, calling, _RESULT], [_PROBE_TOOL])), [_PROBE_TOOL], False)
        after = render(list(manner.plain([_USER, calling, _RESULT, question], [_PROBE_TOOL])), [_PROBE_TOOL], True)
    except FAULTS:
        return False
    return question.content in after and after.startswith(before.partition(_RESULT.content)[0] + _RESULT.content)


def _parts(system: bool, tools: bool) -> str:
    parts = [*(["a system message"] if system else []), "a question", *(["a tool call and its result"] if tools else [])]
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0] + " and its answer"


def _dropped_parts(render: Render, manner: Manner, system: bool, tools: bool, later_system: bool) -> str:
    calling = Message("assistant", "", tool_calls=(_CALL,))
    messages = [Message("system", "zqsystem")] if system else []
    messages += [_USER, _ANSWER, Message("system", "zqlater")] if later_system else []
    text = render(list(manner.plain([*messages, _USER, *([calling, _RESULT] if tools else []), _ANSWER], [])), [], False)
    marks = {"zqsystem": "the system message"} if system else {}
    marks |= {"zqlater": "system messages behind the first"} if later_system else {}
    marks |= {_USER.content: "the user's words", _ANSWER.content: "the assistant's words"}
    marks |= {NAME: "tool calls", ARGUMENT: "a call's arguments", _RESULT.content: "tool results"} if tools else {}
    return " and ".join(what for mark, what in marks.items() if mark not in text)


def _rewrites(render: Render, manner: Manner) -> str:
    before_it = list(manner.plain([_USER, _ANSWER], [_PROBE_TOOL]))
    after_it = render([*before_it, *manner.plain([_RESULT], [_PROBE_TOOL])], [_PROBE_TOOL], True)
    answer, _, end = render(before_it, [_PROBE_TOOL], False).rpartition(_ANSWER.content)
    follows = after_it.removeprefix(answer + _ANSWER.content)
    # An end of sequence may stand behind the last turn's end, as in Phi's templates.
    if follows != after_it and end.lstrip()[:1] in ("", follows.lstrip()[:1]):
        return ""
    return "rewrites earlier turns before a tool's result, so that an episode is not one row of tokens"


def writes_unreadable_calls(render: Render, manner: Manner) -> bool:
    """Return True if the template itself writes calls, and the tool format cannot parse them."""
    if manner.native:
        return False
    native = replace(manner, native=True, many=True)
    *before, turn = native.plain([_USER, _probe_turn(1)], [_PROBE_TOOL])
    as_text = [{"type": "function", "function": {"name": NAME, "arguments": json.dumps(dict(_CALL.arguments))}}]
    return any(_writes_argument(render, [*before, message]) for message in (turn, {**turn, "tool_calls": as_text}))


def _writes_argument(render: Render, turns: Sequence[Mapping[str, Any]]) -> bool:
    try:
        return ARGUMENT in render(turns, [_PROBE_TOOL], False)
    except FAULTS:
        return False


def is_silent_on_tools(render: Render, manner: Manner) -> bool:
    """Return True if the template does not write the offered tools into the prompt."""
    try:
        return NAME not in render(list(manner.plain([_USER], [_PROBE_TOOL])), [_PROBE_TOOL], True)
    except FAULTS:
        return False
