"""pythonic: a turn that is a list of calls in Python, `[name(arg=1), other(text="...")]`. For Llama 3.2, 4, LFM2, ToolACE.

Values are literals: text in any of Python's quotes, which may contain raw line breaks; numbers, True, False, None (also true,
false, null), lists, tuples and dicts. `**{"any key": 1}` passes keys that are not identifiers. No code is evaluated. A list
between `<|python_start|>` and `<|python_end|>` (LFM2: `<|tool_call_start|>`, `<|tool_call_end|>`) may be anywhere in the turn.

`olmo3`, `gemma`, `lfm2` and `function_gemma` use `CallReader` too.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from agentrl.workflow.call_json import (
    MAX_CHARACTERS,
    MAX_NESTING,
    TOO_LONG,
    Unreadable,
    describe_json_error,
    dump_json,
    duplicate_key_message,
    make_call,
    parse_digits,
)
from agentrl.workflow.tool_formats import Schema, ToolFormat
from agentrl.workflow.trajectory import UNFINISHED, ToolCall

START, END = "<|python_start|>", "<|python_end|>"
_MARK = re.compile(r"<\|(?:python|tool_call)_start\|>")
_OPENS = re.compile(r"(?:<\|(?:python|tool_call)_start\|>)?\s*+\[")
_ENDS = re.compile(r"(?:\s*+<\|(?:python|tool_call)_end\|>)?")
_TOKENS = r"""\s*+(?:(?P<text>MARKED\"{3}(?:[^"\\]|\\.|"[^"\\]|"\\.|""[^"\\]|""\\.)*+\"{3}
    |'{3}(?:[^'\\]|\\.|'[^'\\]|'\\.|''[^'\\]|''\\.)*+'{3}
    |"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+')
    |(?P<number>[-+]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][-+]?[0-9]++)?)
    |(?P<name>[A-Za-z_][A-Za-z0-9_./-]*+)|(?P<sign>\*\*|[][(){},:=]))"""
_SPACE = re.compile(r"\s*+")
_ESCAPE = re.compile(r"\\(?:(\n)|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([\\'\"abfnrtv0]))")
_ESCAPE_VALUES = dict(zip("\\'\"abfnrtv0", "\\'\"\a\b\f\n\r\t\v\0", strict=True))
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PRINTED = re.compile(r"\s*+print\(\s*+[A-Za-z_][A-Za-z0-9_./-]*+\(")
_HOW = "calls are a list, [name(arg=1), ...]"


@cache
def _token(quote: str) -> re.Pattern[str]:
    """Return the pattern of a token. If `quote` is not empty, it is another mark that may enclose a text."""
    marked = f"{re.escape(quote)}(?P<plain>.*?){re.escape(quote)}|" if quote else "(?P<plain>(?!))|"
    return re.compile(_TOKENS.replace("MARKED", marked), re.DOTALL | re.VERBOSE)


class CallReader:
    """A parser that reads calls token by token. `at` is the index at which the last token ends. `how` is the error message for
    the model about text that is not a call. `quote` is the mark before and after a text. If it is set, keys need no quotes.
    """

    def __init__(self, text: str, at: int, how: str = _HOW, quote: str = "") -> None:
        self.text = text
        self.at = at
        self.how = how
        self.quote = quote
        self.next: re.Match[str] | None = None
        self.advance()

    def advance(self) -> None:
        """Move to the next token."""
        self.at = self.next.end() if self.next else self.at
        self.next = _token(self.quote).match(self.text, self.at)

    def sign(self) -> str:
        """Return the next token if it is a sign, else an empty text."""
        return (self.next["sign"] or "") if self.next else ""

    def take(self, sign: str) -> bool:
        """If the next token is the sign, skip it and return True."""
        if self.sign() != sign:
            return False
        self.advance()
        return True

    def need(self, sign: str) -> None:
        """Skip the sign. Raise an exception if the next token is not the sign."""
        if not self.take(sign):
            raise self.wrong()

    def name(self) -> str:
        """Read a name. Raise an exception if the next token is not a name."""
        name = self.next["name"] if self.next else None
        if not name:
            raise self.wrong()
        self.advance()
        return name

    def wrong(self, why: str = "") -> Unreadable:
        """Return the error for the next token, which is not valid at this place."""
        if self.next is None and self._breaks_off():
            return Unreadable(UNFINISHED, len(self.text))
        near = self.text[self.at : self.at + 20]
        return Unreadable(why or f"{self.how}; it cannot be read from {near!r} on", self.next.end() if self.next else self.at)

    def _breaks_off(self) -> bool:
        """Return True if the text ends within the next token."""
        space = _SPACE.match(self.text, self.at)
        at = space.end() if space else self.at
        marked = bool(self.quote) and self.quote.startswith(self.text[at : at + len(self.quote)])
        return marked or at == len(self.text) or self.text[at] in "\"'"

    def call(self) -> ToolCall:
        name = self.name()
        self.need("(")
        arguments: dict[str, Any] = {}
        while not self.take(")"):
            more = self.value(1) if self.take("**") else self._keyword()
            if not isinstance(more, dict):
                raise self.wrong("after ** there must be a dict")
            for key in more.keys() & arguments.keys():
                raise self.wrong(duplicate_key_message(key))
            arguments |= more
            if not self.take(","):
                self.need(")")
                break
        return self.checked(name, arguments)

    def braced_call(self) -> ToolCall:
        """Read `call:NAME{...}`."""
        if self.name() != "call":
            raise self.wrong()
        self.need(":")
        name = self.name()
        self.need("{")
        return self.checked(name, self._pairs(2))

    def printed_call(self) -> ToolCall:
        """Read a call, which may be inside of `print(...)`."""
        if _PRINTED.match(self.text, self.at) is None:
            return self.call()
        for _ in range(2):
            self.advance()
        call = self.call()
        self.need(")")
        return call

    def checked(self, name: str, arguments: dict[str, Any]) -> ToolCall:
        """Check that the arguments are within the limits, and return the call, whose text ends at `at`."""
        try:
            why = describe_json_error(arguments)
        except ValueError as error:
            raise self.wrong(str(error)) from error
        if why:
            raise self.wrong(why)
        return make_call(name, arguments, self.at)

    def _keyword(self) -> dict[str, Any]:
        name = self.name()
        if not _IDENTIFIER.fullmatch(name):
            raise self.wrong()
        self.need("=")
        return {name: self.value(2)}

    def value(self, depth: int) -> Any:
        if depth > MAX_NESTING:
            raise self.wrong(f"a call may nest {MAX_NESTING} objects and arrays within each other, not more")
        for opens, closes in ("[]", "()"):
            if self.take(opens):
                return self._items(closes, depth + 1)
        return self._pairs(depth + 1) if self.take("{") else self._plain()

    def _items(self, closes: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self.take(closes):
            items.append(self.value(depth))
            if not self.take(","):
                self.need(closes)
                break
        return items

    def _pairs(self, depth: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        while not self.take("}"):
            key = self.name() if self.quote and self.next and self.next["name"] else self.value(depth)
            if not isinstance(key, str):
                raise self.wrong("the keys of a dict must be texts")
            self.need(":")
            if key in entries:
                raise self.wrong(duplicate_key_message(key))
            entries[key] = self.value(depth)
            if not self.take(","):
                self.need("}")
                break
        return entries

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
    if token["plain"] is not None:
        return token["plain"]
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
        raise CallReader(text, marked.end() if marked else at).wrong()
    calls, end = read_list(text, opens.end() - 1)
    ends = _ENDS.match(text, end)
    return check_length(calls, at, ends.end() if ends else end)


def read_list(text: str, at: int) -> tuple[tuple[ToolCall, ...], int]:
    """Parse the list that begins at index `at`. Return its calls and the index at which it ends. Raise Unreadable if one of the
    calls cannot be parsed. No call is returned then.
    """
    reader = CallReader(text, at + 1)
    calls: list[ToolCall] = []
    while not calls or not reader.take("]"):
        calls.append(reader.call())
        if not reader.take(","):
            reader.need("]")
            break
    return tuple(calls), reader.at


def check_length(calls: tuple[ToolCall, ...], at: int, end: int) -> tuple[tuple[ToolCall, ...], int]:
    """Return the calls and the index at which their text ends. Raise Unreadable if the text is longer than a call may be."""
    if end - at > MAX_CHARACTERS:
        raise Unreadable(TOO_LONG, end)
    return calls, end


def _write(content: str, calls: Sequence[ToolCall], tools: Sequence[Schema]) -> str:
    text = spell_list(calls)
    return f"{content}{START}{text}{END}" if content else text


def spell_list(calls: Sequence[ToolCall]) -> str:
    """Return the calls as a Python list."""
    return f"[{', '.join(map(spell_call, calls))}]"


def spell_call(call: ToolCall) -> str:
    """Return the call as Python source."""
    return f"{call.name}({_arguments(call)})"


def _arguments(call: ToolCall) -> str:
    keywords = {key: value for key, value in call.arguments.items() if _IDENTIFIER.fullmatch(key)}
    others = {key: value for key, value in call.arguments.items() if key not in keywords}
    parts = [f"{key}={_spell_value(value)}" for key, value in keywords.items()]
    return ", ".join([*parts, f"**{_spell_value(others)}"] if others else parts)


def _spell_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{dump_json(key)}: {_spell_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_spell_value, value))}]"
    return str(value) if value is None or isinstance(value, bool) else dump_json(value)


pythonic = ToolFormat(
    name="pythonic",
    begins=re.compile(r"<\|(?:python|tool_call)_start\|>|\A[\s\x1c-\x1f]*+(?=\[\s*+[A-Za-z_][A-Za-z0-9_./-]*+\s*+\()"),
    certain=re.compile(r"<\|(?:python|tool_call)_start\|>\s*+\["),
    read=_read,
    write=_write,
    marks=(START,),
)
