"""The page's questions over a million episodes (six million steps) in one run, on both databases: what bends.

It is measured when asked for only: filling takes half an hour and some 40 GB.
"""

from tests.benchmarks import synthetic
from tests.benchmarks.cases import Cases
from tests.benchmarks.databases import both
from tests.benchmarks.report import Measured
from tests.benchmarks.ui import ask_each

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
