"""The dialect of each path. A new dialect is one module and one line here."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.workflow.dialects import (
    Ask,
    Recorded,
    ReplyHead,
    RequestError,
    ResponseTurn,
    chat_completions,
    completions,
    messages,
    responses,
)

if TYPE_CHECKING:
    from agentrl.workflow.chat.rendering import Chat


class Events(Protocol):
    """The builder of the events of a streamed response."""

    def begin(self) -> bytes:
        """Return the first events."""

    def token(self, choice: int, token: int) -> bytes:
        """Return the events for the next token of a choice."""

    def end(self, choice: int, turn: ResponseTurn) -> bytes:
        """Return the last events of a choice."""

    def close(self, turns: Sequence[ResponseTurn]) -> bytes:
        """Return the last events of the stream."""


class Dialect(Protocol):
    """The functions of a dialect's module."""

    def read(self, body: bytes, recorded: Recorded, max_ids: int) -> Ask:
        """Parse a request. `recorded` finds earlier responses that the request names by their ids. `max_ids` is the most token
        ids that its prompt may have, if it has a prompt of ids.
        """

    def whole(self, ask: Ask, turns: Sequence[ResponseTurn], head: ReplyHead, chat: "Chat") -> dict[str, Any]:
        """Return the complete response."""

    def stream(self, ask: Ask, head: ReplyHead, chat: "Chat") -> Events:
        """Return the builder of a streamed response."""

    def error_body(self, error: RequestError) -> dict[str, Any]:
        """Return the body of an error response."""

    def error_event(self, document: Mapping[str, Any]) -> bytes:
        """Return the event that ends a stream after an error. `document` is the body of the error response."""


class Counter(Dialect, Protocol):
    """A dialect that also counts the tokens of a request."""

    def count(self, tokens: int) -> dict[str, Any]:
        """Return the response with the number of tokens."""


COUNTERS: Mapping[str, Counter] = MappingProxyType({messages.COUNT_PATH: messages, responses.COUNT_PATH: responses})
"""The paths of requests that count the tokens of a prompt and sample nothing."""
TURNS: Mapping[str, Dialect] = MappingProxyType(
    {
        chat_completions.PATH: chat_completions,
        responses.PATH: responses,
        messages.PATH: messages,
        completions.PATH: completions,
    }
)
"""The paths of requests for a turn."""
DIALECTS: Mapping[str, Dialect] = MappingProxyType({**TURNS, **COUNTERS})


def dialect_of(path: str) -> Dialect:
    """Return the dialect of a path. For an unknown path, return the dialect of the path above it. If that path is unknown too,
    return the dialect of chat completions.
    """
    return DIALECTS.get(path, messages if path.startswith(f"{messages.PATH}/") else chat_completions)
