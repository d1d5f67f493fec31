"""The world of `world.py`, with as many iterations as one asks for, and tools that take a while, so that calls are hit too."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from agentrl.workflow.config import RunConfig, build
from agentrl.workflow.envs import Env
from agentrl.workflow.hooks import Hook
from agentrl.workflow.tools import Tool
from agentrl.workflow.trajectory import Episode
from bench.faults import world

CALL_SECONDS = 0.3
LIMIT_SECONDS = 3.0
"""On a busy machine a call must not time out: the model would be told so, and say something else."""


def plus(a: int, b: int) -> str:
    """Adds."""
    time.sleep(CALL_SECONDS)
    return world.plus(a, b)


def note(digit: int) -> str:
    """Writes a digit down."""
    time.sleep(CALL_SECONDS)
    return world.note(digit)


plus_tool = Tool(plus, timeout_seconds=LIMIT_SECONDS)
note_tool = Tool(note, effects="once", timeout_seconds=LIMIT_SECONDS)
slow = Env(tools=(f"{__name__}:plus_tool", f"{__name__}:note_tool"))


class AtWork(Hook):
    """Leaves a file named after each process that has a model in memory and works with it."""

    def on_trace_start(self, episode: Episode) -> None:
        """A sampler."""
        _note_process()

    def on_update_end(self, run: str, iteration: int, metrics: Mapping[str, float]) -> None:
        """A trainer."""
        _note_process()


def at_work_folder() -> Path:
    """Where these files lie."""
    return Path(os.environ["AGENTRL_FAULT_DIR"]).parent / "work"


def _note_process() -> None:
    (at_work_folder() / str(os.getpid())).touch()


def config(model: Path, iterations: int, numerics: str) -> RunConfig:
    """The run; `numerics` is `exact` or `fast` (float32 on a CPU)."""
    changed = {
        "env": f"{__name__}:slow",
        "hooks": (*world.config(model, seed=0).hooks, f"{__name__}:AtWork"),
        "dataset.max_tasks": iterations * world.GROUPS,
        "model.numerics": numerics,
    }
    return build(world.config(model, seed=0).flat() | changed)
