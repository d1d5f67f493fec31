"""Rollouts and updates that wait for each other: a run with these ends only if the ones go on during the others.

The episodes of an iteration begin when the update before it has begun; that update ends when every group of them is claimed.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sqlalchemy import text

from agentrl.workers.stack.process import database
from agentrl.workflow.algorithms.grpo import grpo
from agentrl.workflow.config import AlgorithmConfig
from agentrl.workflow.settings import settings
from agentrl.workflow.training.advantages import Advantages, TokenRewards, relative_to_group
from agentrl.workflow.trajectory import Episode
from bench.faults import world

PATIENCE_SECONDS = 200.0
NUMBER = "SELECT number FROM iterations i JOIN episodes e ON e.iteration_id = i.id WHERE e.id = :id"
CLAIMED = """
    SELECT count(*) FROM groups g JOIN iterations i ON i.id = g.iteration_id
    WHERE i.number = :number AND g.status <> 'planned'"""


def begun(root: Path, number: int) -> Path:
    """The file that an update makes when it begins."""
    return root / "stack" / f"update-{number}"


def credit(earned: TokenRewards, options: AlgorithmConfig) -> Advantages:
    """GRPO's, once the next iteration's rollouts were all claimed."""
    root = settings().root
    (root / "stack").mkdir(exist_ok=True)
    number = sum(1 for _ in (root / "stack").glob("update-*"))
    begun(root, number).touch()
    if number + 1 < world.ITERATIONS:
        _wait(lambda: _one(CLAIMED, number=number + 1) == world.GROUPS, "the next iteration's claims")
    return relative_to_group(earned, options)


class Patient(world.Chance):
    """Rewards chance, too."""

    def on_rollout_start(self, episode: Episode) -> None:
        """Waits for the update before this iteration to begin."""
        number = _one(
            "SELECT number FROM iterations i JOIN episodes e ON e.iteration_id = i.id WHERE e.id = :id", id=episode.id
        )
        if number:
            _wait(begun(settings().root, number - 1).exists, f"update {number - 1}")


def _one(query: str, **parameters: object) -> int:
    with database().read() as tx:
        return int(tx.execute(text(query), parameters).scalar_one())


def _wait(met: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not met():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not begin in {PATIENCE_SECONDS} s")
        time.sleep(0.02)


meeting = replace(grpo, name="meeting", credit=f"{__name__}:credit")
