"""The path of an agent's request: from the endpoint to the rollout process, and in that process from the thread of the HTTP
server to the thread of the rollout, which samples the response.

The server puts an `AgentCall` into the inbox of the rollout that drives the episode. The rollout answers by calling `tell`. It
sends `Accepted` first, then each token as it is drawn, and the complete turns after they are committed. If it cannot answer, it
sends `Refused` or `AttemptGone`.
"""

import hashlib
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from agentrl.workflow.dialects import Ask, RequestError, ResponseTurn

Begin = Callable[[int, list[tuple[bytes, bytes]]], Awaitable[None]]
"""A function that sends the status and the headers of a response."""
Write = Callable[[bytes, bool], Awaitable[None]]
"""A function that sends bytes of a response; its second argument says whether more bytes follow."""
ANNOTATIONS = "/v1/annotations"
"""The path to which an agent sends annotations of its episode."""
TRAIN = "x-agentrl-train"
"""The header that marks an agent's request as a side call if its value is 0."""
_REQUEST_ID = re.compile(r"[0-9a-f]{32}")
_DIGITS = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A request as the endpoint sends it to the process that holds the episode. If the endpoint sends the request again, all of
    these values stay the same.

    Args:
        path: the path of the route.
        key: the API key.
        request_id: 32 hexadecimal digits; the same for all repetitions of a request by its client.
        created: the time when the request first arrived, in seconds since 1970.
        retry: the number of earlier tries that the client reports.
        body: the request's body.
        side_call: True if the client marks the request as a side call. No update trains on the turn of a side call.
    """

    path: str
    key: str
    request_id: str
    created: int
    retry: int
    body: bytes
    side_call: bool = False

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers with which the request is sent over HTTP."""
        return [
            (b"authorization", b"Bearer " + self.key.encode("latin-1", errors="replace")),
            (b"content-type", b"application/json"),
            (b"x-agentrl-request", self.request_id.encode()),
            (b"x-agentrl-created", str(self.created).encode()),
            (b"x-agentrl-retry", str(self.retry).encode()),
            (TRAIN.encode(), str(int(not self.side_call)).encode()),
        ]

    @classmethod
    def received(cls, path: str, key: str, headers: Mapping[str, str], body: bytes) -> "ForwardedRequest":
        """Return the request that was received over HTTP with these headers."""
        name, created, retry = (headers.get(f"x-agentrl-{what}", "") for what in ("request", "created", "retry"))
        return cls(
            path,
            key,
            name if _REQUEST_ID.fullmatch(name) else hashlib.sha256(f"{time.time_ns()}|{key}".encode()).hexdigest()[:32],
            int(created) if _DIGITS.fullmatch(created) else int(time.time()),
            int(retry) if _DIGITS.fullmatch(retry) else 0,
            body,
            is_side_call(headers),
        )


def is_side_call(headers: Mapping[str, str]) -> bool:
    """Return True if the headers of a request mark it as a side call."""
    return headers.get(TRAIN, "").strip() == "0"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The message that the request is accepted: its response will be sampled, or was recorded earlier.

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
    """The message with the next sampled token of one choice."""

    choice: int
    token: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The message with the turns of all choices of a request, after they were committed."""

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
