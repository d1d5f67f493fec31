"""Measurements side by side with what one would use instead, one file per subject.

`make bench` measures all of them, `make bench only=decode,update` those.

`python -m bench.performance [SUBJECT ...]` prints each subject's tables, then one table of all comparisons, and writes
`build/bench.json`. A subject is a module here, named in `__main__.SUBJECTS`, with

    def measure() -> Measured:  # report.py: tables for people, comparisons for the last table and the `rows` of the file
        cases = Cases()  # cases.py: with cases.case(name): ... one that raises says so in a row, and the rest goes on
        taken = alternate({"ours": ..., "theirs": ...})  # timing.py: seconds of 5 rounds each, in turns, warmed up
        ran = in_turns({"ours": Side(module, prepare, {...}), ...})  # processes.py: in fresh processes, with peak memory
        return Measured(
            [Table("title", columns, rows, load())],
            [Comparison("row of the last table", ours, theirs, unit="s", against="TRL", better="less")],
            cases.unmeasured,
        )

Every number has its spread, what is compared is measured in turns in one run, and the machine's load stands beside it.
Models and tokenizers that both sides can load are in models.py.
"""

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # else TRL reports each trainer, and waits where there is no network
