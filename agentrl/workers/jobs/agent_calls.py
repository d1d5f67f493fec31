"""A request of an external agent, as the server thread and the rollout that samples it share it.

The server puts an `AgentCall` into the inbox of the rollout that drives the episode. The rollout answers through `tell`: first
`Accepted`, then each token as it is drawn, and the complete turns after they are committed; or `Refused` instead.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.workflow.dialects import Ask, RequestError, ResponseTurn


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request will be sampled, or has a recorded answer.

    Args:
        prompt_ids: all tokens before its turns.
        request_id, created: the id and time of its reply.
        cached_tokens: how many tokens of the prompt an earlier turn of the episode contains.
    """

    prompt_ids: tuple[int, ...]
    request_id: str
    created: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """The next token of one of the choices."""

    choice: int
    token: int


@dataclass(frozen=True, slots=True)
class Answered:
    """All choices, complete and committed."""

    turns: tuple[ResponseTurn, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The error with which the request ends."""

    error: RequestError


@dataclass(frozen=True, slots=True)
class AttemptGone:
    """This process no longer answers the request: another may, or its client disconnected."""


RolloutMessage = Accepted | Drawn | Answered | Refused | AttemptGone


@dataclass(eq=False, slots=True)
class AgentCall:
    """A request that waits for its answer.

    Args:
        episode: the episode of the key that it came with.
        attempt: the attempt of that key.
        request_id: its id, the same each time it is forwarded.
        created: the time of its first arrival, in seconds since 1970.
        retry: how often its client says that it tried before.
        body_hash: sha256 of its body.
        ask: the parsed body.
        tell: the callback for messages; called from any thread.
        gone: set when its client has disconnected.
        answered: the request id of the answer that it got.
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
