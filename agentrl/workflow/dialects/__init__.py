"""Dialects: translations between the wire formats of clients and agentrl's types. They are pure functions that need no web
server and no model.

A client's request becomes an `Ask`, and a sampled turn becomes a `ResponseTurn`. A request that cannot be fulfilled raises a
`RequestError`, which the dialect converts to the error format of its API.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.workflow.chat.grammar import NO_CONSTRAINT, Constraint
from agentrl.workflow.engines import Completion
from agentrl.workflow.errors import AgentRLError
from agentrl.workflow.tool_formats import Schema
from agentrl.workflow.trajectory import Message

MAX_BODY = 8 << 20
"""The largest body of a request, in bytes."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for the next turn of a conversation, in any dialect.

    Args:
        messages: the complete conversation. Tool results are in the order of their calls.
        model: the name of the model, as the client sent it.
        tools: the offered tools.
        template_options: other options of the chat template.
        max_tokens: the most tokens to sample; None: the limits of the run.
        stop: texts that end the turn, in addition to the run's stop strings.
        count: the number of turns to sample independently.
        asked: the client's sampling options (`temperature`, `top_p`, `top_k`, `min_p`, `seed`), as sent.
        stream: True to send the turn while it is sampled.
        include_usage: True to end a stream with the numbers of tokens.
        logprobs: True to return the logprob of each token, and the logprobs of the `top_logprobs` most likely tokens.
        token_ids: True to return the ids of the prompt and of each turn.
        side_call: True if the agent marked the request as one that does not train, and the run allows that.
        counts_only: True to return only the number of the prompt's tokens, without a turn.
        identity: the sha256 of the request's path and body without `stream`. A repeated request has the same one.
        constraint: what the client requires of the turn: a tool call, a JSON schema, at most one call.
        enforced: True if the sampler enforces the constraint; False if only the prompt asks the model for it.
        not_applied: the names of the request's fields that have no effect here or are not enforced.
        prompt_field: the name of the request's field with the messages or the prompt.
        previous: the id of the request whose response this request continues by its id; empty without such a request.
        kept: values that are stored with the turn for a later request that continues the turn by its id.
        wire: values that only the dialect needs, to build the response.
    """

    messages: tuple[Message, ...]
    model: str
    tools: tuple[Schema, ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    count: int = 1
    asked: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    token_ids: bool = False
    side_call: bool = False
    counts_only: bool = False
    identity: str = field(default="", compare=False)
    constraint: Constraint = NO_CONSTRAINT
    enforced: bool = False
    not_applied: tuple[str, ...] = ()
    prompt_field: str = "messages"
    previous: str = ""
    kept: Mapping[str, Any] = field(default_factory=dict)
    wire: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordedResponse:
    """An earlier response of the same attempt.

    Args:
        messages: the complete conversation, ending with the message of the response.
        tools: the tools that its request offered.
        kept: the `Ask.kept` of its request.
    """

    messages: tuple[Message, ...]
    tools: tuple[Schema, ...]
    kept: Mapping[str, Any]


Recorded = Callable[[str], RecordedResponse | None]
"""A function that returns the response to the request with that id; None if the attempt has no such response."""


def find_none(request_id: str) -> None:
    """Return None: there are no recorded responses."""


@dataclass(frozen=True, slots=True)
class ResponseTurn:
    """A turn that was sampled for a request.

    Args:
        message: the message that the turn's tokens encode.
        completion: the tokens, their logprobs, the most likely tokens at each place, and the finish reason.
    """

    message: Message
    completion: Completion


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The part of a response that does not depend on its turns.

    Args:
        prompt_ids: all tokens before the turns.
        request_id, created: the id and the time of the request for which the turns were sampled. A repeated request gets the
            same values.
        fingerprint: the identifier of the weights.
        cached_tokens: the number of prompt tokens that are also in an earlier turn of the episode.
    """

    prompt_ids: tuple[int, ...]
    request_id: str
    created: int
    fingerprint: str = ""
    cached_tokens: int = 0


class RequestError(AgentRLError):
    """An error that is sent to the client instead of a turn, with the fields of the API.

    Args:
        status: the HTTP status.
        message: the message.
        code: the API's error code; empty if the API has no code for the error.
        param: the name of the invalid field, such as `messages[3].content`.
        kind: the API's `type`.
    """

    def __init__(self, status: int, message: str, code: str = "", param: str | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.kind = kind or _KINDS.get(status, "invalid_request_error")


def too_long(max_tokens: int, tokens: int | str, name: str) -> RequestError:
    """Return the error for a request whose field `name` has more than `max_tokens` tokens."""
    message = f"This model's maximum context length is {max_tokens} tokens; {name}: it has {tokens} tokens."
    return RequestError(400, message, code="context_length_exceeded", param=name)


_KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
