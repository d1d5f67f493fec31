"""A worker process that writes down when its model was at work: `python -m bench.performance.clock rollout,train FILE`.

At work is a call of the model, drawing from its logits, a loss's logprobs, a backward pass, clipping and a step of the
optimizer; everything else (Python between two calls, commits, messages, files, waiting) is not. The clocks are put around
torch's and our own functions in this process alone; the program knows nothing of them. A call that waits for its turn to run
Python, or for a processor, is at work all the same: `computed` has the processor seconds of the thread of each call. With one
torch thread, that is all of the call's computing. On a GPU nothing here would say when its work ends.
"""

import atexit
import functools
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_lock = threading.Lock()
_depth = threading.local()


class Clock:
    """Intervals in which at least one thread was at work, in seconds since the epoch, and the begin and the processor seconds
    of each call.
    """

    def __init__(self) -> None:
        self.intervals: list[tuple[float, float]] = []
        self.computed: list[tuple[float, float]] = []
        self._working = 0
        self._began = 0.0

    def measured(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, its time counted; what it calls is counted with it, and not again."""

        @functools.wraps(work)
        def run(*args: Any, **kwargs: Any) -> Any:
            if getattr(_depth, "inside", False):
                return work(*args, **kwargs)
            _depth.inside = True
            began, computed = self._enter(), time.thread_time()
            try:
                return work(*args, **kwargs)
            finally:
                _depth.inside = False
                self._leave(began, time.thread_time() - computed)

        return run

    def _enter(self) -> float:
        with _lock:
            now = time.time()
            if not self._working:
                self._began = now
            self._working += 1
            return now

    def _leave(self, began: float, computed: float) -> None:
        with _lock:
            now = time.time()
            self._working -= 1
            self.computed.append((began, computed))
            if not self._working:
                self.intervals.append((self._began, now))

    def write(self, file: Path) -> None:
        """All of it as JSON."""
        file.write_text(json.dumps({"intervals": self.intervals, "computed": self.computed}))


def put_on(clock: Clock) -> None:
    """Puts the clock around all that counts as the model's work; before anything else is imported."""
    import torch

    import agentrl.workflow.inference.sampling
    from agentrl.workflow.models import logprobs
    from agentrl.workflow.models.fast_forward import FastForward

    modules: Any = torch.nn.Module
    modules.__call__ = clock.measured(modules.__call__)
    FastForward.__call__ = clock.measured(FastForward.__call__)  # type: ignore[method-assign]
    agentrl.workflow.inference.sampling.sample = clock.measured(agentrl.workflow.inference.sampling.sample)
    for name in ("token_logprobs", "line_logprobs", "token_scores"):
        setattr(logprobs, name, clock.measured(getattr(logprobs, name)))
    torch.autograd.backward = clock.measured(torch.autograd.backward)
    torch.nn.utils.clip_grad_norm_ = clock.measured(torch.nn.utils.clip_grad_norm_)
    torch.optim.AdamW.step = clock.measured(torch.optim.AdamW.step)  # type: ignore[method-assign]


def main(roles: str, file: str) -> None:
    """Serves the roles until SIGTERM, then writes the file."""
    from agentrl.workers.stack.worker import run

    clock = Clock()
    put_on(clock)
    atexit.register(clock.write, Path(file))
    run(roles.split(","))


if __name__ == "__main__":
    main(*sys.argv[1:])
