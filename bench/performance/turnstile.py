"""A hook that holds a run between two iterations until it is let on, so that another program can have the machine meanwhile.

It stands after an update's commit and before the next iteration is sent: from one time that it is reached to the next, less the
time that it was held, is what an iteration takes.
"""

import time
from collections.abc import Mapping
from pathlib import Path

from agentrl.workflow.hooks import Hook
from agentrl.workflow.settings import settings

PAUSE_SECONDS = 0.005
OPEN = "open"
"""A file of this name lets everybody through."""


class Turnstile(Hook):
    """Writes `reached.N` into the data folder and waits for `on.N`."""

    def on_update_end(self, run: str, iteration: int, metrics: Mapping[str, float]) -> None:
        """Holds the train job, and with it the run."""
        home = settings().root
        beside = home / f"reached.{iteration}.new"
        beside.write_text(str(time.monotonic()))
        beside.rename(reached(home, iteration))
        while not ((home / f"on.{iteration}").exists() or (home / OPEN).exists()):
            time.sleep(PAUSE_SECONDS)


def reached(home: Path, iteration: int) -> Path:
    """The file that is there once that iteration's update is committed; it holds when, on the monotonic clock."""
    return home / f"reached.{iteration}"


def let_on(home: Path, iteration: int) -> float:
    """Lets the run go on after that iteration; the moment of it on the monotonic clock."""
    moment = time.monotonic()
    (home / f"on.{iteration}").touch()
    return moment
