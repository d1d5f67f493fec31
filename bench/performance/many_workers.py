"""The capacity of one Postgres and one Redis: 64 rollout threads, 256 tools threads and 4 trainers, with a million episodes.

All parts are real (jobs, messages, commits, the control loop) except the model: turns are scripted, and an update computes
nothing. The workers are the threads of eight processes: two for rollouts, one for tools, one for each trainer, and one with
the control loop. There is one run for each trainer. The runs have enough groups to keep every rollout worker busy. On a machine
with few cores, the workers' own computing reaches its limit first. So the tables have the processor time of Postgres and of
Redis for each episode.

It is measured only when asked for: the store fills in some 20 minutes, and takes 13 GB with its log.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch
from uuid import uuid4

from sqlalchemy import text

from agentrl.workers.requests import submit
from agentrl.workers.stack import broker
from agentrl.workflow.config import build
from agentrl.workflow.store import planning
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.planning import Submission
from bench.performance import scripted_plugins, synthetic
from bench.performance.databases import analyse, one_postgres, server_processor
from bench.performance.fleet import Fleet, fleet
from bench.performance.report import Measured, Table, load
from bench.performance.scripted_plugins import CALLS, TURN_SECONDS
from bench.performance.store_costs import COLUMNS, Costs, measure_control, measure_operations
from bench.performance.worker_phases import (
    LONG_WAIT_MS,
    Phase,
    Sessions,
    Usage,
    count_rows,
    expected_rows,
    lock_waits,
    of_runs,
    phase_tables,
)
from tests.support.small_models import tiny_random

GROUP_SIZE = 8
ROLLOUT_PROCESSES = 2
FILLED_TURNS = 2
"""The turns of an episode of the filled store, instead of `synthetic.TURNS`: with six, a million episodes take 40 GB."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a measurement.

    Attributes:
        rollouts, tools: the numbers of threads.
        trainers: the number of train workers, and of runs.
        finished: the number of finished episodes in the store, about.
        live: the number of episodes of the longest phase, about.
        turn_seconds: the duration of a turn in that phase.
        steps: the numbers of rollout threads of the phases whose turns take no time.
        stepped: the number of episodes of each of these phases, about.
        groups: the number of groups with which the operations are measured.
    """

    rollouts: int = 64
    tools: int = 256
    trainers: int = 4
    finished: int = 1_000_000
    live: int = 20_000
    turn_seconds: float = 4.0
    steps: Sequence[int] = (8, 16, 32, 64)
    stepped: int = 1_000
    groups: int = 100


def measure() -> Measured:
    """The operations alone, then the phases."""
    sizes = Sizes()
    with store(sizes) as (database, log, filled):
        print(f"filled in {filled:.0f} s", flush=True)
        return measure_on(database, log, sizes)


def measure_on(database: Database, log: Path, sizes: Sizes) -> Measured:
    """Measure the operations, then the phases, on a filled store."""
    costs = Costs(database)
    measure_control(costs, "a control pass over a run of all these episodes")
    planning.stop(database, "long", "paused")
    with workers(database, sizes, log) as simulation:
        costs.rows += simulation.measure_operations()
        operations = Table("operations of the store, one caller", COLUMNS, costs.rows, load())
        print(operations.shown(), flush=True)
        simulation.start()
        phases = [simulation.play(f"busy-{count}", count, sizes.stepped, 0.0) for count in sizes.steps]
        phases.append(simulation.play("paced", sizes.rollouts, sizes.live, sizes.turn_seconds))
    return Measured([operations, *phase_tables(phases)])


@contextmanager
def store(sizes: Sizes) -> Iterator[tuple[Database, Path, float]]:
    """A Postgres with `sizes.finished` episodes, the file of its log, and the seconds that it took to fill."""
    settings = {
        "log_lock_waits": "on",
        "deadlock_timeout": f"{LONG_WAIT_MS}ms",
        "log_line_prefix": "%p ",
        "max_wal_size": "8GB",
    }
    with one_postgres(**settings) as (database, log):
        began = time.perf_counter()
        _fill(database, sizes.finished)
        yield database, log, time.perf_counter() - began


def _fill(database: Database, episodes: int) -> None:
    """Fill the store with one long run, which is running, and the evaluations of every tenth version of it."""
    iterations = max(2, round(episodes / synthetic.PER_ITERATION / (1 + 1 / synthetic.EVAL_EVERY)))
    with patch.object(synthetic, "TURNS", FILLED_TURNS), database.engine.begin() as tx:
        synthetic.fill(tx, {"long": iterations})
    analyse(database)


@contextmanager
def workers(database: Database, sizes: Sizes, log: Path) -> Iterator["Simulation"]:
    """The workers on that store, none of which is started yet."""
    environment = {"AGENTRL_DATABASE_URL": database.url.render_as_string(hide_password=False), "AGENTRL_DEVICE": "cpu"}
    with TemporaryDirectory() as folder, fleet(**environment, AGENTRL_THREADS="1") as crew:
        yield Simulation(crew, database, tiny_random(Path(folder) / "model"), sizes, log)


@dataclass
class Simulation:
    """Workers without a model, and the phases that they play."""

    crew: Fleet
    database: Database
    model: Path
    sizes: Sizes
    log: Path
    _rollouts: list["Popen[bytes]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._passes = self.crew.home / "passes"
        self._passes.touch()

    def measure_operations(self) -> list[list[object]]:
        """Rows of a table, from a run that no worker serves."""
        made = planning.submit(self.database, self._submission("operations", 2, self.sizes.groups))
        rows = measure_operations(self.database, made.id).rows
        planning.stop(self.database, "operations", "cancelled")
        return rows

    def start(self) -> None:
        """Start all workers but the rollout workers."""
        started = [self._start("bench.performance.timed_control", str(self._passes))]
        started.append(self._start("agentrl.cli", "worker", "tools", "--concurrency", str(self.sizes.tools)))
        started += [self._start("agentrl.cli", "worker", "train") for _ in range(self.sizes.trainers)]
        self._wait_until_ready(started)

    def play(self, name: str, rollouts: int, episodes: int, turn_seconds: float) -> Phase:
        """Play one run for each trainer to its end, with so many rollout threads and about so many episodes."""
        self._change_rollouts(rollouts, turn_seconds)
        groups = max(1, 2 * rollouts // self.sizes.trainers)
        self._play(f"{name}-warm", 1, 1)  # each process loads the tokenizer
        iterations = max(1, round(episodes / (self.sizes.trainers * groups * GROUP_SIZE)))
        passes, logged = len(self._passes.read_text().splitlines()), self.log.stat().st_size
        before, sessions = self._usage(), Sessions(self.database)
        with sessions.watched():
            runs = self._play(name, iterations, groups)
        used = self._usage().since(before)
        phase = Phase(
            name,
            runs,
            len(runs) * iterations * groups * GROUP_SIZE,
            len(runs) * iterations * groups,
            len(runs) * iterations,
            used,
            [json.loads(line) for line in self._passes.read_text().splitlines()[passes:]],
            lock_waits(self.log, logged),
            sessions.seen,
            sessions.samples,
            sessions.most,
        )
        print(*(table.shown() for table in phase_tables([phase])), sep="\n", flush=True)
        counted = count_rows(self.database, phase)
        assert counted == expected_rows(phase), f"{counted}\n{expected_rows(phase)}"
        return phase

    def _play(self, name: str, iterations: int, groups: int) -> list[str]:
        submission = self._submission(name, iterations, groups)
        runs = [f"{name}-{number}" for number in range(self.sizes.trainers)]
        for run in runs:
            manifest = {**submission.manifest, "id": uuid4().hex}
            output = str(self.crew.home / "runs" / run)
            planning.submit(self.database, replace(submission.with_name(run), manifest=manifest, output_dir=output))
        self.crew.wait(partial(self._are_done, runs), f"the runs {runs}")
        return runs

    def _are_done(self, runs: Sequence[str]) -> bool:
        time.sleep(0.25)
        with self.database.read() as tx:
            query = of_runs("SELECT name, status, reason FROM runs WHERE name IN :runs")
            states = tx.execute(query, {"runs": list(runs)}).all()
        assert all(row.status in ("running", "done") for row in states), states
        return all(row.status == "done" for row in states)

    def _submission(self, name: str, iterations: int, groups: int) -> Submission:
        options = {
            "name": name,
            "iterations": iterations,
            "dataset.name": "arithmetic",
            "model.path": str(self.model),
            "model.lora_r": 0,
            "rollout.engine": f"{scripted_plugins.__name__}:engine",
            "rollout.group_size": GROUP_SIZE,
            "rollout.tasks_per_iteration": groups,
            "rollout.max_steps": CALLS + 1,
            "rollout.max_new_tokens": 2 * scripted_plugins.TURN_TOKENS,
            "rollout.last_turn": "plain",
            "update.trainer": f"{scripted_plugins.__name__}:trainer",
            "output_dir": str(self.crew.home / "runs" / name),
        }
        return submit.prepare(None, build(options)).submission

    def _change_rollouts(self, threads: int, turn_seconds: float) -> None:
        for process in self._rollouts:
            process.terminate()
        for process in self._rollouts:
            process.wait(60)
        each = str(threads // ROLLOUT_PROCESSES)
        command = ("agentrl.cli", "worker", "rollout", "--concurrency", each)
        started = [self._start(*command, **{TURN_SECONDS: str(turn_seconds)}) for _ in range(ROLLOUT_PROCESSES)]
        self._wait_until_ready(started)
        self._rollouts = [process for process, _ in started]

    def _start(self, *command: str, **environment: str) -> tuple["Popen[bytes]", Path]:
        ready = self.crew.home / f"{uuid4().hex}.ready"
        return self.crew.start(*command, AGENTRL_READY_FILE=str(ready), **environment), ready

    def _wait_until_ready(self, started: Sequence[tuple["Popen[bytes]", Path]]) -> None:
        self.crew.wait(lambda: all(ready.exists() for _, ready in started), "ready workers", 120.0)

    def _usage(self) -> Usage:
        with broker.connect_redis(self.crew.settings) as redis:
            info: Mapping[str, Any] = redis.info()
        with self.database.read() as tx:
            size = tx.execute(text("SELECT pg_database_size(current_database())")).scalar_one()
            query = text("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
            commits = tx.execute(query).scalar_one()
        return Usage(
            server_processor(self.database)(),
            info["used_cpu_user"] + info["used_cpu_sys"],
            self.crew.processor_seconds(),
            commits,
            size,
            info["total_commands_processed"],
            info["total_net_input_bytes"] + info["total_net_output_bytes"],
            info["used_memory"],
            time.perf_counter(),
        )
