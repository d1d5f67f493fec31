"""Decoding: our engine, what transformers has, the bare forward pass, and the floor that the products with weights set.

Rates are tokens per second of whole completions, prompts read and all, logprobs returned by ours alone. `equal`: as many rows
as slots, all of one length. `unequal`: four rows for each slot, lengths uniform in 16..256. `BENCH=full` adds what takes
minutes a round without a GPU; so does transformers' continuous batching, and all but two cases leave it to that.
"""

import os
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from agentrl.workflow.config import ModelConfig
from agentrl.workflow.models.policy import Policy
from bench.performance import samplers
from bench.performance.cases import Cases
from bench.performance.models import ModelName, saved
from bench.performance.report import Comparison, Measured, Table, load
from bench.performance.samplers import Sampler, Work
from bench.performance.timing import alternate

PROMPT_TOKENS = 16
SHORTEST, LONGEST = 16, 256
ROWS_PER_SLOT = 4
NAMES = {
    "generate": "transformers' generate",
    "continuous": "transformers' continuous batching",
    "bare": "the bare eager loop",
    "matmuls": "its matmuls alone",
}


@dataclass(frozen=True)
class Case:
    """What is measured.

    Args:
        model, dtype: the weights.
        slots: rows that are live at once.
        tokens: the length of each row; 0 for unequal ones.
        others: whom it is compared with.
        rounds: how often, in turns.
    """

    model: ModelName
    dtype: str
    slots: int
    tokens: int
    others: Sequence[str]
    rounds: int = 5

    @property
    def name(self) -> str:
        """As the tables call it."""
        return f"{self.model} {self.dtype}, {self.slots} slots, {'equal' if self.tokens else 'unequal'}"

    def work(self) -> Work:
        """The same for every side and every time."""
        draw = random.Random(0)
        rows = self.slots if self.tokens else ROWS_PER_SLOT * self.slots
        prompts = [tuple(draw.randrange(20, 300) for _ in range(PROMPT_TOKENS)) for _ in range(rows)]
        return Work(prompts, [self.tokens or draw.randint(SHORTEST, LONGEST) for _ in range(rows)], self.slots)


FLOOR = ("generate", "bare", "matmuls")
EVERYTHING = (*FLOOR, "continuous")

CASES = [
    Case("tiny", "float32", 8, 64, FLOOR),
    Case("tiny", "float32", 32, 64, EVERYTHING),
    Case("tiny", "float32", 128, 64, FLOOR),
    *(Case("bench", "float32", slots, tokens, FLOOR) for slots, tokens in ((8, 32), (32, 24), (128, 12))),
    *(Case("bench", "bfloat16", slots, tokens, FLOOR) for slots, tokens in ((8, 32), (32, 24), (128, 12))),
    Case("tiny", "float32", 8, 0, ("generate",)),
    Case("tiny", "float32", 32, 0, ("generate", "continuous")),
    Case("bench", "float32", 8, 0, ("generate",), rounds=3),
]
"""About five minutes on two cores."""

FULL = [
    Case("bench", "float32", 32, 64, EVERYTHING),
    Case("tiny", "float32", 128, 0, ("generate", "continuous")),
    Case("bench", "float32", 32, 0, ("generate", "continuous"), rounds=3),
    Case("bench", "bfloat16", 32, 0, ("generate",), rounds=3),
]
"""Rounds of minutes there."""


def measure() -> Measured:
    """Tokens per second of every side, and the share of each that ours reaches."""
    rows: list[list[object]] = []
    comparisons: list[Comparison] = []
    wanted, cases = [*CASES, *(FULL if os.environ.get("BENCH") == "full" else [])], Cases()
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: saved(name, Path(folder)) for name in {case.model for case in wanted}}
        for case in wanted:
            with cases.case(f"decode {case.name}"):
                rates = _rates(case, paths[case.model])
                print(case.name, {side: round(statistics.median(rate)) for side, rate in rates.items()}, flush=True)
                sides = ("ours", *NAMES)
                rows.append([case.name, *(statistics.median(rates[side]) if side in rates else "" for side in sides)])
                comparisons += [_compared(case, rates, other) for other in case.others]
    table = Table("decode, tokens/s, medians", ["", "ours", *NAMES.values()], [*rows, *cases.rows()], load())
    return Measured([table], comparisons, cases.unmeasured)


def _compared(case: Case, rates: dict[str, list[float]], other: str) -> Comparison:
    return Comparison(f"decode {case.name}", rates["ours"], rates[other], "tokens/s", NAMES[other], "more")


def _rates(case: Case, path: Path) -> dict[str, list[float]]:
    work = case.work()
    with _sides(case, path, work) as sides:
        taken = alternate(sides, case.rounds, warm_up=case.rounds > 3)
    return {side: [work.tokens / seconds for seconds in spent] for side, spent in taken.items()}


@contextmanager
def _sides(case: Case, path: Path, work: Work) -> Iterator[dict[str, Sampler]]:
    """The others on the model as transformers loads it; continuous batching alters its model and gets another."""
    policy = Policy.load(ModelConfig.model_validate({"lora_r": 0, "dtype": case.dtype}), str(path))
    model = _plain(case, path, policy.device)
    prepared = {"generate": samplers.generate, "bare": samplers.bare, "matmuls": samplers.matmuls}
    with ExitStack() as stack:
        sampler, engine = samplers.ours(policy, work)
        stack.callback(engine.close)
        sides = {"ours": sampler, **{other: prepared[other](model, work) for other in case.others if other in prepared}}
        if "continuous" in case.others:
            sides["continuous"], end = samplers.continuous(_plain(case, path, policy.device), work)
            stack.callback(end)
        yield sides


def _plain(case: Case, path: Path, device: torch.device) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, case.dtype))
    return model.to(device).eval()
