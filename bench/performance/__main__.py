"""`python -m bench.performance [SUBJECT ...]`: each subject is a module here with a `measure()`.

A case that cannot be measured is said in its row, and the rest goes on; where something failed, and not where this machine
cannot do it, the program exits with 1 at its end.
"""

import sys
from importlib import import_module

from bench.performance.cases import Cases, Unmeasured
from bench.performance.report import Comparison, Measured, compared, keep

SUBJECTS = (
    "decode",
    "tools",
    "update",
    "memory",
    "iteration",
    "overhead",
    "queue",
    "workers",
    "growth",
    "sandbox",
    "endpoint",
    "fit",
    "ui",
    "rows",
)
ON_REQUEST = ("million", "many_workers")
"""What takes long, and is measured only where it is named."""


def main(wanted: list[str]) -> None:
    """Measures the subjects (SUBJECTS, if none is named; commas may stand between them) and ends with one table."""
    subjects = [subject for word in wanted for subject in word.split(",") if subject] or list(SUBJECTS)
    known = SUBJECTS + ON_REQUEST
    if unknown := [subject for subject in subjects if subject not in known]:
        sys.exit(f"There is no benchmark {unknown[0]!r}; there are: {', '.join(known)}.")
    comparisons: list[Comparison] = []
    unmeasured: list[Unmeasured] = []
    for subject in subjects:
        measured = _measured(subject)
        for table in measured.tables:
            print(table.shown(), flush=True)
        keep(subject, measured)
        comparisons += measured.comparisons
        unmeasured += measured.unmeasured
    print(compared(comparisons, unmeasured).shown())
    if any(case.failed for case in unmeasured):
        sys.exit(1)


def _measured(subject: str) -> Measured:
    """What the subject measured; what it raises outside of its cases is said too."""
    cases = Cases()
    with cases.case(subject):
        measured: Measured = import_module(f"bench.performance.{subject}").measure()
        return measured
    return Measured([], unmeasured=cases.unmeasured)


if __name__ == "__main__":
    main(sys.argv[1:])
