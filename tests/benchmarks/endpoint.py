"""What the way through the endpoint costs: a call against the sampler's own time for the same turn, and a whole run.

The calls are made by an agent in its own process, one after the other, through the endpoint, into the rollout worker and back,
each committed before it is released; the sampler's own time is that of the same turn, as its row has it. Whole runs are
arithmetic with the tiny model, by the built-in loop and by the agent of `examples/openai_agent`, in turns.
"""

import json
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.calling_agent import CALLS
from tests.benchmarks.cases import Cases
from tests.benchmarks.fleet import Fleet, fleet, seconds
from tests.benchmarks.report import Comparison, Measured, Table, load
from tests.benchmarks.timing import p95
from tests.support.small_models import tiny_calling

EPISODES = 16
WARM = 2
"""Calls of each episode that only warm up."""
ROUNDS = 5
SMALL: dict[str, Any] = {"epochs": 1, "rollout.tasks_per_iteration": 1, "dataset.name": "arithmetic", "dataset.max_samples": 1}
CALLING = SMALL | {"rollout.group_size": EPISODES, "rollout.max_new_tokens": 16}
WHOLE_RUN: dict[str, Any] = {
    "epochs": 1,
    "dataset.name": "arithmetic",
    "rollout.tasks_per_iteration": 8,
    "rollout.group_size": 8,
    "dataset.max_samples": 16,
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
)


def measure() -> Measured:
    """Calls one after the other, answered whole and streamed; runs of whole episodes."""
    cases, rows, comparisons = Cases(), [], []
    with TemporaryDirectory() as folder, fleet() as crew:
        model = {"model.path": str(tiny_calling(Path(folder) / "tiny", layers=4, width=128))}
        for role in ("rollout,train", "tools", "control", "agents", "endpoint"):
            crew.worker(role)
        for kind, what in (("whole", "a whole answer of 16 tokens"), ("streamed", "the first text of a stream")):
            with cases.case(f"endpoint, {kind}"):
                waited, own = _calls(crew, kind, CALLING | model)
                more = [1e3 * (one - other) for one, other in zip(waited, own, strict=True)]
                ms = [[1e3 * value for value in column] for column in (waited, own)]
                rows.append([what, len(waited), median(ms[0]), p95(ms[0]), median(ms[1]), median(more), p95(more), _p99(more)])
        with cases.case("endpoint, episodes of a run"):
            comparisons.append(_runs(crew, WHOLE_RUN | model))
    tables = [Table("calls through the endpoint", COLUMNS, [*rows, *cases.rows()], load())]
    return Measured(tables, comparisons, unmeasured=cases.unmeasured)


def _calls(crew: Fleet, kind: str, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """(seconds that the agents waited, seconds that the sampler took for the same turns; for its first token where streamed).

    Agents run one at a time, since a call that waits for another's turn measures that.
    """
    waited, own = [], []
    name = f"calls-{kind}"
    agent = {"agent.name": f"tests.benchmarks.calling_agent:{kind}"}
    crew.submit(name, options | agent | {"rollout.group_size": 1, "dataset.max_samples": EPISODES})
    crew.wait_for(name)
    answers = crew.rows(f"SELECT episode_id, answer FROM agent_attempts WHERE run = '{name}' ORDER BY episode_id")
    for episode, answer in answers:
        turns = crew.rows(f"SELECT generate_seconds, sampled_tokens FROM steps WHERE episode_id = {episode} ORDER BY number")
        assert len(turns) == CALLS, f"episode {episode} has {len(turns)} turns"
        waited += json.loads(answer)[WARM:]
        own += [taken / (tokens if kind == "streamed" else 1) for taken, tokens in turns[WARM:]]
    return waited, own


def _runs(crew: Fleet, options: dict[str, Any]) -> Comparison:
    """Episodes per second of the built-in loop and of an agent, in turns."""
    agent = {"agent.name": "examples.openai_agent.agent:solve"}
    rates: dict[str, list[float]] = {"loop": [], "agent": []}
    for number in range(ROUNDS + 1):
        for kind, more in (("loop", {"rollout.max_steps": 4}), ("agent", agent)):
            name = f"{kind}-{number}"
            crew.submit(name, options | more)
            crew.wait_for(name)
            rows = crew.rows(
                "SELECT min(g.started_at), max(e.finished_at), count(*) FROM episodes e JOIN groups g ON g.id = e.group_id"
                f" JOIN runs r ON r.id = e.run_id WHERE r.name = '{name}' GROUP BY e.iteration_id"
            )
            taken = sum(seconds(last) - seconds(first) for first, last, _ in rows)
            if number:
                rates[kind].append(sum(count for *_, count in rows) / taken)
    name = "arithmetic, tiny model, 8 x 8 episodes per iteration, rollouts alone"
    return Comparison(
        name, rates["agent"], rates["loop"], "episodes/s", "the built-in loop", "more", "an agent on the openai SDK"
    )


def _p99(values: list[float]) -> float:
    return sorted(values)[-1 - len(values) // 100]
