"""A turn while it is being sampled: its text piece by piece, whole characters each, and the step that it becomes.

A character may be split over several tokens, so that the end of what was sampled may be half of one: it waits for the rest.
Decoders look at neighbours too (a leading space of a word), so that a token is decoded with those before it.
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
"""Tokens that may wait for the rest of a character; where so many spell none, they are shown as they are."""


class Letters:
    """Token ids to text, as they come; the pieces together are the text of all, but for its end token."""

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
        """The text that still waits, where nothing follows it."""
        text = self._read()
        self._waiting = []
        return text

    def _read(self) -> str:
        if not self._waiting:
            return ""
        known = self._chat.decode(self._before) if self._before else ""
        return self._chat.decode([*self._before, *self._waiting])[len(known) :]


class Stream:
    """Iterate over it for the text of the turn as it is sampled; whoever leaves before its end stops the turn.

    An engine elsewhere says the whole turn at once, as one piece.

    Args:
        engine: samples it.
        request: the turn to sample.
        chat: its tokenizer's.
        step: makes the step of what was sampled.

    Attributes:
        context: all ids that the turn follows.
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
        """Ends the turn with the token that is being sampled; one that is over stays as it is."""
        self._stopped.set()
        self._future.cancel()

    def result(self) -> Step:
        """The turn, once it is over; one that was stopped ends as `length`.

        Raises:
            AgentRLError: as the engine's `submit` says.
            CancelledError: it was stopped before it began.
        """
        return self._step(self._future.result())

    def _hear(self, token: int) -> bool:
        self._heard.put(token)
        return not self._stopped.is_set()
