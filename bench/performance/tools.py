"""Episodes of two tool calls and an answer, by tool latency: ours against TRL's, and against ourselves without latency.

Ours is the rollout of a run as a user submits it, from its dispatch to its last episode's commit: SQLite, Redis, a rollout
worker whose engine has half as many slots as there are episodes, and a tools worker, which runs up to 64 calls at once. TRL's
is `GRPOTrainer`'s generation with `tools=`, its tool loop and reward, all rows in one batch, nothing kept; it runs tools row
by row. The script of `lookup` is in the weights that both load. They take turns: each is idle while the other is at work.
"""

import statistics
import time
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.performance import lookup
from bench.performance.fleet import Fleet, fleet
from bench.performance.parrot import parrot
from bench.performance.report import Comparison, Measured, Table, load

ROUNDS = 3
"""A round takes more than a minute, most of it TRL's."""

GROUP_SIZE = 2
EPISODES = lookup.TASKS * GROUP_SIZE
SLOTS = EPISODES // 2
TOKENS = GROUP_SIZE * sum(lookup.length(task, turn) for task in range(lookup.TASKS) for turn in range(lookup.TURNS))
AGAINST = "TRL's GRPOTrainer with tools="

Rates = dict[int, tuple[list[float], list[float]]]
"""By latency: ours and theirs, an entry per round."""


def measure() -> Measured:
    """Episodes per second at each latency, on both sides."""
    with TemporaryDirectory(prefix="arl-bench-") as folder, fleet(AGENTRL_SLOTS=str(SLOTS)) as crew:
        model = parrot(Path(folder) / "parrot")
        for role in ("rollout,train", "tools", "control"):
            crew.worker(role)
        ours, theirs = Ours(crew, model), Theirs(model)
        ours.seconds(0), theirs.seconds(0)  # they load and warm up
        rates: Rates = {latency: ([], []) for latency in lookup.LATENCIES_MS}
        for _ in range(ROUNDS):
            for latency, (mine, others) in rates.items():
                mine.append(EPISODES / ours.seconds(latency))
                others.append(EPISODES / theirs.seconds(latency))
    return _told(rates)


def _told(rates: Rates) -> Measured:
    comparisons = [
        Comparison(f"tools, {latency} ms", ours, theirs, "episodes/s", AGAINST, "more")
        for latency, (ours, theirs) in rates.items()
    ]
    comparisons.append(Comparison("tools, 200 ms to none", rates[200][0], rates[0][0], "episodes/s", "agentrl at 0 ms", "more"))
    columns = ("tool latency, ms", "ours episodes/s", "TRL episodes/s", "ours tokens/s", "TRL tokens/s")
    rows = [[latency, *map(statistics.median, pair), *_tokens(pair)] for latency, pair in rates.items()]
    return Measured([Table(f"{EPISODES} episodes of {lookup.TURNS} turns, {SLOTS} slots", columns, rows, load())], comparisons)


def _tokens(pair: tuple[list[float], list[float]]) -> list[float]:
    return [statistics.median(rates) * TOKENS / EPISODES for rates in pair]


class Ours:
    """One iteration of a run, which no update follows since every episode is worth the same."""

    def __init__(self, crew: Fleet, model: Path) -> None:
        self._crew = crew
        self._model = model
        self._numbers = count()

    def seconds(self, latency_ms: int) -> float:
        """From the dispatch to the last episode's commit."""
        run = f"tools-{next(self._numbers)}"
        options = {
            "epochs": 1,
            "dataset.name": f"{lookup.__name__}:dataset",
            "env": f"{lookup.__name__}:env_{latency_ms}",
            "model.path": str(self._model),
            "model.lora_r": 0,
            "rollout.group_size": GROUP_SIZE,
            "rollout.tasks_per_iteration": lookup.TASKS,
        }
        self._crew.submit(run, options)
        self._crew.wait_for(run)
        [row] = self._crew.rows(f"SELECT rollout_seconds, sampled_tokens, tool_calls FROM v_iterations WHERE run = '{run}'")
        assert (row[1], row[2]) == (TOKENS, EPISODES * (lookup.TURNS - 1)), row
        return float(row[0])


class Theirs:
    """TRL's generation with tools, for all prompts at once."""

    def __init__(self, model: Path) -> None:
        from bench.performance.grpo import trainer

        prompts = [lookup.question(task) for task in range(lookup.TASKS)]
        longest = lookup.TURNS * (lookup.LONGEST + 64)
        self._latency_ms = 0
        self._inputs = [{"prompt": [{"role": "user", "content": text}]} for text in prompts for _ in range(GROUP_SIZE)]
        self._trainer = trainer(model, prompts, GROUP_SIZE, _same, tools=[self.look], max_completion_length=longest)
        self._trainer.model.train()

    def look(self, key: str) -> str:
        """Looks a word up.

        Args:
            key: the word.
        """
        return lookup.waiting(self._latency_ms)(key)

    def seconds(self, latency_ms: int) -> float:
        """Of its generation, tool loop and rewards."""
        self._latency_ms = latency_ms
        began = time.perf_counter()
        made = self._trainer._generate_and_score_completions(self._inputs)
        seconds = time.perf_counter() - began
        assert int((made["tool_mask"] * made["completion_mask"]).sum()) == TOKENS
        return seconds


def _same(completions: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(completions)
