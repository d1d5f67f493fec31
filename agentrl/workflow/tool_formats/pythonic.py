"""pythonic: a turn that is a list of calls in Python, `[name(arg=1), other(text="...")]`. For Llama 3.2, 4, LFM2, ToolACE.

Values are literals: text in any of Python's quotes, which may hold raw line breaks; numbers, True, False, None (JSON's words
too), lists, tuples and dicts; `**{"any key": 1}` passes keys that are no identifiers. Nothing is evaluated. Between
`<|python_start|>` and `<|python_end|>` (LFM2: `<|tool_call_start|>`, `<|tool_call_end|>`) the list may stand anywhere.
"""

import re
from collections.abc import Sequence
from typing import Any

from agentrl.workflow.call_json import (
    MAX_CHARACTERS,
    MAX_NESTING,
    TOO_LONG,
    Unreadable,
    duplicate_key_message,
    make_call,
    parse_digits,
    spell_json,
    why_unfit,
)
from agentrl.workflow.tool_formats import Schema, ToolFormat, nothing_after
from agentrl.workflow.trajectory import UNFINISHED, ToolCall

START, END = "<|python_start|>", "<|python_end|>"
_MARK = re.compile(r"<\|(?:python|tool_call)_start\|>")
_OPENS = re.compile(r"(?:<\|(?:python|tool_call)_start\|>)?\s*+\[")
_ENDS = re.compile(r"(?:\s*+<\|(?:python|tool_call)_end\|>)?")
_TOKEN = re.compile(
    r"""\s*+(?:(?P<text>\"{3}(?:[^"\\]|\\.|"[^"\\]|"\\.|""[^"\\]|""\\.)*+\"{3}
    |'{3}(?:[^'\\]|\\.|'[^'\\]|'\\.|''[^'\\]|''\\.)*+'{3}
    |"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+')
    |(?P<number>[-+]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][-+]?[0-9]++)?)
    |(?P<name>[A-Za-z_][A-Za-z0-9_./-]*+)|(?P<sign>\*\*|[][(){},:=]))""",
    re.DOTALL | re.VERBOSE,
)
_QUOTED = re.compile(r"\s*+[\"']")
_ESCAPE = re.compile(r"\\(?:(\n)|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([\\'\"abfnrtv0]))")
_ESCAPE_VALUES = dict(zip("\\'\"abfnrtv0", "\\'\"\a\b\f\n\r\t\v\0", strict=True))
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HOW = "calls are a list, [name(arg=1), ...]"


class _Reader:
    """A reader of tokens, one after another; `at` is the end of the last one."""

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at
        self.next: re.Match[str] | None = None
        self.advance()

    def advance(self) -> None:
        """Goes on to the next token."""
        self.at = self.next.end() if self.next else self.at
        self.next = _TOKEN.match(self.text, self.at)

    def sign(self) -> str:
        """The next token if it is a sign, else ""."""
        return (self.next["sign"] or "") if self.next else ""

    def take(self, sign: str) -> bool:
        """Skips that sign if it is next; whether it was."""
        if self.sign() != sign:
            return False
        self.advance()
        return True

    def need(self, sign: str) -> None:
        """Reads that sign, which must be next."""
        if not self.take(sign):
            raise self.wrong()

    def name(self) -> str:
        """Reads a name, which must be next."""
        found = self.next["name"] if self.next else None
        if not found:
            raise self.wrong()
        self.advance()
        return found

    def wrong(self, why: str = "") -> Unreadable:
        """The error for the next token."""
        if self.next is None and (_QUOTED.match(self.text, self.at) or nothing_after(self.text, self.at)):
            return Unreadable(UNFINISHED, len(self.text))
        near = self.text[self.at : self.at + 20]
        return Unreadable(why or f"{_HOW}; it cannot be read from {near!r} on", self.next.end() if self.next else self.at)

    def value(self, depth: int) -> Any:
        """Reads a literal."""
        if depth > MAX_NESTING:
            raise self.wrong(f"a call may nest {MAX_NESTING} objects and arrays within each other, not more")
        for opens, closes in ("[]", "()"):
            if self.take(opens):
                return self._items(closes, depth + 1)
        return self._pairs(depth + 1) if self.take("{") else self._plain()

    def _items(self, closes: str, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self.take(closes):
            found.append(self.value(depth))
            if not self.take(","):
                self.need(closes)
                break
        return found

    def _pairs(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self.take("}"):
            key = self.value(depth)
            if not isinstance(key, str):
                raise self.wrong("the keys of a dict must be texts")
            self.need(":")
            if key in found:
                raise self.wrong(duplicate_key_message(key))
            found[key] = self.value(depth)
            if not self.take(","):
                self.need("}")
                break
        return found

    def _plain(self) -> Any:
        token = self.next
        if token is None or token["sign"]:
            raise self.wrong()
        try:
            value = _literal(token)
        except (ValueError, KeyError) as error:
            raise self.wrong("" if isinstance(error, KeyError) else str(error)) from error
        self.advance()
        return value


def _literal(token: re.Match[str]) -> Any:
    if token["number"]:
        digits = token["number"].lstrip("+-")
        size = parse_digits(digits) if digits.isdecimal() else float(digits)
        return -size if token["number"].startswith("-") else size
    if token["name"]:
        return _WORDS[token["name"]]
    quotes = 3 if token["text"].startswith(('"""', "'''")) else 1
    return _ESCAPE.sub(_unescape, token["text"][quotes:-quotes])


def _unescape(escape: re.Match[str]) -> str:
    if escape[1]:
        return ""
    digits = escape[2] or escape[3] or escape[4]
    return chr(int(digits, 16)) if digits else _ESCAPE_VALUES[escape[5]]


def _read(text: str, at: int, tools: Sequence[Schema]) -> tuple[tuple[ToolCall, ...], int]:
    opens = _OPENS.match(text, at)
    if opens is None:
        marked = _MARK.match(text, at)
        reader = _Reader(text, marked.end() if marked else at)
        raise reader.wrong()
    reader = _Reader(text, opens.end())
    calls: list[ToolCall] = []
    while not calls or not reader.take("]"):
        calls.append(_call(reader))
        if not reader.take(","):
            reader.need("]")
            break
    ends = _ENDS.match(text, reader.at)
    end = ends.end() if ends else reader.at
    if end - at > MAX_CHARACTERS:
        raise Unreadable(TOO_LONG, end)
    return tuple(calls), end


def _call(reader: _Reader) -> ToolCall:
    name = reader.name()
    reader.need("(")
    arguments: dict[str, Any] = {}
    while not reader.take(")"):
        more = reader.value(1) if reader.take("**") else _keyword(reader)
        if not isinstance(more, dict):
            raise reader.wrong("after ** stands a dict")
        for key in more.keys() & arguments.keys():
            raise reader.wrong(duplicate_key_message(key))
        arguments |= more
        if not reader.take(","):
            reader.need(")")
            break
    try:
        why = why_unfit(arguments)
    except ValueError as error:
        raise reader.wrong(str(error)) from error
    if why:
        raise reader.wrong(why)
    return make_call(name, arguments, reader.at)


def _keyword(reader: _Reader) -> dict[str, Any]:
    name = reader.name()
    if not _IDENTIFIER.fullmatch(name):
        raise reader.wrong()
    reader.need("=")
    return {name: reader.value(2)}


def _write(content: str, calls: Sequence[ToolCall], tools: Sequence[Schema]) -> str:
    said = f"[{', '.join(f'{call.name}({_arguments(call)})' for call in calls)}]"
    return f"{content}{START}{said}{END}" if content else said


def _arguments(call: ToolCall) -> str:
    named = {key: value for key, value in call.arguments.items() if _IDENTIFIER.fullmatch(key)}
    others = {key: value for key, value in call.arguments.items() if key not in named}
    words = [f"{key}={_spell_value(value)}" for key, value in named.items()]
    return ", ".join([*words, f"**{_spell_value(others)}"] if others else words)


def _spell_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{spell_json(key)}: {_spell_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_spell_value, value))}]"
    return str(value) if value is None or isinstance(value, bool) else spell_json(value)


pythonic = ToolFormat(
    name="pythonic",
    begins=re.compile(r"<\|(?:python|tool_call)_start\|>|\A[\s\x1c-\x1f]*+(?=\[\s*+[A-Za-z_][A-Za-z0-9_./-]*+\s*+\()"),
    certain=re.compile(r"<\|(?:python|tool_call)_start\|>\s*+\["),
    read=_read,
    write=_write,
    marks=(START,),
)
