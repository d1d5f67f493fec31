"""A database of 100,000 episodes: does everything that is read answer within 100 ms, and what does a step cost to write?"""

import time
from functools import partial
from itertools import count

from sqlalchemy import text

from bench import reads, synthetic, writes
from bench.databases import both
from bench.report import Table, load
from bench.timing import Spread, alternate
from workflow.store.connect import Database
from workflow.store.rollout import Fence

EPISODES = 100_000
LIMIT_MS = 100
REPETITIONS = 15


def measure() -> list[Table]:
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
        return [
            _reads(databases, f"reads of {episodes} episodes, ms", reads.reads(looked_at, episodes)),
            _reads(databases, "the README's questions, over the run of 60%, ms (no limit set)", reads.questions("large")),
            _writes(databases),
        ]


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
        spreads = alternate({kind: partial(read, database) for kind, database in databases.items()}, REPETITIONS)
        slow = [kind for kind, spread in spreads.items() if 1000 * spread.median > LIMIT_MS]
        rows.append(
            [name, *(1000 * value for spread in spreads.values() for value in (spread.least, spread.median, spread.p95)), *slow]
        )
    columns = ["what", *(f"{kind} {value}" for kind in databases for value in ("least", "median", "p95")), "slow"]
    return Table(title, columns, [[*row, *[""] * (len(columns) - len(row))][: len(columns)] for row in rows], load())


def _writes(databases: dict[str, Database]) -> Table:
    rows: list[list[object]] = []
    for kind, database in databases.items():
        target = _target(database)
        for with_call in (False, True):
            ways = {"store": writes.through_store(database, with_call), "driver": writes.by_driver(database, with_call)}
            spreads = alternate({way: partial(_many, write, target) for way, write in ways.items()}, 2 * REPETITIONS)
            rows.append([f"{kind}, {'T1, result, T2' if with_call else 'T1'}", *_rates(spreads["store"], spreads["driver"])])
    columns = ["one step per transaction", "store/s", "driver/s", "ratio", "ratio p5", "ratio p95"]
    return Table("writes", columns, rows, load())


def _rates(store: Spread, driver: Spread) -> list[float]:
    ratios = Spread(tuple(theirs / ours for ours, theirs in zip(store.seconds, driver.seconds, strict=True)))
    lowest = -Spread(tuple(-ratio for ratio in ratios.seconds)).p95
    return [writes.STEPS / store.median, writes.STEPS / driver.median, ratios.median, lowest, ratios.p95]


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
