"""`python -m tests.benchmarks [SUBJECT ...]`: each subject is a module here with a `measure()`."""

import sys
from importlib import import_module

from tests.benchmarks.report import Comparison, Measured, compared, keep

SUBJECTS = ("decode", "tools", "update", "memory", "iteration", "overhead", "queue", "workers", "growth", "sandbox")


def main(wanted: list[str]) -> None:
    """Measures the subjects (all, if none is named; commas may stand between them) and ends with one table."""
    subjects = [subject for word in wanted for subject in word.split(",") if subject] or list(SUBJECTS)
    if unknown := [subject for subject in subjects if subject not in SUBJECTS]:
        sys.exit(f"There is no benchmark {unknown[0]!r}; there are: {', '.join(SUBJECTS)}.")
    comparisons: list[Comparison] = []
    for subject in subjects:
        measured: Measured = import_module(f"tests.benchmarks.{subject}").measure()
        for table in measured.tables:
            print(table.shown(), flush=True)
        keep(subject, measured)
        comparisons += measured.comparisons
    print(compared(comparisons).shown())


if __name__ == "__main__":
    main(sys.argv[1:])
