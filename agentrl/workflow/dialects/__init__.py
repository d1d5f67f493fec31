"""Dialects: each wire format of clients, translated to our values and back. Pure functions, without a web or a model.

A client's request becomes an `Ask`, a sampled turn is a `ResponseTurn`, and what cannot be done is a `RequestError`, which the
dialect puts into the shape of its API.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.workflow.engines import Completion
from agentrl.workflow.errors import AgentRLError
from agentrl.workflow.tool_formats import Schema
from agentrl.workflow.trajectory import Message

MAX_BODY = 8 << 20
"""The largest body of a request, in bytes."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for the next turn of a conversation, whatever the dialect.

    Args:
        messages: the whole conversation; results of tools in the order of the calls before them.
        model: as the client calls it.
        tools: what it offers.
        template_options: what it gives the chat template beside these.
        max_tokens: the most tokens that it wants; None: as many as there may be.
        stop: texts that end the turn, beside the run's.
        count: how many turns it wants, each of its own.
        asked: the sampling that it asks for (`temperature`, `top_p`, `top_k`, `min_p`, `seed`), as it wrote it.
        stream: whether it wants the turn as it is sampled.
        include_usage: whether a stream ends with the numbers of tokens.
        logprobs: whether it wants the logprob of each token, and `top_logprobs` others for each.
        token_ids: whether it wants the ids of the prompt and of each turn.
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


@dataclass(frozen=True, slots=True)
class ResponseTurn:
    """A turn that was sampled for a request.

    Args:
        message: what its tokens spell.
        completion: its tokens, their logprobs, the likeliest ones at each place and why it ended.
    """

    message: Message
    completion: Completion


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The part of a reply besides its turns.

    Args:
        prompt_ids: all tokens before the turns.
        request_id, created: of the request that was answered first.
        fingerprint: the same for the same weights.
        cached_tokens: how many tokens of the prompt an earlier turn of the episode has.
    """

    prompt_ids: tuple[int, ...]
    request_id: str
    created: int
    fingerprint: str = ""
    cached_tokens: int = 0


class RequestError(AgentRLError):
    """A request that gets no turn, in the terms of the API.

    Args:
        status: of HTTP.
        code: the API's own word for it; empty where it has none.
        param: the field that is wrong, like `messages[3].content`.
        kind: the API's `type`.
    """

    def __init__(self, status: int, message: str, code: str = "", param: str | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.kind = kind or _KINDS.get(status, "invalid_request_error")


_KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
