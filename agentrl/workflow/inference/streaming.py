"""The stream of a turn while it is sampled: first its text, in pieces of complete characters, then its step."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from threading import Event

from agentrl.workflow.chat.letters import Letters
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.engines import Completion, Engine, GenerateRequest
from agentrl.workflow.trajectory import Step


class Stream:
    """An iterator over a turn's text while it is sampled. If the caller leaves the loop over the stream early, the turn is
    stopped.

    A remote engine returns the complete turn as one piece.

    Args:
        engine: the engine that samples.
        request: the request for the turn.
        chat: the policy's chat.
        step: a function that makes the step from a completion.

    Attributes:
        context: the ids of all tokens before the turn.
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
        """Stop the turn after the token that is being sampled. If the turn has already ended, do nothing."""
        self._stopped.set()
        self._future.cancel()

    def result(self) -> Step:
        """Wait for the end of the turn and return its step. A turn that was stopped ends as `length`.

        Raises:
            AgentRLError: see the engine's `submit`.
            CancelledError: the turn was stopped before it began.
        """
        return self._step(self._future.result())

    def _hear(self, token: int) -> bool:
        self._heard.put(token)
        return not self._stopped.is_set()
