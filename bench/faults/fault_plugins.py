"""What the fault matrix plugs into runs of the fault loop's world: tools that take long, losses that are no numbers, and so on.

The model of `bench.faults.world` calls `plus` in its first turn and `note` in its second; here both have other insides.
"""

import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.workflow.algorithms import Algorithm
from agentrl.workflow.algorithms.grpo import grpo
from agentrl.workflow.config import AlgorithmConfig, build
from agentrl.workflow.datasets import Dataset
from agentrl.workflow.envs import Env
from agentrl.workflow.settings import settings
from agentrl.workflow.tools import Tool
from agentrl.workflow.training.losses import TokenBatch, clipped
from bench.faults import world
from tests.support import gate

tasks = Dataset(load=world.load, env=world.tasks.env)


def adding(wait: Callable[[], object]) -> Callable[..., str]:
    """`plus`, which waits first."""

    def plus(a: int, b: int) -> str:
        """Adds."""
        wait()
        return str(a + b)

    return plus


def deaf() -> None:
    """Ignores every signal that may be ignored, in a process of its own, and hangs."""
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
        time.sleep(3)
        os._exit(0)
    os.waitpid(pid, 0)


def delivered_again() -> bool:
    """Whether more groups were asked for than the first iteration has: a message came twice."""
    claims = Path(os.environ["AGENTRL_FAULT_DIR"]) / "claim_group.before"
    return claims.stat().st_size > world.GROUPS


again_plus = Tool(adding(lambda: gate.until(delivered_again)), timeout_seconds=gate.PATIENCE_SECONDS)
deaf_plus = Tool(adding(lambda: time.sleep(3)), timeout_seconds=0.5)
NOTE = "bench.faults.world:note_tool"
held = Env(tools=("tests.support.gate:held_plus", NOTE))
again = Env(tools=(f"{__name__}:again_plus", NOTE))
hanging = Env(tools=(f"{__name__}:deaf_plus", NOTE))


def not_a_number(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """A loss that is NaN, and so is its gradient."""
    per_token, cut = clipped(batch, options)
    return per_token * math.nan, cut


def greedy(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """As a GPU on which one row has room."""
    if len(batch.mask) > 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    with (settings().root / "rows").open("a") as rows:
        rows.write("1")
    return clipped(batch, options)


def full(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """As a GPU on which nothing has room."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def _with(surrogate: Callable[..., Any]) -> Algorithm:
    return replace(grpo, name=surrogate.__name__, surrogate=f"{__name__}:{surrogate.__name__}")


nan_loss, greedy_loss, full_loss = _with(not_a_number), _with(greedy), _with(full)


class Harmful:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (Path.touch, (self.file,))


def impatient(roles: list[str]) -> None:
    """A worker on a Redis that gives what is not acknowledged within a second to the next who asks."""
    from agentrl.workers.stack.celery_app import app
    from agentrl.workers.stack.worker import run

    app.conf.broker_transport_options |= {"visibility_timeout": 1, "unacked_restore_interval": 1}
    run(roles)


def submit(model: str, changes: dict[str, Any]) -> None:
    """A run of the world, with changes to its config, written and sent as the command does it."""
    from agentrl.workers.requests.submit import prepare
    from agentrl.workers.requests.submit import submit as send
    from agentrl.workflow.store.migrate import open_database

    database = open_database(settings().database)
    send(database, prepare(database, build({**plain(Path(model)), **changes})))
    database.close()


def plain(model: Path) -> dict[str, Any]:
    """The world's run: 3 iterations of 2 groups of 2 episodes of 2 turns."""
    return {
        "name": world.RUN,
        "epochs": 1,
        "env": world.tasks.env,
        "hooks": ("bench.faults.world:Chance",),
        "dataset.name": f"{__name__}:tasks",
        "dataset.max_tasks": world.ITERATIONS * world.GROUPS,
        "model.path": str(model),
        "rollout.tasks_per_iteration": world.GROUPS,
        "rollout.group_size": world.EPISODES,
        "rollout.max_steps": world.TURNS,
        "rollout.last_turn": "plain",
        "rollout.max_new_tokens": 24,
    }
