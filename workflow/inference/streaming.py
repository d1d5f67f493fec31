"""A turn while it is sampled: its text in pieces of whole characters, and then its step.

A character may be split over several tokens: an incomplete one at the end waits for the rest. Decoders depend on neighbours (a
word's leading space), so that a token is decoded with those before it.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from threading import Event

from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.engines import Completion, Engine, GenerateRequest
from agentrl.workflow.trajectory import Step

HALF = "\ufffd"
LONGEST = 32
"""The most tokens that wait for the rest of a character; then they are shown as they are."""


class Letters:
    """Turns token ids into text as they come; the pieces add up to the text of all ids without the end token."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._before: list[int] = []
        self._waiting: list[int] = []

    def take(self, token: int) -> str:
        """The text that this token completes."""
        if token in self._chat.end_ids:
            return self.rest()
        self._waiting.append(token)
        text = self._read()
        if text.endswith(HALF) and len(self._waiting) < LONGEST:
            return ""
        self._before, self._waiting = self._waiting, []
        return text

    def rest(self) -> str:
        """The text that still waits, once no token follows."""
        text = self._read()
        self._waiting = []
        return text

    def _read(self) -> str:
        if not self._waiting:
            return ""
        known = self._chat.decode(self._before) if self._before else ""
        return self._chat.decode([*self._before, *self._waiting])[len(known) :]


class Stream:
    """An iterator over a turn's text as it is sampled; leaving the loop early stops the turn.

    A remote engine gives the whole turn as one piece.

    Args:
        engine: the engine that samples.
        request: the turn to sample.
        chat: the policy's chat.
        step: makes the step of a completion.

    Attributes:
        context: all ids before the turn.
    """

    def __init__(self, engine: Engine, request: GenerateRequest, chat: Chat, step: Callable[[Completion], Step]) -> None:
        self.context = request.prompt_ids
        self._chat = chat
        self._step = step
        self._heard: SimpleQueue[int | None] = SimpleQueue()
        self._stopped = Event()
        self._future: Future[Completion] = engine.submit(replace(request, heard=self._hear))
        self._future.add_done_callback(lambda _: self._heard.put(None))

    def __iter__(self) -> Iterator[str]:
        letters, count = Letters(self._chat), 0
        try:
            while (token := self._heard.get()) is not None:
                count += 1
                if piece := letters.take(token):
                    yield piece
            later = self._future.result().token_ids[count:]
            if piece := "".join([*map(letters.take, later), letters.rest()]):
                yield piece
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the turn with the token now being sampled; does nothing to a turn that is over."""
        self._stopped.set()
        self._future.cancel()

    def result(self) -> Step:
        """The turn, once it is over; one that was stopped ends as `length`.

        Raises:
            AgentRLError: as the engine's `submit` says.
            CancelledError: the turn was stopped before it began.
        """
        return self._step(self._future.result())

    def _hear(self, token: int) -> bool:
        self._heard.put(token)
        return not self._stopped.is_set()
