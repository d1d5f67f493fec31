"""`python -m bench.learning.learn_agents`: does an agent of one's own learn as the built-in loop does (`make learn-agent`)?

The built-in loop and the agent of `examples/openai_agent` train the tiny model on `arithmetic` with three seeds, agents on
other libraries with one, as `learn_algorithms` trains GRPO: 96 iterations of 16 tasks x 8 episodes on a stack of its own. Rows
of agent, seed, iteration and reward come into `build/learn_agent.json`, a table into `build/learn_agent.md`; called again it
goes on with the runs that are not there. Exits with 1, and says why, where a run did not end, or one of the three seeds of the
built-in loop or of the example ends below 0.9.

`openai-fit` is the example again, trained by `agentrl.Trainer(...).fit(agent=solve)`.

`--only openai,smolagents`, `--seeds 0` and `--jobs 2` choose. Agents whose calls are text begin from a warm start of their own.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.learning.curves import GOAL, WINDOW, Curve, Summary, load, summed_up, table
from bench.learning.learn_algorithms import BUILD, COMMON, SEEDS, played, run_all, warm_start
from bench.learning.other_agents import write_texts

ROOT = Path(__file__).parents[2]
ROWS, TABLE = BUILD / "learn_agent.json", BUILD / "learn_agent.md"
TEXTS = BUILD / "learn" / "texts.jsonl"


@dataclass(frozen=True, slots=True)
class Way:
    """Who decides the turns of an episode.

    Args:
        agent: what `submit --agent` is given; empty: the built-in loop.
        seeds: those that it is trained with.
        texts: whether its calls are text.
        module: the program that trains it, in place of `submit`.
    """

    agent: str
    seeds: Sequence[int] = SEEDS
    texts: bool = False
    module: str = ""


WAYS = {
    "built-in": Way(""),
    "openai": Way("examples.openai_agent.agent:solve"),
    "openai-fit": Way("examples.openai_agent.agent:solve", (0,), module="bench.learning.fit_agent"),
    "openai-async": Way("examples.openai_agent.agent:solve_async", (0,)),
    "langgraph": Way("bench.learning.langgraph_agent:solve", (0,)),
    "smolagents": Way("bench.learning.smolagents_agent:solve", (0,), texts=True),
    "text-tools": Way("bench.learning.text_tools_agent:solve", (0,), texts=True),
}
JUDGED = ("built-in", "openai", "openai-fit")


def main() -> int:
    """Plays it; the exit code."""
    asked = _arguments()
    BUILD.mkdir(exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # for the workers
    starts = {texts: _start(texts) for texts in {WAYS[name].texts for name in asked.only}}
    made = load(ROWS, "agent")
    kept = [curve for curve in made if curve.options == typed(curve.algorithm)]
    wanted = [(name, seed) for name in asked.only for seed in WAYS[name].seeds if seed in asked.seeds]
    missing = [run for run in wanted if run not in {(curve.algorithm, curve.seed) for curve in kept}]
    print(f"{len(wanted)} runs, {len(missing)} of them not made yet, {asked.jobs} at once", flush=True)

    def learn(name: str, seed: int) -> Curve:
        start = starts[WAYS[name].texts]
        weights = hashlib.sha256(_weights(start)).hexdigest()[:12]
        return played(name, typed(name), seed, start, weights, WAYS[name].module)

    wrong = run_all(missing, learn, kept, asked.jobs, ROWS, "agent")
    found = summed_up(kept)
    if found:
        TABLE.write_text("\n".join(table(found, "agent")) + "\n")
    wrong += failures(found)
    print("", *table(found, "agent"), "", *differences(kept), *wrong, f"load {os.getloadavg()[0]:.1f}", sep="\n")
    return 1 if wrong else 0


def typed(name: str) -> str:
    """What is typed for an agent after `agentrl submit`, but for the seed."""
    way = WAYS[name]
    words = [f"tiny-{TEXTS.stem}" if way.texts and word == "tiny" else word for word in COMMON]
    return " ".join([*words, *(("--agent", way.agent) if way.agent else ())])


def failures(found: Sequence[Summary]) -> list[str]:
    """What was promised and is not so."""
    return [
        f"{one.algorithm}: the last {WINDOW} iterations of a seed average {min(one.ends):.3f}, less than {GOAL}"
        for one in found
        if one.algorithm in JUDGED and min(one.ends) < GOAL
    ]


def differences(curves: Sequence[Curve]) -> list[str]:
    """How far each of the example's curves is from the built-in loop's of the same seed."""
    by_run = {(curve.algorithm, curve.seed): curve.rewards for curve in curves}
    both = [seed for name, seed in by_run if name == "openai" and ("built-in", seed) in by_run]
    lines = []
    for seed in sorted(both):
        apart = [abs(a - b) for a, b in zip(by_run["openai", seed], by_run["built-in", seed], strict=True)]
        equal = f"{sum(not each for each in apart)} of {len(apart)} iterations with equal rewards"
        lines.append(f"openai beside built-in, seed {seed}: {equal}, at most {max(apart):.3f} apart")
    return lines


def _start(texts: bool) -> Path:
    if not texts:
        return warm_start()
    if not TEXTS.exists():
        write_texts(TEXTS)
    return warm_start(("--dataset", str(TEXTS), "--model", "tiny"), f"tiny-{TEXTS.stem}")


def _weights(start: Path) -> bytes:
    return (start / "model.safetensors").read_bytes()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Does an agent of one's own learn?")
    parser.add_argument("--only", type=lambda words: words.split(","), default=list(WAYS), metavar="NAME,NAME")
    parser.add_argument("--seeds", type=lambda words: [int(word) for word in words.split(",")], default=SEEDS, metavar="N,N")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), metavar="N")
    asked = parser.parse_args()
    if unknown := set(asked.only) - set(WAYS):
        parser.error(f"no agent is called {', '.join(sorted(unknown))}; there are {', '.join(WAYS)}")
    return asked


if __name__ == "__main__":
    sys.exit(main())
