"""The page's questions over a million episodes (six million steps) in one run, on both databases: what bends.

It is measured when asked for only: filling takes half an hour and some 40 GB.
"""

from bench.performance import synthetic
from bench.performance.cases import Cases
from bench.performance.databases import both
from bench.performance.report import Measured
from bench.performance.ui import ask_each

ITERATIONS = 7800
"""Of 128 episodes each, 998,400 in all."""


def measure() -> Measured:
    """One table, which shows the questions that are over the limit of a hundred thousand episodes."""
    cases = Cases()
    with both() as databases:
        for kind, database in databases.items():
            with database.engine.begin() as tx:
                synthetic.fill(tx, {"long": ITERATIONS})
            database.engine.dispose()  # SQLite's log of that one transaction is as long as the database
            print(f"{kind}: filled", flush=True)
        return Measured([ask_each(databases, "a million episodes", cases)], [], cases.unmeasured)
