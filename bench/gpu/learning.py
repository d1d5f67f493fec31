"""Runs that learn, through the stack's jobs, queues and database: workers as threads of this process, a broker in memory.

`learn_tiny` is quickstart's model on arithmetic. `learn_smollm` is the model file given to `make gpu-wheels`, on sums whose
answer is to be a number alone. Each iteration is a row as soon as it is committed. When the time is over, the run is paused
as by Ctrl-C.
"""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import agentrl
from agentrl.workflow.datasets.arithmetic import arithmetic
from agentrl.workflow.models.dequantise import dequantise
from agentrl.workflow.models.lookup import TINY
from agentrl.workflow.training.supervised import default_recipe, sft
from bench.gpu import model_file
from bench.gpu.part import Part, Row
from bench.performance.models import saved

QUICKSTART = {"learning_rate": 4e-4, "epochs": 1, "update": {"decay": "cosine"}, "eval": {"every": 32, "tasks": 256}}
WARM_UP_STEPS = 250
SMOLLM = {
    "learning_rate": 2e-4,
    "lora_r": 16,
    "group_size": 8,
    "tasks_per_iteration": 16,
    "max_new_tokens": 24,
    "max_steps": 1,
    "epochs": 100,
}
SMALL = {
    "learning_rate": 3e-3,
    "lora_r": 0,
    "group_size": 4,
    "tasks_per_iteration": 4,
    "max_new_tokens": 8,
    "max_steps": 1,
    "max_tasks": 40,
    "epochs": 1,
}
"""Without a GPU."""
STOP_SECONDS = 20.0
"""Time to pause the run and to stop its workers."""
ENDS = 3
"""The mean reward of so many iterations at the begin is compared with that of as many at the end."""


def measure(part: Part) -> None:
    """Add the rows of one run: the model, each iteration, and whether it learned."""
    with tempfile.TemporaryDirectory(prefix="learn-") as folder:
        if part.name == "learn_smollm":
            model: dict[str, Path] = {}
            row = part.attempt("model", lambda: _convert_model(part, model))
            if row is not None:
                part.attempt("run", lambda: _learn(part, model["folder"], Path(folder), _sums(), SMOLLM if part.gpu else SMALL))
        elif part.gpu:
            warm = Path(folder) / "model"
            if part.attempt("warm-up", lambda: _warm_up(warm)) is not None:
                part.attempt("run", lambda: _learn(part, warm, Path(folder), "arithmetic", QUICKSTART))
        else:
            part.attempt("run", lambda: _learn(part, saved("tiny", Path(folder)), Path(folder), _sums(), SMALL))


def digits(episode: agentrl.Episode) -> float:
    """Return the share of the answer's characters that are digits."""
    answer = episode.final_answer.strip()
    return sum(character.isdigit() for character in answer) / max(1, len(answer))


def exact(episode: agentrl.Episode) -> float:
    """Return 1 if the answer is the right number and nothing else."""
    return float(episode.final_answer.strip() == episode.task.reference)


def _sums() -> list[dict[str, str]]:
    pairs = [(a, b) for a in range(1, 13) for b in range(1, 13)]
    return [{"question": f"What is {a} plus {b}? Answer with the number alone.", "answer": str(a + b)} for a, b in pairs]


def _warm_up(folder: Path) -> Row:
    began = time.perf_counter()
    sft(arithmetic, TINY, folder, recipe=replace(default_recipe(TINY, full=True), steps=WARM_UP_STEPS))
    return {"steps": WARM_UP_STEPS, "seconds": time.perf_counter() - began}


def _convert_model(part: Part, model: dict[str, Path]) -> Row:
    """Convert the model file of `gpu-2` and `gpu-3`, unless an earlier call did."""
    began = time.perf_counter()
    file = model_file.join(part.files, part.files / "gpu-models")
    model["folder"] = file.with_suffix("")
    converted = not (model["folder"] / "config.json").exists()
    if converted:
        partial = file.with_suffix(".partial")
        dequantise(file, partial)
        partial.rename(model["folder"])
    return {"name": file.stem, "converted": converted, "seconds": time.perf_counter() - began}


class Watch(agentrl.Hook):
    """Add a row for each update and evaluation; interrupt the run when the part's time is over."""

    def __init__(self, part: Part) -> None:
        """Take the part."""
        self._part = part
        self._before = time.perf_counter()
        self._interrupted = False
        self.rewards: list[float] = []

    def on_update_end(self, run: str, iteration: int, metrics: Mapping[str, float]) -> None:
        """Add the iteration's row."""
        now = time.perf_counter()
        self.rewards.append(metrics["reward"])
        names = ("reward", "grad_norm", "sampler_difference_mean", "sampler_difference_max")
        row: Row = {name: float(metrics[name]) for name in names if name in metrics}
        self._part.add(f"iteration {iteration}", row | {"seconds": now - self._before})
        self._before = now
        if self._part.left < STOP_SECONDS and not self._interrupted:
            self._interrupted = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # Ctrl-C pauses the run

    def on_eval_end(self, run: str, version: int, metrics: Mapping[str, float]) -> None:
        """Add the evaluation's row."""
        self._part.add(
            f"held out, version {version}", {name: float(metrics[name]) for name in ("mean", "low", "high", "episodes")}
        )


def _learn(part: Part, model: Path, folder: Path, dataset: Any, options: Mapping[str, Any]) -> Row:
    watch = Watch(part)
    rewards: dict[str, Any] = {} if isinstance(dataset, str) else {"rewards": {digits: 0.5, exact: 0.5}}
    trainer = agentrl.Trainer(model=model, store=folder / "store", strategy="threads", hooks=[watch], **rewards, **options)
    began = time.perf_counter()
    with suppress(KeyboardInterrupt), open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        trainer.fit(train_dataset=dataset)
    seconds = time.perf_counter() - began
    first, last = (sum(some) / max(1, len(some)) for some in (watch.rewards[:ENDS], watch.rewards[-ENDS:]))
    row: Row = {"iterations": len(watch.rewards), "first": first, "last": last, "seconds": seconds}
    learned = len(watch.rewards) >= 2 * ENDS and last > first
    return row if learned else row | {"failed": f"fewer than {2 * ENDS} iterations, or the reward did not rise"}
