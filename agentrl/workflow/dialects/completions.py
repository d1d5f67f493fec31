"""`/v1/completions`: OpenAI's text completions, for clients that write the prompt themselves, as a text or as token ids.

The prompt is one message with a role of its own (`trajectory.RAW_ROLES`), which no chat template renders. If the prompt's ids
extend an earlier turn of the attempt, the call continues that turn's chain. A client that sends ids back word for word
therefore trains its whole loop as one row.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from agentrl.workflow.chat.letters import Letters
from agentrl.workflow.chat.stop_strings import StopCut, cut_at_stop
from agentrl.workflow.dialects import Ask, Recorded, ReplyHead, ResponseTurn, chat_completions, find_none, too_long
from agentrl.workflow.dialects.fields import Fields, load_object
from agentrl.workflow.dialects.reply_text import is_cut_off
from agentrl.workflow.dialects.request_parts import (
    MAX_CHOICES,
    MAX_COUNT,
    MAX_NAME,
    MAX_STOP,
    MAX_STOPS,
    identity_of,
    list_not_applied,
    read_sampling,
)
from agentrl.workflow.trajectory import Message

if TYPE_CHECKING:
    from agentrl.workflow.chat.rendering import Chat

PATH = "/v1/completions"
DEFAULT_MAX_TOKENS = 16
"""The API's limit for a request without `max_tokens`."""
MAX_LOGPROBS = 5
MAX_IDS = 2_000_000
HONOURED = frozenset(
    {
        *("model", "prompt", "max_tokens", "n", "stop", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs"),
        *("stream", "stream_options", "return_token_ids"),
    }
)
"""The fields of a request that have an effect."""
USUAL: Mapping[str, tuple[Any, ...]] = {
    **{"echo": (False,), "suffix": ("",), "best_of": (1,), "logit_bias": ({},), "presence_penalty": (0,)},
    **{"frequency_penalty": (0,)},
}
"""For some fields, the values that request nothing."""
REFUSED = ("echo", "suffix", "best_of")
"""The refused fields, unless they request nothing. If these fields were ignored, a request would have another meaning."""


def read(body: bytes, recorded: Recorded = find_none, max_ids: int = MAX_IDS) -> Ask:
    """Parse the request.

    Args:
        body: the body, as JSON.
        recorded: not used, because a request contains its complete prompt.
        max_ids: the most ids that a prompt of ids may have.

    Raises:
        RequestError: the request is invalid (status 400). The message names the invalid field.
    """
    fields = Fields(load_object(body))
    prompt = _prompt(fields, max_ids)  # a prompt that is too long is refused before other work
    for name in REFUSED:
        if fields.has(name) and fields.values[name] not in USUAL[name]:
            raise fields.error(name, "it is not supported; leave it out", "unsupported_parameter")
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    return Ask(
        messages=(prompt,),
        model=fields.text("model", MAX_NAME),
        max_tokens=fields.integer("max_tokens", 1, MAX_COUNT) or DEFAULT_MAX_TOKENS,
        stop=fields.texts("stop", MAX_STOPS, MAX_STOP) if fields.values.get("stop") not in (None, [], "") else (),
        count=fields.integer("n", 1, MAX_CHOICES) or 1,
        asked=read_sampling(fields, "temperature", "top_p", "min_p", "top_k", "seed"),
        stream=fields.flag("stream"),
        include_usage=fields.object("stream_options").flag("include_usage"),
        logprobs=logprobs is not None,
        top_logprobs=logprobs or 0,
        token_ids=fields.flag("return_token_ids"),
        identity=identity_of(PATH, fields.values),
        prompt_field="prompt",
        not_applied=tuple(list_not_applied(fields, HONOURED, USUAL)),
    )


def _prompt(fields: Fields, max_ids: int) -> Message:
    """Return the only prompt of the request: a text, or ids as JSON."""
    value = fields.values.get("prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return Message("prompt", Fields({"prompt": value}).text("prompt"))
    if isinstance(value, list) and len(value) > max_ids:
        raise too_long(max_ids, len(value), "prompt")
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        if not all(0 <= token < MAX_COUNT for token in value):
            raise fields.error("prompt", "it contains a number that is not a token id")
        return Message("prompt_ids", json.dumps(value))
    raise fields.error("prompt", "it must be one text or one array of token ids, not empty")


def whole(ask: Ask, turns: Sequence[ResponseTurn], head: ReplyHead, chat: "Chat") -> dict[str, Any]:
    """Return the complete response with all turns."""
    choices = []
    for number, turn in enumerate(turns):
        choice = _choice(number, _text(ask, turn, chat), "length" if is_cut_off(turn) else "stop")
        choice["logprobs"] = _logprobs(ask, turn, chat)
        if ask.token_ids:
            choice |= {"token_ids": list(turn.completion.token_ids), "prompt_token_ids": list(head.prompt_ids)}
        choices.append(choice)
    return _head(ask, head) | {"choices": choices, "usage": _usage(head, turns)}


def _text(ask: Ask, turn: ResponseTurn, chat: "Chat") -> str:
    """Return the sampled text without end tokens and before a stop string."""
    letters = Letters(chat)
    text = "".join(letters.take(token) for token in turn.completion.token_ids) + letters.rest()
    return cut_at_stop(text, ask.stop)


def _head(ask: Ask, head: ReplyHead) -> dict[str, Any]:
    fields = {"id": f"cmpl-{head.request_id}", "object": "text_completion", "created": head.created, "model": ask.model}
    return fields | {"system_fingerprint": head.fingerprint or None}


def _choice(number: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _usage(head: ReplyHead, turns: Sequence[ResponseTurn]) -> dict[str, int]:
    prompt, sampled = len(head.prompt_ids), sum(len(turn.completion.token_ids) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(ask: Ask, turn: ResponseTurn, chat: "Chat") -> dict[str, Any] | None:
    """Return the logprobs of the turn's tokens in the API's format; None if the client did not request them."""
    if not ask.logprobs:
        return None
    done = turn.completion
    tokens = [chat.decode([token]) for token in done.token_ids]
    likely = [{chat.decode([token]): logprob for token, logprob in place[: ask.top_logprobs]} for place in done.top]
    offsets = [0, *accumulate(map(len, tokens))][: len(tokens)]
    values = {"tokens": tokens, "token_logprobs": list(done.logprobs), "top_logprobs": likely or None}
    return values | {"text_offset": offsets}


class CompletionEvents:
    """The builder of the events of a streamed response.

    The caller calls `begin` once, then, for each choice, `token` for each token and `end`, and finally `close`.
    """

    def __init__(self, ask: Ask, head: ReplyHead, chat: "Chat") -> None:
        self._ask, self._reply, self._chat = ask, head, chat
        self._texts: dict[int, tuple[Letters, StopCut]] = {}

    def begin(self) -> bytes:
        """Return nothing: a stream begins with the first token."""
        return b""

    def token(self, choice: int, token: int) -> bytes:
        """Return the events for the next token of a choice."""
        letters, cut = self._text(choice)
        text = cut.take(letters.take(token))
        more = {"token_ids": [token]} if self._ask.token_ids else {}
        return self._event(_choice(choice, text) | more) if text or more else b""

    def end(self, choice: int, turn: ResponseTurn) -> bytes:
        """Return the last event of a choice: the remaining text, the logprobs and the finish reason."""
        letters, cut = self._text(choice)
        last = _choice(choice, cut.take(letters.rest()) + cut.rest(), "length" if is_cut_off(turn) else "stop")
        last["logprobs"] = _logprobs(self._ask, turn, self._chat)
        if self._ask.token_ids:
            last["prompt_token_ids"] = list(self._reply.prompt_ids)
        return self._event(last)

    def close(self, turns: Sequence[ResponseTurn]) -> bytes:
        """Return the last events of the stream."""
        usage = _head(self._ask, self._reply) | {"choices": [], "usage": _usage(self._reply, turns)}
        return (chat_completions.format_event(usage) if self._ask.include_usage else b"") + chat_completions.DONE

    def _text(self, choice: int) -> tuple[Letters, StopCut]:
        if choice not in self._texts:
            self._texts[choice] = Letters(self._chat), StopCut(self._ask.stop)
        return self._texts[choice]

    def _event(self, choice: Mapping[str, Any]) -> bytes:
        return chat_completions.format_event(_head(self._ask, self._reply) | {"choices": [choice]})


def stream(ask: Ask, head: ReplyHead, chat: "Chat") -> CompletionEvents:
    """Return the builder of a streamed response."""
    return CompletionEvents(ask, head, chat)


error_body, error_event = chat_completions.error_body, chat_completions.error_event
