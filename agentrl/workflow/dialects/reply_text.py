"""The values that every dialect derives from a sampled turn: the pieces of a stream, the ids of calls, the counts of tokens."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from agentrl.workflow.chat.letters import Letters
from agentrl.workflow.chat.parsing import END_THINK
from agentrl.workflow.chat.stop_strings import StopCut
from agentrl.workflow.chat.turn_stream import TextPiece, TurnStream
from agentrl.workflow.dialects import Ask, RecordedResponse, ResponseTurn
from agentrl.workflow.trajectory import Message, ToolCall

if TYPE_CHECKING:
    from agentrl.workflow.chat.rendering import Chat


def parse_turn(chat: "Chat", ask: Ask, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> Message:
    """Return the message of a turn for the client. It is cut before a stop string, and has only calls of offered tools."""
    thinking = chat.leaves_thought_open(prompt_ids)
    return chat.parse(sampled_ids, ask.tools, thinking, stop=ask.stop, offered_only=True)


class TurnText:
    """Splits a choice into thought and content while it is sampled, for streaming.

    Args:
        ask: the request.
        prompt_ids: all tokens before the turn.
    """

    def __init__(self, chat: "Chat", ask: Ask, prompt_ids: Sequence[int]) -> None:
        self._letters, self._cut = Letters(chat), StopCut(ask.stop)
        tool_format = chat.manner.tool_format if ask.tools else None
        self._stream = TurnStream(tool_format, chat.leaves_thought_open(prompt_ids), chat.strict_calls)

    def take(self, token: int) -> Iterator[TextPiece]:
        """Yield the pieces that the next token completes.

        There are none while the text may still become a part of a stop string, a mark or a longer character.
        """
        return self._stream.take(self._cut.take(self._letters.take(token)))

    def rest(self, message: Message) -> Iterator[TextPiece]:
        """Yield the remaining pieces of a turn that has ended. `message` is the parsed turn."""
        yield from self._stream.take(self._cut.take(self._letters.rest()) + self._cut.rest())
        yield from self._stream.rest(message)


def readable_calls(message: Message) -> list[ToolCall]:
    """Return the calls that could be parsed. The text of other calls is in the content, so the client sends it back with the
    history.
    """
    return [call for call in message.tool_calls if call.error is None]


def sent_messages(response: RecordedResponse) -> list[Message]:
    """Return the messages of a recorded conversation as a client would send them back: with readable calls only."""
    return [replace(message, tool_calls=tuple(readable_calls(message))) for message in response.messages]


def call_id(request_id: str, choice: int, number: int) -> str:
    """Return the id of a call. It is the same each time the request is answered."""
    return "call_" + hashlib.sha256(f"{request_id}/{choice}/{number}".encode()).hexdigest()[:24]


def is_cut_off(turn: ResponseTurn) -> bool:
    """Return True if a limit on tokens ended the turn."""
    return turn.completion.finish_reason == "length"


def count_thought(turn: ResponseTurn, chat: "Chat") -> int:
    """Return the number of tokens up to the end of the turn's thought. If the thought has no end, return the number of all
    tokens.
    """
    if not turn.message.thought:
        return 0
    letters, text = Letters(chat), ""
    for number, token in enumerate(turn.completion.token_ids, start=1):
        text = text[-len(END_THINK) :] + letters.take(token)
        if END_THINK in text:
            return number
    return len(turn.completion.token_ids)
