"""A whole iteration, rollouts and update: ours with every token, reward and checkpoint kept, TRL's step with nothing kept.

Eight prompts of 64 tokens, eight samples each, no tools; the same weights and numbers of tokens on both sides, float32. Ours is
a run as a user submits it (SQLite, Redis, a rollout and train worker), measured from one commit of an update to the next; TRL's
is a step of `GRPOTrainer.train`, its generation and optimizer included, without gradient checkpointing. TRL's microbatch is the
fastest of a sweep. Both sides have one torch thread per core. They take turns: each waits while the other is at work.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.performance import digits, turnstile
from bench.performance.cases import Cases
from bench.performance.fleet import Fleet, fleet
from bench.performance.models import ModelName
from bench.performance.parrot import endless
from bench.performance.report import Comparison, Measured, Table, load

ROUNDS = 5
LEARNING_RATE = 1e-6
MICROBATCHES = (64, 16, 4)
"""The microbatches of TRL's sweep."""
SWEPT_STEPS = 3
"""TRL's steps with each microbatch of the sweep. The first one only warms up."""


@dataclass(frozen=True)
class Case:
    """What is measured.

    Args:
        model: which weights.
        tokens: sampled per episode.
        lora_r: rank of the adapters; 0 trains all weights.
    """

    model: ModelName
    tokens: int
    lora_r: int

    @property
    def name(self) -> str:
        """As the tables name it."""
        return f"iteration, {self.model}, {f'LoRA r={self.lora_r}' if self.lora_r else 'all weights'}"


CASES = (Case("tiny", 32, 0), Case("bench", 64, 8))


def measure() -> Measured:
    """Each case: seconds of an iteration and of its parts."""
    found, cases = [], Cases()
    with TemporaryDirectory(prefix="arl-bench-") as folder:
        for case in CASES:
            with cases.case(case.name):
                found.append(_measured(case, endless(case.model, Path(folder))))
    columns = ("what", "ours s", "rollout s", "update s", "TRL's microbatch", "TRL s", "ratio")
    rows = [*(row for row, _ in found), *cases.rows()]
    return Measured([Table("a whole iteration, medians", columns, rows, load())], [c for _, c in found], cases.unmeasured)


def _measured(case: Case, model: Path) -> tuple[list[object], Comparison]:
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    swept = {size: statistics.median(_steps_of_trl(case, model, size, SWEPT_STEPS)[1:]) for size in MICROBATCHES}
    print(case.name, {size: f"{seconds:.2f} s" for size, seconds in swept.items()}, flush=True)
    fastest = min(swept, key=lambda size: swept[size])
    with _held_run(case, model, threads) as crew:
        ours, theirs = _in_turns(case, model, crew, fastest)
        rows = crew.rows("SELECT rollout_seconds, update_seconds, sampled_tokens FROM v_iterations ORDER BY iteration")[2:]
    assert all(row[2] == digits.PROMPTS * digits.GROUP_SIZE * case.tokens for row in rows), rows
    parts = [statistics.median(float(row[column]) for row in rows) for column in (0, 1)]
    comparison = Comparison(case.name, ours, theirs, "s", "a step of TRL's GRPOTrainer", "less")
    return [case.name, statistics.median(ours), *parts, fastest, statistics.median(theirs), comparison.ratio], comparison


@contextmanager
def _held_run(case: Case, model: Path, threads: int) -> Iterator[Fleet]:
    """A run with one iteration more than is warmed up and measured, held after its first."""
    options = {
        "hooks": [f"{turnstile.__name__}:Turnstile"],
        "epochs": ROUNDS + 2,
        "dataset.name": f"{digits.__name__}:dataset",
        "model.path": str(model),
        "model.lora_r": case.lora_r,
        "rollout.group_size": digits.GROUP_SIZE,
        "rollout.tasks_per_iteration": digits.PROMPTS,
        "rollout.max_new_tokens": case.tokens,
        "rollout.max_steps": 1,
        "update.learning_rate": LEARNING_RATE,
    }
    with fleet(AGENTRL_THREADS=str(threads)) as crew:
        crew.worker("rollout,train")  # a control loop would send the next iteration while the run is held
        try:
            crew.submit("held", options)
            _reached(crew, 1)
            yield crew
        finally:
            (crew.home / turnstile.OPEN).touch()


def _reached(crew: Fleet, iteration: int) -> float:
    """When that iteration was committed; waits until it is."""
    file = turnstile.reached(crew.home, iteration)
    crew.wait(file.exists, f"iteration {iteration} being committed")
    return float(file.read_text())


def _in_turns(case: Case, model: Path, crew: Fleet, microbatch: int) -> tuple[list[float], list[float]]:
    """Seconds of our iterations and of TRL's steps, round by round, after one round that only warms up."""
    ours: list[float] = []

    def iterate() -> None:
        began = turnstile.let_on(crew.home, len(ours) + 1)
        ours.append(_reached(crew, len(ours) + 2) - began)

    theirs = _steps_of_trl(case, model, microbatch, ROUNDS + 1, iterate)
    return ours[1:], theirs[1:]


def _steps_of_trl(
    case: Case, model: Path, microbatch: int, steps: int, after_step: Callable[[], None] = lambda: None
) -> list[float]:
    """Seconds of each step of TRL's. `after_step` is called after each."""
    from transformers import TrainerCallback

    from bench.performance.grpo import trainer

    seconds: list[float] = []

    class Clock(TrainerCallback):
        """Reads the clock at both ends of a step."""

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            """Before anything of the step, its generation too."""
            self.began = time.monotonic()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            """After the optimizer."""
            seconds.append(time.monotonic() - self.began)
            after_step()

    trainer(
        model,
        [digits.question(task) for task in range(digits.PROMPTS)],
        digits.GROUP_SIZE,
        lambda completion_ids, **_: [digits.luck(ids) for ids in completion_ids],
        callbacks=[Clock()],
        lora_r=case.lora_r,
        microbatch=microbatch,
        max_completion_length=case.tokens,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
    ).train()
    return seconds
