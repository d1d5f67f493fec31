"""A gate in a run: what stands before it has certainly begun and is certainly not over, until the test opens it.

A run is held by a hook (`-s hooks=[tests.support.gate:AtStart]`), by a tool or by an update, in the process at work. A worker
that is told to stop is let through, to end as it would. A data folder's gates are shut until `open_gate`.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal
from uuid import uuid4

from sqlalchemy import text

from agentrl.workers.stack.process import database, stopping
from agentrl.workflow.algorithms.grpo import grpo
from agentrl.workflow.config import AlgorithmConfig
from agentrl.workflow.hooks import Hook
from agentrl.workflow.settings import settings
from agentrl.workflow.tools import Tool
from agentrl.workflow.training.advantages import Advantages, TokenRewards, relative_to_group
from agentrl.workflow.trajectory import Episode

PATIENCE_SECONDS = 300.0
"""Longer than a test waits for anything, so that a test that forgot the gate fails by its own words."""

KIND = "SELECT g.kind FROM groups g JOIN episodes e ON e.group_id = g.id WHERE e.id = :id"
NUMBER = "SELECT number FROM iterations i JOIN episodes e ON e.iteration_id = i.id WHERE e.id = :id"


Gate = Literal["rollout", "tool", "update"]


def at_gate(home: Path, gate: Gate) -> bool:
    """Whether somebody came to that gate of the data folder."""
    return arrivals(home, gate) > 0


def arrivals(home: Path, gate: Gate) -> int:
    """How many came to that gate of the data folder, and stand there or went through."""
    return len([*_sign(home, gate, "reached").parent.glob(f"{gate}-gate.reached-*")])


def open_gate(home: Path, gate: Gate) -> None:
    """Lets everybody through, now and later."""
    _sign(home, gate, "open").touch()


def wait(gate: Gate) -> None:
    """Stands before a gate of this process's data folder."""
    home = settings().root
    _sign(home, gate, f"reached-{uuid4().hex}").touch()
    until(lambda: _sign(home, gate, "open").exists() or stopping.is_set())


def _sign(home: Path, gate: Gate, state: str) -> Path:
    """A file beside the logs, where a run's own leftovers are not looked for."""
    folder = home / "stack"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{gate}-gate.{state}"


def until(met: Callable[[], bool]) -> None:
    """Waits in a worker for what a test does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not met():
        if time.monotonic() > deadline:
            raise TimeoutError(f"a gate stayed shut for {PATIENCE_SECONDS} s")
        time.sleep(0.02)


class AtStart(Hook):
    """Holds each group that a worker has claimed, before its first token."""

    def on_rollout_start(self, episode: Episode) -> None:
        """Nothing of the group has been sampled."""
        wait("rollout")


class InSecondIteration(Hook):
    """Holds the groups that are sampled with trained weights, before their first token."""

    def on_rollout_start(self, episode: Episode) -> None:
        """The first iteration goes through."""
        with database().read() as tx:
            number = tx.execute(text(NUMBER), {"id": episode.id}).scalar_one()
        if number:
            wait("rollout")


class InEvaluation(Hook):
    """Holds each group of an evaluation that a worker has claimed, before its first token."""

    def on_rollout_start(self, episode: Episode) -> None:
        """Groups that are trained on go through."""
        with database().read() as tx:
            kind = tx.execute(text(KIND), {"id": episode.id}).scalar_one()
        if kind == "eval":
            wait("rollout")


class AtSecondTurn(Hook):
    """Holds a group in the middle of its episodes."""

    def on_trace_start(self, episode: Episode) -> None:
        """A first turn is committed, with the results of its calls."""
        if episode.steps:
            wait("rollout")


class AfterSecondUpdate(Hook):
    """Holds the trainer, so that the run has two trained versions and gets no third."""

    def on_update_end(self, run: str, iteration: int, metrics: Mapping[str, float]) -> None:
        """The update is committed."""
        if iteration == 2:
            wait("update")


def plus(a: int, b: int) -> str:
    """Adds."""
    wait("tool")
    return str(a + b)


held_plus = Tool(plus, timeout_seconds=PATIENCE_SECONDS)


def credit(earned: TokenRewards, options: AlgorithmConfig) -> Advantages:
    """GRPO's, by a trainer that has claimed the iteration."""
    wait("update")
    return relative_to_group(earned, options)


held_update = replace(grpo, name="held_update", credit=f"{__name__}:credit")
