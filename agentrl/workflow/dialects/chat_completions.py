"""`/v1/chat/completions`: builds responses and errors in the API's format. A response is complete or a stream.

A response depends only on its turn and on its request's id and time. So a repeated request gets the same bytes. A stream sends
the thought and the content of a turn while they are sampled, and sends its calls when the turn has ended. If a request asks for
several choices, they are streamed one after another. Token ids have vLLM's field names: `prompt_token_ids` at the root (in the
first chunk of a stream) and `token_ids` in a choice.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agentrl.workflow.chat.turn_stream import TextPiece
from agentrl.workflow.dialects import Ask, ReplyHead, RequestError, ResponseTurn
from agentrl.workflow.dialects.chat_requests import PATH, read
from agentrl.workflow.dialects.reply_text import TurnText, call_id, count_thought, is_cut_off, readable_calls
from agentrl.workflow.trajectory import Message

if TYPE_CHECKING:
    from agentrl.workflow.chat.rendering import Chat

__all__ = ["PATH", "StreamEvents", "error_body", "error_event", "format_event", "models", "read", "stream", "whole"]

Fields = Mapping[str, Any]
NOTHING: Fields = MappingProxyType({})
DONE = b"data: [DONE]\n\n"
KINDS = {"thought": ("reasoning", "reasoning_content"), "content": ("content",)}
"""The API's fields for each part of a turn. A thought is sent under two names, because clients read different names."""


def whole(ask: Ask, turns: Sequence[ResponseTurn], head: ReplyHead, chat: "Chat") -> dict[str, Any]:
    """Return the complete response, a `ChatCompletion`. Each turn is one of its `choices`."""
    choices = [_choice(ask, turn, number, head.request_id, chat) for number, turn in enumerate(turns)]
    reply = _head("chat.completion", ask, head) | {"choices": choices, "usage": _usage(head, turns, chat)}
    return reply | ({"prompt_token_ids": list(head.prompt_ids)} if ask.token_ids else {})


def models(names: Sequence[str] | str, created: int = 0) -> dict[str, Any]:
    """Return the response of `/v1/models`."""
    listed = [names] if isinstance(names, str) else names
    data = [{"id": name, "object": "model", "created": created, "owned_by": "agentrl"} for name in listed]
    return {"object": "list", "data": data}


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the body of an error response."""
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code or None}}


class StreamEvents:
    """The builder of the events of a streamed response.

    The caller calls `begin` once, then, for each choice, `token` for each token and `end`, and finally `close`.

    Args:
        ask: the request.
        head: the part of the response that does not depend on its turns.
        chat: the chat format of the model.
    """

    def __init__(self, ask: Ask, head: ReplyHead, chat: "Chat") -> None:
        self._ask, self._reply, self._chat = ask, head, chat
        self._head = _head("chat.completion.chunk", ask, head)
        self._choices: dict[int, TurnText] = {}

    def begin(self) -> bytes:
        """Return the first event of each choice. It contains the role `assistant`."""
        ids: dict[str, Any] = {"prompt_token_ids": list(self._reply.prompt_ids)} if self._ask.token_ids else {}
        role = {"role": "assistant", "content": ""}
        return b"".join(self._event(number, role, root=ids if number == 0 else {}) for number in range(self._ask.count))

    def token(self, choice: int, token: int) -> bytes:
        """Return the events for the next token of a choice.

        They are empty while the text may still become a part of a stop string, a mark or a longer character.
        """
        events = [self._event(choice, _delta(piece)) for piece in self._text(choice).take(token)]
        if self._ask.token_ids:
            events.append(self._event(choice, {}, {"token_ids": [token]}))
        return b"".join(events)

    def end(self, choice: int, turn: ResponseTurn) -> bytes:
        """Return the last events of a choice: the remaining text, the calls and the finish reason."""
        events = [self._event(choice, _delta(piece)) for piece in self._text(choice).rest(turn.message)]
        for number, call in enumerate(_calls(turn.message, self._reply.request_id, choice)):
            events.append(self._event(choice, {"tool_calls": [{"index": number, **call}]}))
        if self._ask.logprobs:
            events.append(self._event(choice, {}, {"logprobs": _logprobs(self._ask, turn, self._chat)}))
        events.append(self._event(choice, {}, {"finish_reason": _finish_reason(turn)}))
        return b"".join(events)

    def close(self, turns: Sequence[ResponseTurn]) -> bytes:
        """Return the last events of the stream."""
        if not self._ask.include_usage:
            return DONE
        return format_event(self._head | {"choices": [], "usage": _usage(self._reply, turns, self._chat)}) + DONE

    def _text(self, choice: int) -> TurnText:
        if choice not in self._choices:
            self._choices[choice] = TurnText(self._chat, self._ask, self._reply.prompt_ids)
        return self._choices[choice]

    def _event(self, choice: int, delta: Mapping[str, Any], more: Fields = NOTHING, root: Fields = NOTHING) -> bytes:
        choice_fields = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        usage = {"usage": None} if self._ask.include_usage else {}
        return format_event({**self._head, "choices": [choice_fields], **usage, **root})


def stream(ask: Ask, head: ReplyHead, chat: "Chat") -> StreamEvents:
    """Return the builder of a streamed response."""
    return StreamEvents(ask, head, chat)


def error_event(document: Mapping[str, Any]) -> bytes:
    """Return the event that ends a stream after an error. `document` is the body of the error response."""
    return format_event(document)


def format_event(event: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: %b\n\n" % json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _head(kind: str, ask: Ask, head: ReplyHead) -> dict[str, Any]:
    fields = {"id": f"chatcmpl-{head.request_id}", "object": kind, "created": head.created, "model": ask.model}
    return fields | {"system_fingerprint": head.fingerprint or None}


def _choice(ask: Ask, turn: ResponseTurn, number: int, request_id: str, chat: "Chat") -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.message.content, "refusal": None}
    calls = list(_calls(turn.message, request_id, number))
    if calls:
        message |= {"content": turn.message.content or None, "tool_calls": calls}
    if turn.message.thought:
        message |= dict.fromkeys(KINDS["thought"], turn.message.thought)
    choice = {"index": number, "message": message, "finish_reason": _finish_reason(turn)}
    choice |= {"logprobs": _logprobs(ask, turn, chat) if ask.logprobs else None}
    return choice | ({"token_ids": list(turn.completion.token_ids)} if ask.token_ids else {})


def _delta(piece: TextPiece) -> dict[str, str]:
    return dict.fromkeys(KINDS[piece.kind], piece.text)


def _calls(message: Message, request_id: str, choice: int) -> Iterator[dict[str, Any]]:
    for number, call in enumerate(readable_calls(message)):
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        yield {"id": call_id(request_id, choice, number), "type": "function", "function": function}


def _finish_reason(turn: ResponseTurn) -> str:
    if is_cut_off(turn):
        return "length"
    return "tool_calls" if readable_calls(turn.message) else "stop"


def _usage(head: ReplyHead, turns: Sequence[ResponseTurn], chat: "Chat") -> dict[str, Any]:
    prompt, sampled = len(head.prompt_ids), sum(len(turn.completion.token_ids) for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": head.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(count_thought(turn, chat) for turn in turns)},
    }


def _logprobs(ask: Ask, turn: ResponseTurn, chat: "Chat") -> dict[str, Any]:
    """Return the logprobs of the turn's tokens in the API's format.

    They are natural logprobs over the whole vocabulary, at the sampling temperature.
    """
    done = turn.completion
    others = done.top or ((),) * len(done.token_ids)
    entries = [
        _logprob(token, logprob, chat) | {"top_logprobs": [_logprob(*one, chat) for one in top[: ask.top_logprobs]]}
        for token, logprob, top in zip(done.token_ids, done.logprobs, others, strict=True)
    ]
    return {"content": entries, "refusal": None}


def _logprob(token: int, logprob: float, chat: "Chat") -> dict[str, Any]:
    spelled = chat.bytes_of(token)
    return {"token": chat.decode([token]), "logprob": logprob, "bytes": None if spelled is None else list(spelled)}
