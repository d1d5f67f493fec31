"""A database of 100,000 episodes: does everything that is read answer within 100 ms, and what does a step cost to write?"""

import time
from functools import partial
from itertools import count
from statistics import median

from sqlalchemy import text

from tests.benchmarks import reads, synthetic, writes
from tests.benchmarks.databases import both
from tests.benchmarks.report import Comparison, Measured, Table, load
from tests.benchmarks.timing import alternate, p95
from workflow.store.connect import Database
from workflow.store.rollout import Fence

EPISODES = 100_000
LIMIT_MS = 100
REPETITIONS = 15


def measure() -> Measured:
    """Reads, questions over whole runs (for information), and writes."""
    with both() as databases:
        seconds = {name: _fill(database) for name, database in databases.items()}
        print("filled:", ", ".join(f"{name} in {taken:.0f} s" for name, taken in seconds.items()), flush=True)
        with databases["sqlite"].read() as tx:
            episodes = tx.execute(text("SELECT max(id) FROM episodes")).scalar_one()
            runs = [
                synthetic.Run(*row) for row in tx.execute(text("SELECT id, name, iterations, status = 'running' FROM runs"))
            ]
        looked_at = [run for run in runs if run.name in ("old", "large", "live")]
        shown = [
            _reads(databases, f"reads of {episodes} episodes, ms", reads.reads(looked_at, episodes)),
            _reads(databases, "the README's questions, over the run of 60%, ms (no limit set)", reads.questions("large")),
        ]
        return Measured(shown, _writes(databases))


def _fill(database: Database) -> float:
    began = time.perf_counter()
    with database.engine.begin() as tx:
        synthetic.fill(tx, EPISODES)
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        synthetic.settle(connection)
    return time.perf_counter() - began


def _reads(databases: dict[str, Database], title: str, wanted: dict[str, reads.Read]) -> Table:
    rows: list[list[object]] = []
    for name, read in wanted.items():
        taken = alternate({kind: partial(read, database) for kind, database in databases.items()}, REPETITIONS)
        slow = [kind for kind, seconds in taken.items() if 1000 * median(seconds) > LIMIT_MS]
        spread = (value for seconds in taken.values() for value in (min(seconds), median(seconds), p95(seconds)))
        rows.append([name, *(1000 * value for value in spread), *slow])
    columns = ["what", *(f"{kind} {value}" for kind in databases for value in ("least", "median", "p95")), "slow"]
    return Table(title, columns, [[*row, *[""] * (len(columns) - len(row))][: len(columns)] for row in rows], load())


def _writes(databases: dict[str, Database]) -> list[Comparison]:
    found = []
    for kind, database in databases.items():
        target = _target(database)
        for with_call in (False, True):
            ways = {"store": writes.through_store(database, with_call), "driver": writes.by_driver(database, with_call)}
            taken = alternate({way: partial(_many, write, target) for way, write in ways.items()}, 2 * REPETITIONS)
            rates = {way: [writes.STEPS / seconds for seconds in taken[way]] for way in ways}
            what = f"steps written to {kind}, {'T1, result, T2' if with_call else 'T1'}"
            found.append(Comparison(what, rates["store"], rates["driver"], "steps/s", "the bare driver", "more", "the store"))
    return found


def _many(write: writes.Write, target: writes.Target) -> None:
    for _ in range(writes.STEPS):
        write(target)


def _target(database: Database) -> writes.Target:
    """An episode of the running run's open iteration."""
    query = """
        SELECT e.group_id, g.attempt, e.id, i.policy_id, e.steps FROM episodes e JOIN groups g ON g.id = e.group_id
        JOIN iterations i ON i.id = g.iteration_id WHERE g.status = 'running' ORDER BY e.id LIMIT 1"""
    with database.read() as tx:
        group, attempt, episode, policy_id, steps = tx.execute(text(query)).one()
    return writes.Target(Fence(group, attempt), episode, policy_id, count(steps))
