"""`python -m bench [SUBJECT ...]`: each subject is a module here with a `measure()` that returns tables."""

import sys
from importlib import import_module

from bench.report import Table, keep

SUBJECTS = ("growth",)


def main(wanted: list[str]) -> None:
    """Measures the subjects (all, if none is named), prints and keeps their tables."""
    for subject in wanted or SUBJECTS:
        if subject not in SUBJECTS:
            sys.exit(f"There is no bench {subject!r}; there are: {', '.join(SUBJECTS)}.")
        tables: list[Table] = import_module(f"bench.{subject}").measure()
        for table in tables:
            print(table.shown())
        keep({subject: tables})


if __name__ == "__main__":
    main(sys.argv[1:])
