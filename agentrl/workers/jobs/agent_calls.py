"""The messages between the HTTP server thread, which receives an agent's request, and the rollout, which samples the response.

The server puts an `AgentCall` into the inbox of the rollout that drives the episode. The rollout answers by calling `tell`. It
sends `Accepted` first, then each token as it is drawn, and the complete turns after they are committed. If it cannot answer, it
sends `Refused` or `AttemptGone`.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.workflow.dialects import Ask, RequestError, ResponseTurn


@dataclass(frozen=True, slots=True)
class Accepted:
    """The message that the request will be sampled or has a recorded response.

    Args:
        prompt_ids: the token ids of the prompt, before the sampled turns.
        request_id, created: the id of the response, and its time in seconds since 1970.
        cached_tokens: the number of prompt tokens that an earlier turn of the episode contains.
    """

    prompt_ids: tuple[int, ...]
    request_id: str
    created: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """The message that brings the next token of one choice."""

    choice: int
    token: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The message that brings the turns of all choices, complete and committed."""

    turns: tuple[ResponseTurn, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The message that the request fails with this error."""

    error: RequestError


@dataclass(frozen=True, slots=True)
class AttemptGone:
    """The message that this process will not answer the request: another process may do so, or the client disconnected."""


RolloutMessage = Accepted | Drawn | Answered | Refused | AttemptGone


@dataclass(eq=False, slots=True)
class AgentCall:
    """A request of an agent that waits for its response.

    Args:
        episode: the id of the episode to which the request's API key belongs.
        attempt: the attempt number to which the API key belongs.
        request_id: the id of the request; it stays the same each time the request is forwarded.
        created: the time when the request first arrived, in seconds since 1970.
        retry: the number of earlier tries that the client reports for this request.
        body_hash: the hash of the request's body (`Ask.identity`).
        ask: the parsed body.
        tell: the callback that receives the rollout's messages; called from any thread.
        gone: an event that is set when the client has disconnected.
        answered: the request id of the response that was sent; empty before.
    """

    episode: int
    attempt: int
    request_id: str
    created: int
    retry: int
    body_hash: str
    ask: Ask
    tell: Callable[[RolloutMessage], None]
    gone: threading.Event = field(default_factory=threading.Event)
    answered: str = ""
