"""`python -m bench.learning.learn_real`: do real pretrained models learn (`make learn-real`)?

Each cell trains one model with one seed, by the commands that a user types, on an embedded stack of its own. Held-out tasks are
counted before and after, greedily; the policy after is the last one, not the best, and the test split is read for nothing else.
A cell takes hours on a small machine: it goes on where it was after Ctrl-C, and one whose result is in `docs/results/` is not
run again. `docs/results.md` gets a table and a picture of all results that are there.

`make learn-real smollm=FOLDER qwen=FOLDER` takes folders or hub names; without a model its cells are left out.
`only=sums,gsm8k` and `seeds=0` choose.
"""

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sqlalchemy import text

from agentrl.workers.stack import embedded
from agentrl.workflow.sandbox.proc import processor_seconds
from agentrl.workflow.stats.evaluation import wilson_interval
from agentrl.workflow.store.reads import run_rows
from bench.learning import results
from tests.support.real_stack import Stack, children_of

BUILD = Path("build/learn-real")
RUN = "learn"
MODELS = {"smollm": "SmolLM2-135M-Instruct", "qwen": "Qwen2.5-Coder-0.5B-Instruct"}
TRAIN, TEST = "train.jsonl", "test.jsonl"


@dataclass(frozen=True)
class Cell:
    """One line of the table: what is trained, how, and how often. Its config is fixed: a changed cell is another cell.

    Args:
        model: a name of `MODELS`.
        iterations: its length, without and with a GPU; 0: it needs a GPU.
        seeds: one run each.
        words: what is typed after `agentrl submit`, but for the model, the length and the seed.
        held_out: what is typed after `agentrl eval`, but for the policy.
        data: writes the cell's datasets into a folder; None: they are the shipped ones.
        trainer: `agentrl`, or `trl`: TRL's own training script with the same data, rewards and budget.
    """

    model: str
    iterations: tuple[int, int]
    seeds: tuple[int, ...]
    words: tuple[str, ...]
    held_out: tuple[str, ...]
    data: Callable[[Path], None] | None = None
    trainer: str = "agentrl"


def write_sums(folder: Path) -> None:
    """Write 320 sums to train on and 131 others to test: two numbers from 10 to 99, each pair once, in an order of its own."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    rows = [{"question": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)} for a, b in pairs[:451]]
    for name, part in ((TRAIN, rows[:320]), (TEST, rows[320:])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part))


SUMS = ("--env", "plain", "--reward", "numeric_answer")
SUMS_TRAINED = (
    *("--dataset", TRAIN, *SUMS, "--group-size", "8", "--tasks-per-iteration", "8"),
    *("--max-new-tokens", "16", "--max-steps", "1", "--learning-rate", "1e-4"),
)
SUMS_TESTED = ("--dataset", TEST, *SUMS, "--max-new-tokens", "16", "--max-steps", "1", "--greedy")
GSM8K_PLAIN = (
    *("--dataset", "gsm8k", "--env", "plain", "--reward", "numeric_answer"),
    *("--max-new-tokens", "320", "--max-steps", "1"),
)
HALF = ("-s", "model.dtype=bfloat16")
GSM8K = ("--dataset", "gsm8k", "--env", "math", "--max-new-tokens", "160", "--max-steps", "4")

CELLS = {
    "sums": Cell("smollm", (120, 120), (0, 1), SUMS_TRAINED, SUMS_TESTED, write_sums),
    "sums-trl": Cell("smollm", (120, 120), (0, 1), SUMS_TRAINED, SUMS_TESTED, write_sums, "trl"),
    "sums-bfloat16": Cell("smollm", (0, 120), (0, 1, 2), (*SUMS_TRAINED, *HALF), SUMS_TESTED, write_sums),
    "sums-bfloat16-uncorrected": Cell(
        "smollm",
        (0, 120),
        (0, 1, 2),
        (*SUMS_TRAINED, *HALF, "-s", "algorithm.importance=none"),
        SUMS_TESTED,
        write_sums,
    ),
    "arithmetic": Cell(
        "qwen",
        (30, 100),
        (0,),
        ("--dataset", "arithmetic", "--group-size", "8", "--tasks-per-iteration", "4", "--max-new-tokens", "64"),
        ("--dataset", "arithmetic", "-n", "64", "--max-new-tokens", "64", "--greedy"),
    ),
    "gsm8k": Cell(
        "qwen",
        (30, 100),
        (0,),
        (*GSM8K, "--group-size", "4", "--tasks-per-iteration", "4"),
        (*GSM8K, "-n", "64", "--greedy"),
    ),
    "gsm8k-plain": Cell(
        "qwen",
        (0, 80),
        (0,),
        (*GSM8K_PLAIN, "--group-size", "8", "--tasks-per-iteration", "8"),
        (*GSM8K_PLAIN, "-n", "256", "--greedy"),
    ),
    "code_tiny": Cell(
        "qwen",
        (20, 100),
        (0,),
        ("--dataset", "code_tiny", "--group-size", "4", "--tasks-per-iteration", "4", "--max-new-tokens", "160"),
        ("--dataset", "code_tiny", "-n", "64", "--max-new-tokens", "160", "--greedy"),
    ),
}


def main() -> int:
    """Play the cells that are asked for; return the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the processor time up to then is kept
    asked = _arguments()
    models = {name: _absolute(given) for name, given in (("smollm", asked.smollm), ("qwen", asked.qwen)) if given}
    for name, cell in CELLS.items():
        for seed in cell.seeds:
            file = results.FOLDER / f"{name}-{seed}.json"
            if name in asked.only and seed in asked.seeds and cell.model in models and _length(cell) and not file.exists():
                found = play(name, seed, models[cell.model], cell, BUILD / f"{name}-{seed}")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(found, indent=1) + "\n")
    results.write_page()
    return 0


def play(name: str, seed: int, model: str, cell: Cell, folder: Path) -> dict[str, Any]:
    """Train one cell with one seed, or go on with it; return its result."""
    folder.mkdir(parents=True, exist_ok=True)
    if cell.data is not None:
        cell.data(folder)
    with closing(Stack((folder / "home").resolve(), AGENTRL_LEASE_SECONDS="60", AGENTRL_THREADS="0")) as stack:
        before = _once(folder / "before.json", lambda: _evaluate(stack, folder, model, cell))
        with processor_time(stack, folder):
            train = _train_with_trl if cell.trainer == "trl" else _train
            policy = train(stack, folder, model, cell, seed)
        after = _evaluate(stack, folder, policy, cell)
        rewards, seconds = _curve(stack, folder, cell)
        return {
            "cell": name,
            "seed": seed,
            "model": MODELS[cell.model],
            "trainer": cell.trainer,
            "typed": " ".join(cell.words),
            "iterations": _length(cell),
            "held_out": {"typed": " ".join(cell.held_out), "before": before, "after": after},
            "rewards": rewards,
            "seconds": seconds,
            "processor_seconds": json.loads((folder / "processor.json").read_text()),
            **provenance(),
        }


def provenance() -> dict[str, Any]:
    """The code and the machine that made a result."""
    return {
        "commit": subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], text=True).strip(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {_gpu()}",
        "load": os.getloadavg()[1],
    }


def _length(cell: Cell) -> int:
    return cell.iterations[torch.cuda.is_available()]


def _gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def _train(stack: Stack, folder: Path, model: str, cell: Cell, seed: int) -> str:
    """Train with agentrl; return the policy's name."""
    length = ("--iterations", str(_length(cell)), "--seed", str(seed))
    status = run_rows.describe_run(stack.database, RUN)["status"] if _has_run(stack) else ""
    if status == "":
        _type(stack, folder, "submit", "--model", model, *cell.words, *length, "--name", RUN, "--wait")
    elif status != "done":
        _type(stack, folder, "resume", RUN, "--wait")
    return RUN


def _train_with_trl(stack: Stack, folder: Path, model: str, cell: Cell, seed: int) -> str:
    """Train with TRL's own trainer; return the folder of the merged model."""
    out = (folder / "trl").resolve()
    if not (out / "config.json").exists():
        words = (model, str((folder / TRAIN).resolve()), str(out), str(seed), str(_length(cell)))
        subprocess.run([sys.executable, "-m", "bench.learning.trl_sums", *words], check=True)
    return str(out)


def _evaluate(stack: Stack, folder: Path, policy: str, cell: Cell) -> Mapping[str, Any]:
    said = json.loads(_type(stack, folder, "eval", "--policy", policy, *cell.held_out, "--json"))
    count, right = said["episodes"], said["accuracy"]
    if right is None:  # the reward is 1 or 0
        return {"n": count, "mean": said["mean_reward"], "low": said["low"], "high": said["high"]}
    low, high = wilson_interval(right, count)
    return {"n": count, "mean": right, "low": low, "high": high}


def _curve(stack: Stack, folder: Path, cell: Cell) -> tuple[list[float], float]:
    """The mean reward of each iteration, and the seconds of all of them."""
    if cell.trainer == "trl":
        found = json.loads((folder / "trl" / "curve.json").read_text())
        return found["rewards"], found["seconds"]
    query = f"SELECT mean_reward, seconds FROM v_iterations WHERE run = '{RUN}' AND status = 'done' ORDER BY iteration"
    with stack.database.read() as tx:
        rows = tx.execute(text(query)).all()
    return [row.mean_reward for row in rows], sum(row.seconds for row in rows)


def _type(stack: Stack, folder: Path, *words: str) -> str:
    """Run a command in the cell's folder, whose progress the terminal gets; return its stdout."""
    print("== agentrl", *words, file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "agentrl.cli", *words]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))}
    return subprocess.run(
        command, cwd=folder, env={**stack.environment, **path}, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def _has_run(stack: Stack) -> bool:
    with stack.database.read() as tx:
        return bool(tx.execute(text("SELECT count(*) FROM runs WHERE name = :name"), {"name": RUN}).scalar_one())


def _once(file: Path, make: Callable[[], Mapping[str, Any]]) -> Any:
    """What was made and kept before, or is made now."""
    if not file.exists():
        file.write_text(json.dumps(make()))
    return json.loads(file.read_text())


@contextmanager
def processor_time(stack: Stack, folder: Path) -> Iterator[None]:
    """Add the processor seconds of the stack and of this process's children to the cell's sum, also at Ctrl-C and SIGTERM."""
    file, began = folder / "processor.json", _spent(stack)
    try:
        yield
    finally:
        before = json.loads(file.read_text()) if file.exists() else 0.0
        file.write_text(json.dumps(before + _spent(stack) - began))


def _spent(stack: Stack) -> float:
    supervisor = embedded.find_supervisor(stack.settings)
    workers = [supervisor, *children_of(supervisor)] if supervisor else []
    own = os.times()
    return own.children_user + own.children_system + sum(map(processor_seconds, workers))


def _absolute(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _names(word: str) -> list[str]:
    unknown = set(word.split(",")) - CELLS.keys()
    if unknown:
        raise argparse.ArgumentTypeError(f"no cell {', '.join(sorted(unknown))}; there are {', '.join(CELLS)}")
    return word.split(",")


def _numbers(word: str) -> list[int]:
    return [int(number) for number in word.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--smollm", help="SmolLM2-135M-Instruct: a folder or a hub name")
    parser.add_argument("--qwen", help="Qwen2.5-Coder-0.5B-Instruct: a folder or a hub name")
    parser.add_argument("--only", type=_names, default=list(CELLS), help="these cells, with commas")
    parser.add_argument("--seeds", type=_numbers, default=[0, 1, 2], help="these seeds, with commas")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
