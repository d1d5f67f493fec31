"""A pytest plugin in place of tests/conftest.py, which needs databases: it writes a line for each test into a file."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("gpu", deadline=None, database=None)  # the first call of a kernel takes as long as it takes
settings.load_profile("gpu")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a line for each test that ran, and for each set-up or tear-down that failed."""
    if report.when != "call" and report.passed:
        return
    why = "" if report.passed else " ".join(str(report.longrepr).split())[-500:]
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2), "why": why}
    with Path(os.environ["TEST_ROWS"]).open("a") as file:
        file.write(json.dumps(line) + "\n")
