"""A gate in a run: what stands before it has certainly begun and is certainly not over, until the test opens it.

A run is held by a hook (`-s hooks=[tests.gate:AtStart]`), by a tool or by an update, in the process that is at work. A worker
that is told to stop is let through, to end as it would. The gate of a data folder is shut until `open_gate`.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sqlalchemy import text

from workers.process import database, stopping
from workflow.advantages import Credited, Earned, relative_to_group
from workflow.algorithms.grpo import grpo
from workflow.config import AlgorithmConfig
from workflow.hooks import Hook
from workflow.settings import settings
from workflow.tools import Tool
from workflow.trajectory import Episode

PATIENCE_SECONDS = 300.0
"""Longer than a test waits for anything, so that a test that forgot the gate fails by its own words."""

NUMBER = "SELECT number FROM iterations i JOIN episodes e ON e.iteration_id = i.id WHERE e.id = :id"


def at_gate(home: Path) -> bool:
    """Whether somebody came to the gate of this data folder."""
    return (home / "at-the-gate").exists()


def open_gate(home: Path) -> None:
    """Lets everybody through, now and later."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "gate-is-open").touch()


def wait() -> None:
    """Stands before the gate of this process's data folder."""
    home = settings().root
    (home / "at-the-gate").touch()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not ((home / "gate-is-open").exists() or stopping.is_set()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody opened the gate in {PATIENCE_SECONDS} s")
        time.sleep(0.02)


class AtStart(Hook):
    """Holds each group that a worker has claimed, before its first token."""

    def on_rollout_start(self, episode: Episode) -> None:
        """Nothing of the group has been sampled."""
        wait()


class InSecondIteration(Hook):
    """Holds the groups that are sampled with trained weights, before their first token."""

    def on_rollout_start(self, episode: Episode) -> None:
        """The first iteration goes through."""
        with database().read() as tx:
            number = tx.execute(text(NUMBER), {"id": episode.id}).scalar_one()
        if number:
            wait()


class AtSecondTurn(Hook):
    """Holds a group in the middle of its episodes."""

    def on_trace_start(self, episode: Episode) -> None:
        """A first turn is committed, with the results of its calls."""
        if episode.steps:
            wait()


class AfterSecondUpdate(Hook):
    """Holds the trainer, so that the run has two trained versions and gets no third."""

    def on_update_end(self, run: str, iteration: int, metrics: Mapping[str, float]) -> None:
        """The update is committed."""
        if iteration == 1:
            wait()


def plus(a: int, b: int) -> str:
    """Adds."""
    wait()
    return str(a + b)


held_plus = Tool(plus, timeout_seconds=PATIENCE_SECONDS)


def credit(earned: Earned, options: AlgorithmConfig) -> Credited:
    """GRPO's, by a trainer that has claimed the iteration."""
    wait()
    return relative_to_group(earned, options)


held_update = replace(grpo, name="held_update", credit=f"{__name__}:credit")
