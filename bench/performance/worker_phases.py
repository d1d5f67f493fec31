"""Phases of many workers: what they used, what they waited for, what they left in the store, and the tables of it."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

from sqlalchemy import TextClause, bindparam, text

from agentrl.workflow.store.connect import Database
from bench.performance.report import Table, load
from bench.performance.scripted_plugins import CALLS

LONG_WAIT_MS = 10
"""Postgres logs waits for a lock that are longer."""
LIMIT_MS = 50
"""The longest wait for a lock that is wanted."""
SAMPLE_SECONDS = 0.2
WAITED = re.compile(r"^(\d+) LOG:  process \d+ acquired (\w+) on .* after ([\d.]+) ms")
STATEMENT = re.compile(r"^(\d+) STATEMENT:\s+(.{0,60})")


@dataclass(frozen=True)
class Usage:
    """Counts since the servers started. Processor times are in seconds."""

    postgres: float
    redis: float
    workers: float
    commits: int
    stored_bytes: int
    redis_commands: int
    redis_bytes: int
    redis_memory: int
    at: float

    def since(self, before: "Usage") -> dict[str, float]:
        """The differences, by name."""
        return {name: value - getattr(before, name) for name, value in vars(self).items()}


@dataclass(frozen=True)
class Phase:
    """A number of runs that were played to their end.

    Attributes:
        name: as the tables have it.
        runs: the names of the runs.
        episodes, groups, iterations: of all runs.
        used: the differences of `Usage`.
        passes: the control loop's passes, as `timed_control` wrote them.
        waits: the waits for locks of more than `LONG_WAIT_MS`: milliseconds and the beginning of the statement.
        sessions: what the sessions of Postgres were seen to do, and how often: `computes`, or the type of what they wait for.
        samples: how often one looked.
        connections: the most sessions at once.
    """

    name: str
    runs: Sequence[str]
    episodes: int
    groups: int
    iterations: int
    used: Mapping[str, float]
    passes: Sequence[Mapping[str, float]]
    waits: Sequence[tuple[float, str]]
    sessions: Mapping[str, int]
    samples: int
    connections: int


@dataclass
class Sessions:
    """What the sessions of Postgres do, seen a few times a second."""

    database: Database
    seen: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    most: int = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch until the block ends."""
        over = Event()
        thread = Thread(target=self._watch, args=[over])
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _watch(self, over: Event) -> None:
        query = text("""
            SELECT CASE WHEN state = 'active' THEN coalesce(wait_event_type, 'computes') ELSE 'idle' END, count(*)
            FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() GROUP BY 1""")
        while not over.wait(SAMPLE_SECONDS):
            with self.database.read() as tx:
                counts = {row[0]: int(row[1]) for row in tx.execute(query)}
            self.samples += 1
            self.most = max(self.most, sum(counts.values()))
            self.seen.update(counts)


def lock_waits(log: Path, offset: int) -> list[tuple[float, str]]:
    """Return the waits for locks that Postgres logged after that byte: milliseconds and the beginning of the statement."""
    with log.open("rb") as file:
        file.seek(offset)
        lines = file.read().decode(errors="replace").splitlines()
    waits: list[tuple[float, str]] = []
    open_waits: dict[str, float] = {}
    for line in lines:
        if waited := WAITED.match(line):
            open_waits[waited[1]] = float(waited[3])
        elif (statement := STATEMENT.match(line)) and statement[1] in open_waits:
            waits.append((open_waits.pop(statement[1]), statement[2]))
    return sorted(waits, reverse=True)


OF_RUNS = "JOIN runs r ON r.id = t.run_id WHERE r.name IN :runs"
COUNTS = {
    "runs done": "SELECT count(*) FROM runs r WHERE r.name IN :runs AND r.status = 'done'",
    "iterations trained": f"SELECT count(*) FROM iterations t {OF_RUNS} AND t.status = 'done' AND t.trainable = t.episodes",
    "policies published": f"SELECT count(*) FROM policies t {OF_RUNS} AND t.version > 0",
    "groups done": f"SELECT count(*) FROM groups t {OF_RUNS} AND t.status = 'done'",
    "episodes done": f"SELECT count(*) FROM episodes t {OF_RUNS} AND t.status = 'done'",
    "turns": "SELECT count(*) FROM steps WHERE run IN :runs",
    "turns counted": f"SELECT sum(t.steps) FROM episodes t {OF_RUNS}",
    "calls answered once": "SELECT count(*) FROM tool_calls WHERE run IN :runs AND status = 'done' AND starts = 1",
    "calls counted": f"SELECT sum(t.tool_calls) FROM episodes t {OF_RUNS}",
    "rewards": "SELECT count(*) FROM rewards WHERE run IN :runs",
    "episodes trained": f"SELECT count(*) FROM consumptions t {OF_RUNS}",
}
"""By name: a query of rows of the runs `:runs`. Unique keys keep rows from being written twice; sums show what keys do not."""


def count_rows(database: Database, phase: Phase) -> dict[str, int]:
    """Return the number of rows of the phase, by the names of `COUNTS`."""
    with database.read() as tx:
        return {
            name: int(tx.execute(of_runs(query), {"runs": list(phase.runs)}).scalar_one()) for name, query in COUNTS.items()
        }


def of_runs(query: str) -> TextClause:
    """Return the statement of a query with a list of names, `:runs`."""
    return text(query).bindparams(bindparam("runs", expanding=True))


def expected_rows(phase: Phase) -> dict[str, int]:
    """Return these numbers if nothing was lost and nothing was done twice."""
    turns, calls = (CALLS + 1) * phase.episodes, CALLS * phase.episodes
    return {
        "runs done": len(phase.runs),
        "iterations trained": phase.iterations,
        "policies published": phase.iterations,
        "groups done": phase.groups,
        "episodes done": phase.episodes,
        "turns": turns,
        "turns counted": turns,
        "calls answered once": calls,
        "calls counted": calls,
        "rewards": phase.episodes,
        "episodes trained": phase.episodes,
    }


def phase_tables(phases: Sequence[Phase]) -> list[Table]:
    """What the phases reached, what each episode took, and what was waited for."""
    return [
        Table("what the workers reached", RATE_COLUMNS, [_rates(phase) for phase in phases], load()),
        Table("what an episode takes", SHARE_COLUMNS, [_shares(phase) for phase in phases], load()),
        Table("the control loop and the locks", WAIT_COLUMNS, [_waits(phase) for phase in phases], load()),
    ]


def _rates(phase: Phase) -> list[object]:
    seconds = phase.used["at"]
    per_second = [number / seconds for number in (phase.episodes, phase.groups, CALLS * phase.episodes, phase.used["commits"])]
    cores = [phase.used[name] / seconds for name in ("postgres", "redis", "workers")]
    return [phase.name, phase.episodes, seconds, *per_second, *cores]


def _shares(phase: Phase) -> list[object]:
    milliseconds = [1000 * phase.used[name] / phase.episodes for name in ("postgres", "redis", "workers")]
    counted = ("commits", "stored_bytes", "redis_commands", "redis_bytes", "redis_memory")
    return [phase.name, *milliseconds, *(phase.used[name] / phase.episodes for name in counted)]


def _waits(phase: Phase) -> list[object]:
    passes = sorted(1000 * one["seconds"] for one in phase.passes) or [0.0]
    computed = max((1000 * one["cpu"] for one in phase.passes), default=0.0)
    longest, statement = phase.waits[0] if phase.waits else (0.0, "")
    locks = [len(phase.waits), sum(wait > LIMIT_MS for wait, _ in phase.waits), longest]
    doing = [phase.sessions.get(name, 0) / max(phase.samples, 1) for name in ("computes", "Lock", "LWLock", "IO")]
    return [phase.name, passes[len(passes) // 2], passes[-1], computed, *locks, *doing, phase.connections, statement]


RATE_COLUMNS = (
    "phase", "episodes", "s", "episodes/s", "claims/s", "calls/s", "commits/s", "Postgres cores", "Redis cores", "worker cores",
)  # fmt: skip
SHARE_COLUMNS = (
    "phase", "Postgres ms", "Redis ms", "workers ms", "commits", "Postgres bytes", "Redis commands", "Redis traffic bytes",
    "Redis bytes kept",
)  # fmt: skip
WAIT_COLUMNS = (
    "phase", "pass ms", "longest", "longest cpu", f"waits over {LONG_WAIT_MS} ms", f"over {LIMIT_MS} ms", "longest ms",
    "sessions compute", "wait for locks", "for LWLocks", "for IO", "connections", "the statement that waited",
)  # fmt: skip
