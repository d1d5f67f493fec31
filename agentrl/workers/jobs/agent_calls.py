"""A call of the model by an agent from outside, as the thread that serves it and the rollout that samples it share it.

The server puts an `AgentCall` into the inbox of the rollout that drives the call's episode. The rollout answers through `tell`:
first that the call is accepted, then with each token as it is drawn, at last with the whole turns, once they are committed; or
with a refusal.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.workflow.dialects import Ask, RequestError, ResponseTurn


@dataclass(frozen=True, slots=True)
class Accepted:
    """The call is sampled, or was.

    Args:
        prompt_ids: all tokens before its turns.
        request_id, created: of its reply.
        cached_tokens: how many tokens of the prompt an earlier turn of the episode has.
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
    """All choices, whole and committed."""

    turns: tuple[ResponseTurn, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The call has no answer."""

    error: RequestError


@dataclass(frozen=True, slots=True)
class AttemptGone:
    """The call is no longer answered here: it may be answered elsewhere, or its client has gone."""


RolloutMessage = Accepted | Drawn | Answered | Refused | AttemptGone


@dataclass(eq=False, slots=True)
class AgentCall:
    """A request that waits for its answer.

    Args:
        episode: whose key it came with.
        attempt: of that episode.
        request_id: the same each time that this request is forwarded.
        created: the time of its first arrival, in seconds since 1970.
        retry: how often its client says that it tried before.
        body_hash: sha256 of its body.
        ask: what the body says.
        tell: called in any thread.
        gone: set once nobody waits any more.
        answered: the request id of the answer that it was given.
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
