"""A file with one line per decoding step and per update, written by the processes that `killed_sampler` kills.

A line is appended by one write before the next token is sampled, so a `kill -9` loses none. For agentrl, the engine
`bench.faults.sampled_log:logged` and the hook `bench.faults.sampled_log:LogUpdates` write it; the variable FILE names it.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.workflow.engines import Engine, rolling
from agentrl.workflow.hooks import Hook
from agentrl.workflow.settings import Settings

if TYPE_CHECKING:
    from agentrl.workflow.models.policy import Policy

FILE = "SAMPLED_LOG"
UPDATE = "update"

logged = replace(rolling.rolling, name="logged", start=f"{__name__}:start")
"""agentrl's own engine, which also writes the log."""


class SampledLog:
    """The writer's side. Safe for several processes: each line is one appending write."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add_tokens(self, count: int) -> None:
        """Append a decoding step that sampled `count` tokens."""
        self._add(str(count))

    def add_update(self) -> None:
        """Append an update that a restarted process need not repeat."""
        self._add(UPDATE)

    def _add(self, word: str) -> None:
        os.write(self._descriptor, f"{time.monotonic()} {word}\n".encode())


@dataclass(frozen=True)
class Iteration:
    """What the log says about an iteration: the time of each decoding step and its tokens, and the time of the update.

    Args:
        steps: (seconds on the monotonic clock, tokens), in the order of the file.
        updated: the time of the update; 0.0 if there is none yet.
    """

    steps: tuple[tuple[float, int], ...]
    updated: float

    @property
    def tokens(self) -> int:
        """Tokens sampled for this iteration, by all processes."""
        return sum(count for _, count in self.steps)


def read_iterations(file: Path) -> list[Iteration]:
    """Return the iterations of the log; the last one is not updated yet, and may be empty."""
    found: list[Iteration] = []
    steps: list[tuple[float, int]] = []
    lines = file.read_text().splitlines() if file.exists() else []
    for moment, word in (line.split() for line in lines):
        if word == UPDATE:
            found.append(Iteration(tuple(steps), float(moment)))
            steps = []
        else:
            steps.append((float(moment), int(word)))
    return [*found, Iteration(tuple(steps), 0.0)]


def start(policy: "Policy", settings: Settings) -> Engine:
    """Start the engine, and log each of its decoding steps."""
    from agentrl.workflow.inference import sampler

    engine = sampler.start(policy, settings)
    log, batch = SampledLog(Path(os.environ[FILE])), engine._batch
    sample = batch.step

    def step() -> None:
        live = len(batch.turns)
        sample()
        log.add_tokens(live)

    batch.step = step  # type: ignore[method-assign]
    return engine


class LogUpdates(Hook):
    """Logs each committed update."""

    def on_update_end(self, run: str, iteration: int, metrics: Mapping[str, float]) -> None:
        SampledLog(Path(os.environ[FILE])).add_update()
