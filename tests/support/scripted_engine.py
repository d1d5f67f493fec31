"""A sampler that says what it is told: for tests of the loop and for measuring what everything but the model costs."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from agentrl.workflow.engines import Completion, GenerateRequest

Script = Callable[[GenerateRequest], Sequence[int]]


class ScriptedEngine:
    """Answers each request with the ids that `script` gives for it, or with the next of a list of answers.

    Args:
        script: a function of the request, or token lists that are used up in the order of the requests.
        seconds: slept before each answer.
        workers: requests answered at the same time.
        pace: called before each token that somebody hears.
        tells: whether whoever wants to hear each token does.
    """

    def __init__(
        self,
        script: Script | Sequence[Sequence[int]],
        seconds: float = 0.0,
        workers: int = 8,
        pace: Callable[[], object] = lambda: None,
        tells: bool = True,
    ) -> None:
        self._script = script if callable(script) else _in_order(script)
        self._seconds = seconds
        self._pace = pace
        self._tells = tells
        self._pool = ThreadPoolExecutor(workers)

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        """The scripted ids, cut at `max_new_tokens` or where who hears them says so, each with the logprob -1."""
        return self._pool.submit(self._answer, request)

    def release(self, session: int | None = None) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Drops what was not yet answered."""
        self._pool.shutdown(cancel_futures=True)

    def _answer(self, request: GenerateRequest) -> Completion:
        time.sleep(self._seconds)
        whole = tuple(self._script(request))
        ids = whole[: request.max_new_tokens]
        if request.heard is not None and self._tells:
            ids = _heard(ids, request.heard, self._pace)
        return Completion(ids, (-1.0,) * len(ids), "stop" if ids == whole else "length", self._seconds)


def _in_order(answers: Sequence[Sequence[int]]) -> Script:
    remaining = iter(answers)
    return lambda request: next(remaining)


def _heard(ids: tuple[int, ...], hear: Callable[[int], bool], pace: Callable[[], object]) -> tuple[int, ...]:
    for count, token in enumerate(ids, start=1):
        pace()
        if not hear(token):
            return ids[:count]
    return ids
