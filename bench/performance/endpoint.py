"""What the way through the endpoint costs: a call against the sampler's own time for the same turn, a whole run, memory.

The calls are made by an agent in its own process, one after the other, through the endpoint, into the rollout worker and back,
each committed before it is released; the sampler's own time is that of the same turn, as its row has it. Whole runs are
arithmetic by the built-in loop and by the agent of `examples/openai_agent`, in turns, also with `agent.reuse`: with the tiny
model, whose turns cost less than a process, and with a wide one of 38M parameters. The processor time of an episode is that of
all worker processes and of the agents that they start.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.performance.calling_agent import CALLS
from bench.performance.cases import Cases
from bench.performance.endpoint_sessions import SESSIONS, kib_per_session
from bench.performance.fleet import Fleet, fleet, seconds
from bench.performance.models import saved
from bench.performance.report import Comparison, Measured, Table, load
from bench.performance.timing import p95
from tests.support.small_models import tiny_calling

WARM = 2
"""Calls of each episode that only warm up."""
ROUNDS, WIDE_ROUNDS = 20, 20
"""Pairs of runs, after one that warms up; and of those that take longer."""
SMALL: dict[str, Any] = {"epochs": 1, "rollout.tasks_per_iteration": 1, "dataset.name": "arithmetic"}
CALLING = SMALL | {"algorithm.name": "reinforce", "rollout.max_new_tokens": 16}
WHOLE_RUN: dict[str, Any] = {
    "epochs": 1,
    "dataset.name": "arithmetic",
    "rollout.tasks_per_iteration": 8,
    "rollout.group_size": 8,
    "dataset.max_tasks": 8,
    "rollout.max_new_tokens": 32,
}
COLUMNS = (
    "what an agent waits for",
    "calls",
    "median ms",
    "p95 ms",
    "the sampler's own: median ms",
    "more: median ms",
    "p95",
    "p99",
    "ratio",
    "95% from",
    "to",
)


def measure() -> Measured:
    """Calls one after the other, answered whole and streamed; runs of whole episodes; open calls."""
    cases, rows = Cases(), []
    comparisons: list[Comparison] = []
    tables: list[Table] = []
    with TemporaryDirectory() as folder, fleet() as crew:
        tiny = {"model.path": str(tiny_calling(Path(folder) / "tiny", layers=4, width=128))}
        bench = {"model.path": str(saved("bench", Path(folder))), "model.lora_r": 8}
        for role in ("rollout,train", "tools", "control", "agents", "endpoint"):
            crew.worker(role)
        for what, kind, model, episodes in (
            ("tiny, a whole answer of 16 tokens", "whole", tiny, 16),
            ("bench, the first token of a stream", "streamed", bench, 6),
        ):
            with cases.case(f"endpoint, {what}"):
                rows.append([what, *_row(*_calls(crew, kind, CALLING | model | {"dataset.max_tasks": episodes}))])
        called = load()
        with cases.case("endpoint, episodes of a run"):
            wide = {"model.path": str(tiny_calling(Path(folder) / "wide", layers=12, width=512)), "model.lora_r": 8}
            for name, own, rounds in (("tiny", tiny, ROUNDS), ("wide", wide, WIDE_ROUNDS)):
                measured, spent = _runs(crew, name, {**WHOLE_RUN, **own}, rounds)
                comparisons += measured
                tables.append(Table(f"processor ms of an episode, {name}", ("by", "median", "least", "most"), spent, load()))
            pairs = [[f"{each.name}, {each.what}", len(each.ours), *_bounds(each.ours, each.other)] for each in comparisons]
            columns = ("runs", "pairs", *COLUMNS[-3:])
            tables.append(Table("episodes/s of an agent to the built-in loop's", columns, pairs, load()))
    with cases.case("endpoint, memory"):
        memory = [[SESSIONS, kib_per_session()]]
        tables.append(Table("memory of the endpoint", ("open calls", "KiB each"), memory, load()))
    calls = Table("calls through the endpoint", COLUMNS, [*rows, *cases.rows()], called)
    return Measured([calls, *tables], comparisons, unmeasured=cases.unmeasured)


def _row(waited: Sequence[float], own: Sequence[float]) -> list[float]:
    """The numbers of `COLUMNS`."""
    more = [1e3 * (one - other) for one, other in zip(waited, own, strict=True)]
    ours, engine = ([1e3 * value for value in column] for column in (waited, own))
    return [len(waited), median(ours), p95(ours), median(engine), median(more), p95(more), _p99(more), *_bounds(waited, own)]


def _calls(crew: Fleet, kind: str, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """(seconds that the agents waited, seconds that the sampler took for the same turns).

    Agents run one at a time, since a call that waits for another's turn measures that.
    """
    waited: list[float] = []
    own: list[float] = []
    name = f"calls-{kind}"
    agent = {"agent.name": f"bench.performance.calling_agent:{kind}"}
    crew.submit(name, options | agent | {"rollout.group_size": 1})
    crew.wait_for(name)
    answers = crew.rows(f"SELECT episode_id, answer FROM agent_attempts WHERE run = '{name}' ORDER BY episode_id")
    for episode, answer in answers:
        turns = crew.rows(f"SELECT generate_seconds FROM steps WHERE episode_id = {episode} ORDER BY number")
        assert len(turns) == CALLS, f"episode {episode} has {len(turns)} turns"
        waited += json.loads(answer)[WARM:]
        own += [taken for (taken,) in turns[WARM:]]
    return waited, own


def _runs(crew: Fleet, model: str, options: dict[str, Any], rounds: int) -> tuple[list[Comparison], list[list[object]]]:
    """Episodes per second of the built-in loop, of an agent and of one that keeps its process, in turns; and the rows of the
    table of processor time.
    """
    agent: dict[str, Any] = {"agent.name": "examples.openai_agent.agent:solve"}
    kinds: dict[str, dict[str, Any]] = {
        "loop": {"rollout.max_steps": 4},
        "agent": agent,
        "reuse": agent | {"agent.reuse": True},
    }
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    spent: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for kind, more in kinds.items():
            name = f"{model}-{kind}-{number}"
            before = crew.processor_seconds()
            crew.submit(name, options | more)
            crew.wait_for(name)
            rows = crew.rows(
                "SELECT min(g.started_at), max(e.finished_at), count(*) FROM episodes e JOIN groups g ON g.id = e.group_id"
                f" JOIN runs r ON r.id = e.run_id WHERE r.name = '{name}' GROUP BY e.iteration_id"
            )
            taken = sum(seconds(last) - seconds(first) for first, last, _ in rows)
            episodes = sum(count for *_, count in rows)
            if number:
                rates[kind].append(episodes / taken)
                spent[kind].append(1e3 * (crew.processor_seconds() - before) / episodes)
    name = f"arithmetic, {model} model, 8 x 8 episodes per iteration, rollouts alone"
    whats = {"agent": "an agent on the openai SDK", "reuse": "the same with agent.reuse"}
    comparisons = [
        Comparison(name, rates[kind], rates["loop"], "episodes/s", "the built-in loop", "more", what)
        for kind, what in whats.items()
    ]
    whats = {"loop": "the built-in loop", **whats}
    return comparisons, [[whats[kind], median(ms), min(ms), max(ms)] for kind, ms in spent.items()]


def _bounds(ours: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """The median of the pairs' ratios, and an interval of at least 95% for it: the sign test's, whatever their distribution."""
    ratios = sorted(one / two for one, two in zip(ours, other, strict=True))
    beyond = max(0, int(len(ratios) / 2 - 0.98 * len(ratios) ** 0.5) - 1)
    return median(ratios), ratios[beyond], ratios[-1 - beyond]


def _p99(values: list[float]) -> float:
    return sorted(values)[-1 - len(values) // 100]
