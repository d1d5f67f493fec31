"""`python -m bench.faults.killed_sampler`: what a kill -9 of the sampling process costs, beside TRL (`make killed-sampler`).

Each round trains four times from the same weights: agentrl undisturbed, agentrl killed, TRL undisturbed, TRL killed. A killed
run loses its sampling process in the middle of generation, in the iterations and after the shares of `KILLS`. agentrl is the
embedded stack with its default leases and ticks; its supervisor starts the worker again. TRL samples in the trainer's process;
TRL has no supervisor, so this program starts the same command again at once, as systemd or docker would.

Of each kill the table says which part of the iteration was sampled, how many sampled tokens were thrown away and sampled again,
the seconds from the kill to the next sampled token, and the seconds by which the iteration took longer than undisturbed.

Writes `build/killed_sampler.json`. Exits with 1 if the weights of a killed run of agentrl differ from the undisturbed run's.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import text

from bench.faults import calculator_run
from bench.faults.sampled_log import FILE, Iteration, read_iterations
from tests.support.real_stack import Stack

KILLS = ((1, 0.25), (2, 0.5), (3, 0.9))
"""Iteration (from 0), and the share of its tokens that are sampled when the process is killed."""

USUAL = {"AGENTRL_LEASE_SECONDS": "30", "AGENTRL_TICK_SECONDS": "2", "AGENTRL_THREADS": "1"}
ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 900.0
POLL_SECONDS = 0.01
WEIGHTS = "SELECT p.sha256 FROM policies p ORDER BY version"
SAMPLED = "SELECT sampled_tokens FROM v_iterations ORDER BY iteration"


@dataclass(frozen=True)
class Played:
    """One run, to its end.

    Args:
        iterations: what its log says of each.
        kills: seconds on the monotonic clock of each kill.
        weights: a hash of the trained weights; of agentrl, of every version.
        restarts: how often this program had to start something again.
    """

    iterations: tuple[Iteration, ...]
    kills: tuple[float, ...]
    weights: tuple[str, ...]
    restarts: int


@dataclass(frozen=True)
class Kill:
    """What one kill cost."""

    side: str
    share: float
    lost_tokens: int
    lost_share: float
    seconds_to_token: float
    seconds_longer: float


def main() -> int:
    """Play the rounds, write the file and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.killed_sampler", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--model", type=Path, help="folder of the model that both sides train; unset: the quickstart's is made first"
    )
    parser.add_argument("--json", type=Path, default=Path("build/killed_sampler.json"))
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # not without ending what was started
    kills: list[Kill] = []
    same: dict[str, list[bool]] = {"agentrl": [], "TRL": []}
    restarts = dict.fromkeys(same, 0)
    load = [os.getloadavg()[0]]
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="arl-killed-", dir="/tmp") as folder:
        model = asked.model or make_model(Path(folder) / "made")
        for number in range(asked.rounds):
            for side, play in (("agentrl", play_agentrl), ("TRL", play_trl)):
                calm = play(Path(folder) / f"{side}-{number}-calm", model, [])
                killed = play(Path(folder) / f"{side}-{number}-killed", model, moments(calm))
                kills += costs(side, calm, killed)
                same[side].append(calm.weights == killed.weights)
                restarts[side] += killed.restarts
                load.append(os.getloadavg()[0])
                found = {"kills": [asdict(kill) for kill in kills], "same_weights": same, "restarts": restarts, "load": load}
                asked.json.write_text(json.dumps(found, indent=1))
                print(f"round {number}, {side}: {found['kills'][-len(KILLS) :]}", flush=True)
    print(table(kills))
    print(f"same weights as undisturbed: {same}; started again by this program: {restarts}; load {min(load)} to {max(load)}")
    return int(not all(same["agentrl"]))


def make_model(folder: Path) -> Path:
    """The quickstart's warm start: the model that both sides train."""
    stack = Stack(folder, **USUAL)
    stack.agentrl("sft", "--dataset", "arithmetic", "--model", "tiny", "--steps", "250")
    return folder / "models" / "tiny-arithmetic"


def moments(calm: Played) -> list[tuple[int, int]]:
    """The kills, as iteration and tokens sampled in it."""
    return [(iteration, int(share * calm.iterations[iteration].tokens)) for iteration, share in KILLS]


def costs(side: str, calm: Played, killed: Played) -> list[Kill]:
    """What each kill cost, in the order of the kills."""
    return [_cost(side, number, calm, killed, at) for (number, _), at in zip(KILLS, killed.kills, strict=True)]


def _cost(side: str, number: int, calm: Played, killed: Played, at: float) -> Kill:
    needed, steps = calm.iterations[number].tokens, killed.iterations[number].steps
    before = sum(count for moment, count in steps if moment <= at)
    lost = killed.iterations[number].tokens - needed
    return Kill(
        side,
        share=round(before / needed, 3),
        lost_tokens=lost,
        lost_share=round(lost / before, 3),
        seconds_to_token=round(min(moment for moment, _ in steps if moment > at) - at, 2),
        seconds_longer=round(_seconds(killed, number) - _seconds(calm, number), 2),
    )


def _seconds(played: Played, number: int) -> float:
    """From the update before an iteration to its own."""
    return played.iterations[number].updated - played.iterations[number - 1].updated


def play_agentrl(home: Path, model: Path, kills: Sequence[tuple[int, int]]) -> Played:
    """`agentrl submit` on the embedded stack; nothing is started again by hand."""
    home.mkdir()
    log = home / "sampled"
    stack = Stack(home, **USUAL, PYTHONPATH=str(ROOT), **{FILE: str(log)})
    try:
        chosen = [
            word for key, value in calculator_run.options(str(model)).items() for word in ("-s", f"{key}={json.dumps(value)}")
        ]
        stack.agentrl("submit", "--detach", "--name", "run", *chosen)
        at = strike(log, kills, lambda: next(iter(stack.workers("rollout,train")), None), lambda: None)
        stack.wait_for("run")
        with stack.database.read() as tx:
            stored = [int(row[0]) for row in tx.execute(text(SAMPLED))]
            weights = tuple(str(row[0]) for row in tx.execute(text(WEIGHTS)))
    finally:
        stack.close()
    iterations = tuple(read_iterations(log)[: calculator_run.UPDATES])
    counted = [iteration.tokens for iteration in iterations]
    assert (counted == stored) if not kills else all(c >= s for c, s in zip(counted, stored, strict=True)), (counted, stored)
    shutil.rmtree(home)
    return Played(iterations, at, weights, 0)


def play_trl(folder: Path, model: Path, kills: Sequence[tuple[int, int]]) -> Played:
    """TRL's trainer as a program; started again at once when it is killed."""
    shutil.copytree(model, folder)
    log = folder / "sampled"
    command = [sys.executable, "-m", "bench.faults.killed_trl", str(folder), str(log), str(calculator_run.UPDATES)]
    running: list[subprocess.Popen[bytes]] = []

    def keep() -> None:
        if not running or running[-1].poll() not in (None, 0):
            assert len(running) <= len(kills), (folder / "log").read_text()[-3000:]
            with (folder / "log").open("ab") as output:
                environment = os.environ | {"OMP_NUM_THREADS": USUAL["AGENTRL_THREADS"], "HF_HUB_OFFLINE": "1"}
                running.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))

    try:
        at = strike(log, kills, lambda: running[-1].pid, keep)
        while running[-1].poll() is None:
            time.sleep(POLL_SECONDS)
        assert running[-1].returncode == 0, (folder / "log").read_text()[-3000:]
    finally:
        for process in running:
            process.kill()
            process.wait()
    last = folder / "trl" / f"checkpoint-{calculator_run.UPDATES}" / "model.safetensors"
    weights = (hashlib.sha256(last.read_bytes()).hexdigest(),)
    iterations = tuple(read_iterations(log)[: calculator_run.UPDATES])
    shutil.rmtree(folder)
    return Played(iterations, at, weights, len(running) - 1)


def strike(
    log: Path, kills: Sequence[tuple[int, int]], victim: Callable[[], int | None], keep: Callable[[], None]
) -> tuple[float, ...]:
    """Kill the victim at each moment, until all updates are made; return the times of the kills.

    Args:
        log: of the run's tokens and updates.
        kills: iteration, and tokens sampled in it.
        victim: returns the pid of the process that samples.
        keep: is called again and again, to start what nobody else starts.
    """
    at: list[float] = []
    deadline = time.monotonic() + LIMIT_SECONDS
    while len(iterations := read_iterations(log)) <= calculator_run.UPDATES:
        assert time.monotonic() < deadline, f"{len(iterations) - 1} updates after {LIMIT_SECONDS:g} s"
        keep()
        if len(at) < len(kills):
            iteration, tokens = kills[len(at)]
            assert len(iterations) - 1 <= iteration, f"iteration {iteration} was over before its kill"
            if len(iterations) - 1 == iteration and iterations[-1].tokens >= tokens and (pid := victim()):
                at.append(time.monotonic())
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return tuple(at)


def table(kills: Sequence[Kill]) -> str:
    """One line per side and moment: medians over the rounds, with the lowest and the highest."""
    lines = [
        "| side | sampled at the kill | tokens sampled again | of those sampled | s to the next token | s longer |",
        "|---|---|---|---|---|---|",
    ]
    for side in dict.fromkeys(kill.side for kill in kills):
        mine = [kill for kill in kills if kill.side == side]
        for number in range(len(KILLS)):
            rows = mine[number :: len(KILLS)]
            columns = [
                [getattr(row, name) for row in rows]
                for name in ("share", "lost_tokens", "lost_share", "seconds_to_token", "seconds_longer")
            ]
            cells = [f"{statistics.median(column):g} ({min(column):g} to {max(column):g})" for column in columns]
            lines.append(f"| {side} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
