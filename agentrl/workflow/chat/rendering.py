"""The conversion of messages to token ids and back with the tokenizer's own chat template.

Sampled text is never tokenized again. An episode is one growing sequence of tokens. `opening` renders everything before the
first sampled turn, and `continuation` the part between two sampled turns (tool results, a user's message). `parse` parses a
sampled turn (see `chat.parsing`).

The caller passes the tokenizer, so this module needs neither torch nor transformers.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from agentrl.workflow.chat.grammar import GrammarCompiler
from agentrl.workflow.chat.parsing import THINK, parse_text
from agentrl.workflow.chat.stop_strings import Spelling, Stops, cut_at_stop
from agentrl.workflow.chat.template_options import check_options
from agentrl.workflow.chat.template_probe import FAULTS, Manner, find_trouble, manner_of
from agentrl.workflow.chat.template_process import render_template
from agentrl.workflow.chat.templates import template_error
from agentrl.workflow.errors import ModelError, RefusedMessages
from agentrl.workflow.tool_formats import AUTO, Schema
from agentrl.workflow.trajectory import RAW_ROLES, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LAST_TOKENS = 16
"""The number of tokens at the end of a prompt in which an open tag is looked for. White space may follow the tag."""

KEPT = 256
"""The most values in each cache: of rendered prefixes, and of matchers of stop strings.

Clients may send any number of tools and strings.
"""

KEPT_RESTS = 64
"""The most rendered continuations in their cache. Many episodes of a group read the same results of tools."""

MAX_KEPT_CHARS = 16_384
"""The most characters of messages whose continuation is cached, so that the cache needs little memory."""

UNCHECKED = 4
"""The number of characters, as a multiple of `max_tokens`, up to which the length of a text is not checked."""

EXCESS = 2
"""The number of tokens, as a multiple of `max_tokens`, above which a text is certainly too long.

The pieces are tokenized separately, so the counted number may be somewhat too high.
"""

PIECE = 65_536
"""The number of characters that are tokenized at once to check the length of a text."""

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_PROBE_QUESTION = Message("user", "zqquestion")
# It has a thought, so that the prefix check catches a template that drops old thoughts.
_PROBE_ANSWER = Message("assistant", "zqanswer", thought="zqthought")
_PROBE_RESULT = Message("tool", "zqresult", name="zqtool")
_PROBE_WORDS = (_PROBE_QUESTION.content, _PROBE_ANSWER.content, _PROBE_ANSWER.thought)


class TooLong(ModelError):
    """The messages certainly have more tokens than fit into the window."""


class _ProbeAnswer(NamedTuple):
    """The assistant's answer in a rendered conversation of the probe."""

    ids: tuple[int, ...]
    end: int | None


class Chat:
    """A chat template and its tokenizer.

    If a template asks for the time, it always gets the same one, in UTC: the time when the `Chat` was made, or the time that
    was passed to `at`.

    Args:
        tokenizer: a tokenizer with a chat template in which a special token follows each of the assistant's turns.
        tool_format: a name in `tool_formats`; AUTO: the template's own format.
        stop_ids: further ids that end a turn, such as those of the model's `generation_config.json`.
        strict_calls: whether calls are parsed only in the tool format (see `chat.parsing`).

    Attributes:
        manner: the form in which the template takes messages.
        end_ids: the ids that end a turn: the template's end-of-turn token or, if it has none, the tokens that open the next
            role's turn; the tokenizer's end of sequence; the end tokens of the tool format; `stop_ids`.

    Raises:
        ModelError: the tokenizer has no chat template, or its turns end without a special token.
        ConfigError: the tool format does not exist.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        tool_format: str = AUTO,
        stop_ids: Iterable[int] = (),
        strict_calls: bool = False,
    ) -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                f"The tokenizer of {tokenizer.name_or_path!r} has no chat template.", "Pass an instruct model, or --model tiny."
            )
        self.tokenizer = tokenizer
        self.strict_calls = strict_calls
        self._clock = datetime.now(UTC)
        self._prefixes: OrderedDict[bytes, _ProbeAnswer] = OrderedDict()
        self._rests: OrderedDict[Hashable, tuple[tuple[int, ...] | None, str]] = OrderedDict()
        self._stops: OrderedDict[tuple[str, ...], Stops] = OrderedDict()
        source = json.dumps(tokenizer.chat_template, ensure_ascii=False)  # the marks of DeepSeek are not ASCII
        self.manner: Manner = manner_of(self._apply, source, tool_format)
        # Found now: the first use is in the sampler's thread, too late to refuse a model.
        self._ends = self._ends_by_next_role()
        self.end_ids = frozenset(
            {*self._ends.values(), *self._end_of_sequence(), *self._ends_of_calls(), *self._in_vocabulary(stop_ids)}
        )

    def at(self, clock: datetime) -> "Chat":
        """Return a copy of the chat in which `clock` is the current time for the template. It shares this chat's caches."""
        view = copy(self)
        view._clock = clock.astimezone(UTC)
        view.__dict__.pop("_turn_prompt", None)
        return view

    def opening(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] = (),
        options: Mapping[str, Any] = NO_OPTIONS,
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of an episode's first prompt, including the generation prompt. `options` are additional
        variables of the template (`template_options`). `max_tokens` is the length above which the caller cannot use a prompt.

        Raises:
            ModelError: the template refuses the messages or the options, drops a system message, or does not support the
                options.
            TooLong: the prompt has many more than `max_tokens` tokens.
        """
        if messages and messages[0].role in RAW_ROLES:
            return self._raw_ids(messages, max_tokens)
        return self._encode(self._render(messages, tools, generate=True, options=options), max_tokens)

    def continuation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] = (),
        turn: Sequence[int] | None = None,
        options: Mapping[str, Any] = NO_OPTIONS,
        max_tokens: int | None = None,
    ) -> tuple[tuple[int, ...] | None, str]:
        """Return the ids that follow a sampled turn up to the next generation prompt.

        If the turn lacks its end token (see `has_end_token`), the returned ids begin with that token.

        Args:
            messages: the new messages: tool results or a user's message.
            tools: the tools, the same as in the opening.
            turn: the sampled ids; None: a turn that has the end token which the template writes.
            options, max_tokens: the same as in the opening.

        Returns:
            (ids, ""), or (None, the reason) if no ids continue the turn exactly as the template renders it. The caller then
                begins a new training row: it calls `opening` with all messages.

        Raises:
            ModelError, TooLong: see `opening`.
        """
        if messages and messages[0].role in RAW_ROLES:
            return self._raw_ids(messages, max_tokens), ""
        text, render = repr(messages), partial(self._render_rest, messages, tools, options, max_tokens)
        key = (self._key(tools, options), text, max_tokens)
        rest, reason = render() if len(text) > MAX_KEPT_CHARS else _kept(self._rests, key, render, KEPT_RESTS)
        if rest is None:
            return None, reason
        if turn is None or not self.has_end_token(turn):
            return rest[turn is None :], ""
        ended_by = list(takewhile(self.end_ids.__contains__, rest))  # some templates write two end tokens
        if turn[-1] in ended_by:
            return rest[ended_by.index(turn[-1]) + 1 :], ""
        # The template ends turns with the next role's token, and this turn has another one.
        if rest[0] != self._prefix(tools, options).end:
            ended, follows = self.decode(turn[-1:]), self.decode(rest[:1])
            return None, f"the turn ended with {ended}, and the template continues with {follows}"
        return rest[1:], ""

    def _render_rest(
        self, messages: Sequence[Message], tools: Sequence[Schema], options: Mapping[str, Any], max_tokens: int | None
    ) -> tuple[tuple[int, ...] | None, str]:
        """Return the ids from the end token of the turn before the messages to the next generation prompt. If the template
        does not continue the turn exactly, return None and the reason. For the errors see `opening`.
        """
        before = self._prefix(tools, options)
        conversation = [_PROBE_QUESTION, _PROBE_ANSWER, *messages]
        whole = self._encode(self._render(conversation, tools, generate=True, options=options), max_tokens)
        rest = whole[len(before.ids) :]
        if whole[: len(before.ids)] != before.ids or not rest or rest[0] not in self._closing:
            return None, self._why_not(messages, tools, options)
        if self._shows_probe(rest, messages):
            return None, f"the template repeats earlier turns after a {messages[0].role} message"
        return rest, ""

    def _raw_ids(self, messages: Sequence[Message], max_tokens: int | None) -> tuple[int, ...]:
        """Return the ids of a prompt that a client wrote itself (`RAW_ROLES`). Special tokens in its text stay special.

        Raises:
            ModelError: an id is not in the vocabulary.
            TooLong: see `opening`.
        """
        (message,) = messages
        if message.role == "prompt":
            return self._encode(message.content, max_tokens)
        if max_tokens is not None and message.content.count(",") >= max_tokens:
            raise TooLong(f"The messages have more than {max_tokens} tokens.")
        ids, size = tuple(json.loads(message.content)), len(self.tokenizer)
        if not all(0 <= token < size for token in ids):
            raise ModelError(f"The prompt has an id that is not in the vocabulary of {size} tokens.")
        return ids

    def _shows_probe(self, ids: Sequence[int], messages: Sequence[Message]) -> bool:
        """Return True if the ids contain words of the probe that are not in the messages."""
        text = self.decode(ids)
        return any(word in text and not any(word in message.content for message in messages) for word in _PROBE_WORDS)

    def _why_not(self, messages: Sequence[Message], tools: Sequence[Schema], options: Mapping[str, Any]) -> str:
        """Return why these messages cannot follow a turn: the template drops its thought or rewrites it."""
        role, thoughtless = messages[0].role, [_PROBE_QUESTION, replace(_PROBE_ANSWER, thought="")]
        before = self._find_answer(self._encode(self._render(thoughtless, tools, generate=False, options=options))).ids
        whole = self._encode(self._render([*thoughtless, *messages], tools, generate=True, options=options))
        if whole[: len(before)] == before and set(whole[len(before) :][:1]) <= self._closing:
            return f"dropped thinking: the template leaves earlier thoughts out before a {role} message"
        return f"the template rewrites earlier turns before a {role} message"

    def check(self, system: bool, tools: bool) -> None:
        """Refuse a template that cannot be used for training.

        `templates.check_template` does the same without a loaded tokenizer. Raise ModelError if the template drops parts of
        messages, cannot be continued token for token, or cannot be rendered.
        """
        if trouble := find_trouble(self._apply, self.manner, system, tools):
            raise template_error(self.tokenizer.name_or_path, trouble)

    def has_end_token(self, sampled_ids: Sequence[int]) -> bool:
        """Return True if a sampled turn ends with an end token. A turn that a stop string ended does not."""
        return bool(sampled_ids) and sampled_ids[-1] in self.end_ids

    def stops(self, strings: tuple[str, ...]) -> Stops:
        """Return the cached matcher of these stop strings. Raise ModelError if the bytes of tokens are unknown."""
        return _kept(self._stops, strings, lambda: Stops(self._spelling, strings), KEPT)

    def turn(self, message: Message, tools: Sequence[Schema] = ()) -> tuple[int, ...]:
        """Return the tokens of an assistant's message as the policy would have sampled it, including the end-of-turn token.

        This is for demonstrations. Some templates write calls that do not parse back to the same calls: they drop the text next
        to a call, or a text in a call closes its tag. For such a message, the tool format writes the calls instead. Raise
        ModelError if the template does not write the turn directly after its generation prompt.
        """
        text = self._turn_text(message, tools, self.manner)
        if message.tool_calls and not self._reads_back(text, message, tools):
            text = self._turn_text(message, tools, replace(self.manner, native=False))
        return self._close_turn(self._encode(text), message)

    def _close_turn(self, ids: tuple[int, ...], message: Message) -> tuple[int, ...]:
        """Make the ids end with exactly one end token: cut after the first of several, or append one."""
        place, first = len(ids), None
        while place and (ids[place - 1] in self.end_ids or self.decode(ids[place - 1 : place]).isspace()):
            place -= 1
            first = place if ids[place] in self.end_ids else first
        if first is not None:
            return ids[: first + 1]
        follows = "tool" if message.tool_calls else "user"
        return (*ids, self._ends.get(follows, next(iter(self._ends.values()))))

    def _turn_text(self, message: Message, tools: Sequence[Schema], manner: Manner) -> str:
        prompt = self._turn_prompt
        whole = self._render(
            [_PROBE_QUESTION, message], (), generate=False, turns=[*manner.plain([_PROBE_QUESTION, message], tools)]
        )
        if not whole.startswith(prompt):
            raise ModelError(
                "This chat template cannot render demonstrations: assistant messages do not begin with its generation prompt."
            )
        return whole[len(prompt) :]

    def _reads_back(self, text: str, message: Message, tools: Sequence[Schema]) -> bool:
        turn = parse_text(text, self.manner.tool_format, tools)
        calls = tuple(call for call in message.tool_calls if call.error is None)
        return turn.tool_calls == calls and message.content.strip() in turn.content

    def parse(
        self,
        sampled_ids: Sequence[int],
        tools: Sequence[Schema] = (),
        thinking: bool | None = None,
        stop: Sequence[str] = (),
        offered_only: bool = False,
    ) -> Message:
        """Return the message that the sampled ids contain. This works for any ids, without an exception.

        Args:
            tools: the offered tools; some formats need their schemas to determine the types of arguments.
            thinking: whether the prompt ended inside a thought (`leaves_thought_open`); None: the ids decide (see
                `parse_text`).
            stop: stop strings. The message is cut before the first stop string; the ids still contain it.
            offered_only: whether only calls of `tools` are calls. The text of any other call then stays in the content.
        """
        ids = list(sampled_ids)
        while ids and ids[-1] in self.end_ids:
            ids.pop()
        text = cut_at_stop(self.decode(ids), stop)
        return parse_text(text, self.manner.tool_format, tools, thinking, offered_only, self.strict_calls)

    def leaves_thought_open(self, prompt_ids: Sequence[int]) -> bool:
        """Return True if a prompt ends inside a thought, which the sampled turn continues."""
        return self.decode(prompt_ids[-LAST_TOKENS:]).rstrip().endswith(THINK)

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token; None if they are unknown for this tokenizer."""
        try:
            return self._spelling[token]
        except ModelError:
            return None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def _turn_prompt(self) -> str:
        return self._render([_PROBE_QUESTION], (), generate=True)

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self.tokenizer)

    @cached_property
    def template_hash(self) -> str:
        """The sha256 of the chat template."""
        return hashlib.sha256(json.dumps(self.tokenizer.chat_template, sort_keys=True).encode()).hexdigest()

    @cached_property
    def tokenizer_hash(self) -> str:
        """The sha256 of the vocabulary and of the tokens of a test text. That text has characters of every kind."""
        probe = self._encode("Ünï 12345.6 == \tfoo_bar(  )\n\n<tool_call>{\"a\": [1, 'b']}</tool_call> 漢字 🙂")
        text = json.dumps([self.tokenizer.get_vocab(), probe], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _end_of_sequence(self) -> tuple[int, ...]:
        eos = self.tokenizer.eos_token_id
        return () if eos is None else (int(eos),)

    def _ends_of_calls(self) -> tuple[int, ...]:
        return tuple(self._special[token] for token in self.manner.tool_format.ends if token in self._special)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """The compiler of the grammars that limit turns. Raise ImportError without the package llguidance."""
        return GrammarCompiler(self)

    @cached_property
    def _special(self) -> dict[str, int]:
        return {token.content: i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    def _in_vocabulary(self, ids: Iterable[int]) -> Iterable[int]:
        return (token for token in ids if 0 <= token < len(self.tokenizer))

    @cached_property
    def _closing(self) -> frozenset[int]:
        """The special tokens that may follow a turn. They are broken up in text of other roles."""
        return frozenset({*self._special.values(), *self._end_of_sequence()})

    def _ends_by_next_role(self) -> dict[str, int]:
        """Return the token that ends a turn, by the role of the next turn; the role "" means that no turn follows.

        Templates without an end-of-turn token, such as GLM's, end a turn with the token that opens the next role's turn. Models
        sample this token, and list it in their `generation_config.json`. Raise ModelError if no special token follows a turn.
        """
        ends: dict[str, int] = {}
        for following in ((), (_PROBE_QUESTION,), (_PROBE_RESULT,)):
            if "" in ends:  # a template with an end-of-turn token may write another one inside of turns and before the next
                break
            try:
                conversation = [_PROBE_QUESTION, replace(_PROBE_ANSWER, thought=""), *following]
                end = self._find_answer(self._encode(self._render(conversation, (), generate=bool(following)))).end
            except ModelError:
                if not following:
                    raise
                continue  # the template has no such role
            if end is not None:
                ends["".join(message.role for message in following)] = end
        if not ends:
            raise ModelError("The chat template ends a turn without a special token.", "Pass an instruct model.")
        return ends

    def _prefix(self, tools: Sequence[Schema], options: Mapping[str, Any] = NO_OPTIONS) -> _ProbeAnswer:
        def make() -> _ProbeAnswer:
            conversation = [_PROBE_QUESTION, _PROBE_ANSWER]
            return self._find_answer(self._encode(self._render(conversation, tools, generate=False, options=options)))

        return _kept(self._prefixes, self._key(tools, options), make, KEPT)

    def _key(self, tools: Sequence[Schema], options: Mapping[str, Any]) -> bytes:
        # Keys are not sorted: a template may write tools and options in the order in which they come.
        text = f"{self._clock.isoformat()}\n{json.dumps(list(tools))}\n{check_options(options)}"
        return hashlib.sha256(text.encode()).digest()

    def _find_answer(self, ids: tuple[int, ...]) -> _ProbeAnswer:
        """Find the answer of the probe: the last text between special tokens that contains the words of the answer."""
        stop = len(ids)
        while stop >= 0:
            start = next((place for place in range(stop, 0, -1) if ids[place - 1] in self._closing), 0)
            _, answer, after = self.decode(ids[start:stop]).rpartition(_PROBE_ANSWER.content)
            if answer:
                ends = stop < len(ids) and not after.strip()
                return _ProbeAnswer(ids[:stop], ids[stop] if ends else None)
            stop = start - 1
        raise ModelError("The chat template drops the assistant's messages.", "Pass an instruct model.")

    def _encode(self, text: str, max_tokens: int | None = None) -> tuple[int, ...]:
        if max_tokens is not None:
            check_length(self._encode, text, max_tokens)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema],
        generate: bool,
        turns: Sequence[dict[str, Any]] | None = None,
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> str:
        if turns is None:
            turns = self._harmless_turns(messages, tools)
        check_options(options)
        try:
            text = self._apply_harmless(turns, tools, generate, options)
        except FAULTS as error:
            what = f"messages and options ({', '.join(options)})" if options else "messages"
            raise RefusedMessages(f"The chat template refuses these {what}: {str(error)[:1000]}.") from error
        if any(message.role == "system" and self._defuse(message.content).strip() not in text for message in messages):
            self._check_system_messages(messages, tools, generate, options)
        return text

    def _check_system_messages(
        self, messages: Sequence[Message], tools: Sequence[Schema], generate: bool, options: Mapping[str, Any]
    ) -> None:
        """Refuse a template that drops a system message."""
        marks = {number: f"zqsystem{number}zq" for number, message in enumerate(messages) if message.role == "system"}
        marked = [replace(message, content=marks.get(number, message.content)) for number, message in enumerate(messages)]
        text = self._apply_harmless(self._harmless_turns(marked, tools), tools, generate, options)
        if not all(mark in text for mark in marks.values()):
            raise ModelError(
                "The chat template drops a system message.",
                "Use one system message, before all others, or another template: --chat-template FILE",
            )

    def _harmless_turns(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[dict[str, Any]]:
        """Return the messages in the template's form. Special tokens are broken up, except in the assistant's content."""
        return [*self.manner.plain([self._harmless(message) for message in messages], tools)]

    def _apply_harmless(
        self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Schema], generate: bool, options: Mapping[str, Any]
    ) -> str:
        return self._apply(turns, [self._defuse_all(tool) for tool in tools], generate, self._defuse_all(options))

    def _apply(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Schema],
        generate: bool,
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> str:
        offered = [dict(tool) for tool in tools]
        source = self.tokenizer.get_chat_template(tools=offered or None)
        variables = {**self.tokenizer.special_tokens_map, **options}
        return render_template(source, turns, offered, generate, variables, self._clock)

    def _harmless(self, message: Message) -> Message:
        """Return the message with all special tokens broken up. Only the assistant's content is unchanged."""
        calls = [
            replace(call, name=self._defuse(call.name), arguments=self._defuse_all(call.arguments))
            for call in message.tool_calls
        ]
        content = message.content if message.role == "assistant" else self._defuse(message.content)
        return replace(message, content=content, name=self._defuse(message.name), tool_calls=tuple(calls))

    def _defuse(self, text: str) -> str:
        """Break up special tokens in a text. Otherwise the text could end its turn and open another one."""
        for token in self._special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _defuse_all(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._defuse(value)
        if isinstance(value, Mapping):
            return {self._defuse(name): self._defuse_all(item) for name, item in value.items()}
        return [self._defuse_all(item) for item in value] if isinstance(value, list | tuple) else value


def _kept(cache: OrderedDict[Key, Value], key: Key, make: Callable[[], Value], size: int) -> Value:
    value = cache.get(key)
    if value is None:
        value = cache[key] = make()
    with suppress(KeyError):  # another thread dropped it
        cache.move_to_end(key)
        while len(cache) > size:
            cache.popitem(last=False)
    return value


def check_length(encode: Callable[[str], Sequence[int]], text: str, max_tokens: int) -> None:
    """Refuse a text with many more than `max_tokens` tokens. A short text is accepted without tokenizing it.

    A longer text is tokenized in pieces, until it is certainly too long or its end is reached. Raise TooLong if the text has
    more than `EXCESS * max_tokens` tokens.
    """
    if len(text) <= UNCHECKED * max_tokens:
        return
    count = 0
    for start in range(0, len(text), PIECE):
        count += len(encode(text[start : start + PIECE]))
        if count > EXCESS * max_tokens:
            raise TooLong(f"The messages have more than {max_tokens} tokens.")
