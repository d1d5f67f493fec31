"""Messages to token ids and back, through the tokenizer's own chat template; what the policy sampled is never re-tokenised.

An episode is one growing row of tokens. `opening` renders what comes before the first sampled turn, `continuation` what the
template puts between a sampled turn and the next one (tool results, a user's words), and `parse` reads a sampled turn (see
`workflow.turns`).

The tokenizer comes from outside, so this file needs neither torch nor transformers.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from workflow.errors import ModelError
from workflow.stops import Spelling, Stops
from workflow.trajectory import Message
from workflow.turns import END_THINK, THINK, parse_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Schema = Mapping[str, Any]
"""A tool as chat templates take it: `{"type": "function", "function": {...}}`."""

_ASKED = Message("user", "x")
# With a thought, so that a template which drops old thoughts is caught by the prefix check.
_ANSWERED = Message("assistant", "y", thought="t")


class Chat:
    """A chat template and its tokenizer.

    Args:
        tokenizer: with a chat template whose turns end with one special token.

    Attributes:
        end_ids: the ids that end a turn: the template's end-of-turn token and the tokenizer's end of sequence.

    Raises:
        ModelError: the tokenizer has no chat template, or its turns end without a special token.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                f"The tokenizer of {tokenizer.name_or_path!r} has no chat template.", "Pass an instruct model, or --model tiny."
            )
        self.tokenizer = tokenizer
        self._prefixes: dict[str, tuple[int, ...]] = {}
        self._stops: dict[tuple[str, ...], Stops] = {}
        # Here and not at first use: that is the sampler's thread, too late to refuse a model.
        self.end_ids = frozenset({self._prefix(())[-1], *self._end_of_sequence()})

    def opening(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> tuple[int, ...]:
        """The prompt of an episode's first step, generation prompt included.

        Raises:
            ModelError: the template refuses these messages.
        """
        return self._encode(self._render(messages, tools, generate=True))

    def continuation(
        self, messages: Sequence[Message], tools: Sequence[Schema] = (), ended: bool = True
    ) -> tuple[tuple[int, ...] | None, str]:
        """The ids that follow a sampled turn up to the next generation prompt.

        Args:
            messages: what is new: tool results or a user's message.
            tools: the same as in the opening.
            ended: the turn has its end token (see `ended`); else these ids begin with it.

        Returns:
            The ids and an empty reason; or None and why the template cannot be continued: it renders earlier turns
            differently once others follow. Then the caller opens a new training row with `opening` of all messages.
        """
        prefix = self._prefix(tools)
        whole = self._encode(self._render([_ASKED, _ANSWERED, *messages], tools, generate=True))
        if whole[: len(prefix)] != prefix:
            return None, f"the template rewrites earlier turns before a {messages[0].role} message"
        return whole[len(prefix) - (not ended) :], ""

    def ended(self, sampled_ids: Sequence[int]) -> bool:
        """Whether a sampled turn has its end token; one that a stop string ended has none."""
        return bool(sampled_ids) and sampled_ids[-1] in self.end_ids

    def stops(self, strings: tuple[str, ...]) -> Stops:
        """What watches for these texts in a turn; the same for the same strings.

        Raises:
            ModelError: the tokenizer does not tell the bytes of its tokens.
        """
        if strings not in self._stops:
            self._stops[strings] = Stops(self._spelling, strings)
        return self._stops[strings]

    def turn(self, message: Message) -> tuple[int, ...]:
        """An assistant's message as the policy would have sampled it, end-of-turn token included (for demonstrations).

        Raises:
            ModelError: the template does not put the turn right after its generation prompt.
        """
        prompt = self._turn_prompt
        whole = self._render([_ASKED, message], (), generate=False)
        if not whole.startswith(prompt):
            raise ModelError("The chat template does not continue its own generation prompt; it cannot show demonstrations.")
        return self._cut(self._encode(whole[len(prompt) :]))

    def parse(self, sampled_ids: Sequence[int]) -> Message:
        """The message that the sampled ids spell; any ids at all are readable."""
        ids = list(sampled_ids)
        while ids and ids[-1] in self.end_ids:
            ids.pop()
        return parse_text(self.decode(ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included; bytes that are no UTF-8 become U+FFFD."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def _turn_prompt(self) -> str:
        return self._render([_ASKED], (), generate=True)

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self.tokenizer)

    @cached_property
    def template_hash(self) -> str:
        """sha256 of the chat template."""
        return hashlib.sha256(json.dumps(self.tokenizer.chat_template, sort_keys=True).encode()).hexdigest()

    @cached_property
    def tokenizer_hash(self) -> str:
        """sha256 of the vocabulary and of how a text with every kind of character is split."""
        probe = self._encode("Ünï 12345.6 == \tfoo_bar(  )\n\n<tool_call>{\"a\": [1, 'b']}</tool_call> 漢字 🙂")
        text = json.dumps([self.tokenizer.get_vocab(), probe], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _end_of_sequence(self) -> tuple[int, ...]:
        eos = self.tokenizer.eos_token_id
        return () if eos is None else (int(eos),)

    @cached_property
    def _special(self) -> dict[str, int]:
        return {token.content: i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    def _prefix(self, tools: Sequence[Schema]) -> tuple[int, ...]:
        key = json.dumps(list(tools), sort_keys=True)
        if key not in self._prefixes:
            self._prefixes[key] = self._cut(self._encode(self._render([_ASKED, _ANSWERED], tools, generate=False)))
        return self._prefixes[key]

    def _cut(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The ids up to the last special one, which ends the last turn."""
        special = set(self._special.values())
        last = max((i for i, token in enumerate(ids) if token in special), default=None)
        if last is None:
            raise ModelError("The chat template ends a turn without a special token.", "Pass an instruct model.")
        return ids[: last + 1]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _render(self, messages: Sequence[Message], tools: Sequence[Schema], generate: bool) -> str:
        turns = [self._plain(message) for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                turns, tools=[dict(tool) for tool in tools] or None, add_generation_prompt=generate, tokenize=False
            )
        except TemplateError as error:
            raise ModelError(f"The chat template refuses these messages: {error}.") from error
        return str(text)

    def _plain(self, message: Message) -> dict[str, Any]:
        if message.role != "assistant":
            named = {"name": message.name} if message.name else {}
            return {"role": message.role, "content": self._defused(message.content), **named}
        thought = f"{THINK}\n{message.thought}\n{END_THINK}\n\n" if message.thought else ""
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in message.tool_calls
            if call.error is None  # its text is in the content
        ]
        return {"role": "assistant", "content": thought + message.content, **({"tool_calls": calls} if calls else {})}

    def _defused(self, text: str) -> str:
        """Text from outside must not end the turn it stands in, nor open another one."""
        for token in self._special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text
