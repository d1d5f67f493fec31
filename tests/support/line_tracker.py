"""A tracker for the tests: a file of JSON lines for each run, and faults that `LINE_TRACKER` names.

`open` and `log` raise; `hang:N` sleeps in step N; `kill:N` ends the process in step N after it was written; `exit` ends it.
"""

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from agentrl.workflow.trackers import TrackedRun, TrackedStep, Tracker


class Session:
    """A line for the run, and one for each step."""

    def __init__(self, run: TrackedRun, handle: str) -> None:
        self.fault, _, number = os.environ.get("LINE_TRACKER", "").partition(":")
        self.number = int(number or 0)
        if self.fault == "open":
            raise RuntimeError("<!DOCTYPE html><html>\n502 Bad Gateway</html>")
        run.folder.mkdir(parents=True, exist_ok=True)
        self.file = Path(handle or run.folder / f"{run.name}.jsonl")
        self.handle, self.url = str(self.file), f"file://{self.file}"
        if not handle:
            self.write({"run": run.name, "config": run.config, "tags": run.tags, "page": run.page})

    def write(self, line: Mapping[str, object]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def last_numbers(self) -> Mapping[str, int]:
        return {line["series"]: line["number"] for line in read_lines(self.file) if "series" in line}

    def log(self, step: TrackedStep) -> None:
        reached = step.number == self.number
        if self.fault == "log":
            raise RuntimeError(f"the key is wrong: {os.environ.get('LINE_API_KEY')} at https://me:pw@example.org")
        if self.fault == "hang" and reached:
            time.sleep(60)
        self.write({"series": step.series, "number": step.number, "metrics": step.numbers, "text": step.text})
        if self.fault == "kill" and reached:
            os.kill(os.getpid(), signal.SIGKILL)

    def finish(self, status: str) -> None:
        self.write({"status": status})


def read_lines(file: Path) -> list[dict[str, object]]:
    """All lines of a run's file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


line_tracker = Tracker("json", Session)


def _import_nothing(run: TrackedRun, handle: str) -> Session:
    raise ModuleNotFoundError("No module named 'no_such_package'", name="no_such_package")


lacking_tracker = Tracker("no_such_package", _import_nothing)
