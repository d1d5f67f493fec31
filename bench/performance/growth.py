"""Databases of 100,000 episodes, never analysed and analysed: is all that is read quick, and what does a step cost to write?"""

import time
from collections.abc import Mapping
from functools import partial
from itertools import count
from statistics import median

from sqlalchemy import text

from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.rollout_claims import Fence
from bench.performance import reads, synthetic, writes
from bench.performance.cases import Cases
from bench.performance.databases import analyse, analysed, both, processor
from bench.performance.report import Comparison, Measured, Table, load
from bench.performance.timing import alternate, p95

LIMIT_MS, LIMIT_OF_SUMS_MS = 150, 1000
REPETITIONS, OF_SUMS = 9, 3
SHOWN = 12
"""The slowest of each table; what is over its limit is shown in any case."""


def measure() -> Measured:
    """Of each shape of database the reads and the sums, before and after there are statistics; then what is written."""
    tables: list[Table] = []
    comparisons: list[Comparison] = []
    cases = Cases()
    for shape, runs in synthetic.SHAPES.items():
        with both() as databases:
            seconds = {name: _fill(database, runs) for name, database in databases.items()}
            print(f"{shape}: filled", ", ".join(f"{name} in {taken:.0f} s" for name, taken in seconds.items()), flush=True)
            tables += _shape(databases, shape, cases)
            if not comparisons:
                with cases.case("steps written"):
                    comparisons = _writes(databases)
    return Measured(tables, comparisons, cases.unmeasured)


def _shape(databases: dict[str, Database], shape: str, cases: Cases) -> list[Table]:
    with databases["sqlite"].read() as tx:
        episodes = tx.execute(text("SELECT max(id) FROM episodes")).scalar_one()
        stored = tx.execute(text("SELECT id, name, iterations, status = 'running' FROM runs WHERE kind = 'train' ORDER BY id"))
        runs = [synthetic.Run(*row) for row in stored if row.name in (*synthetic.SHAPES[shape],)]
    looked_at = [runs[0], *runs[-1:]] if len(runs) > 1 else runs
    pages, whole = reads.reads(looked_at, episodes), reads.loads(runs[0]) | reads.sums(runs[0])
    shown: list[Table] = []
    for state in ("never analysed", "analysed"):
        if state == "analysed":
            for database in databases.values():
                analyse(database)
        assert all(analysed(database) == (state == "analysed") for database in databases.values())
        title = f"{shape}, {episodes} episodes, {state}: the slowest {{what}}, ms (at most {{limit}} at p95)"
        shown += [
            _table(databases, title.format(what="reads", limit=LIMIT_MS), pages, REPETITIONS, LIMIT_MS, cases),
            _table(databases, title.format(what="sums", limit=LIMIT_OF_SUMS_MS), whole, OF_SUMS, LIMIT_OF_SUMS_MS, cases),
        ]
        print(shown[-2].shown(), shown[-1].shown(), sep="\n", flush=True)
    return shown


def _fill(database: Database, runs: Mapping[str, int]) -> float:
    began = time.perf_counter()
    with database.engine.begin() as tx:
        synthetic.fill(tx, runs)
    return time.perf_counter() - began


def _table(
    databases: dict[str, Database],
    title: str,
    wanted: dict[str, reads.Read],
    repetitions: int,
    limit: float,
    cases: Cases,
) -> Table:
    """In turns by the wall's clock, then in processor time, which a busy machine does not stretch."""
    clocks = {kind: processor(database) for kind, database in databases.items()}
    rows: list[tuple[float, list[object]]] = []
    for name, read in wanted.items():
        taken: dict[str, list[float]] = {}
        with cases.case(f"{title}: {name}"):
            tries = {kind: partial(read, database) for kind, database in databases.items()}
            taken = alternate(tries, repetitions)
            computed = alternate(tries, repetitions, warm_up=False, clocks=clocks)
        if not taken:
            continue
        worst = {kind: 1000 * p95(seconds) for kind, seconds in taken.items()}
        spread = [1000 * of(taken[kind]) for kind in databases for of in (median, p95)]
        spread += [1000 * of(computed[kind]) for kind in databases for of in (median, p95)]
        slow = ", ".join(kind for kind, value in worst.items() if value > limit)
        rows.append((max(worst.values()), [name, *spread, slow]))
    rows.sort(key=lambda row: -row[0])
    over = sum(worst > limit for worst, _ in rows)
    heads = [f"{kind}{clock} {value}" for clock in ("", " cpu") for kind in databases for value in ("median", "p95")]
    columns = ["what", *heads, "over"]
    return Table(f"{title}; {over} of {len(rows)} over", columns, [row for _, row in rows[: max(SHOWN, over)]], load())


def _writes(databases: dict[str, Database]) -> list[Comparison]:
    found = []
    for kind, database in databases.items():
        target = _target(database)
        for with_call in (False, True):
            with writes.by_driver(database, with_call) as driver:
                ways = {"store": writes.through_store(database, with_call), "driver": driver}
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
