"""The processes that write runs to trackers, one process for each run and tracker. A parent process starts, watches and ends
them.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path

from agentrl.workers.stack.process import claim_name
from agentrl.workflow.errors import ServiceError
from agentrl.workflow.settings import settings
from agentrl.workflow.store import leases, run_reports
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.run_reports import TrackerReport

log = getLogger("agentrl.reports")
FAILED = 70
"""The exit code of a process that has recorded the cause of its failure itself. It differs from 1, Python's exit code after an
error.
"""
CLAIM = "AGENTRL_REPORT_CLAIM"
"""The environment variable by which the processes that a tracker started are found."""
MAX_PROCESSES = 8
"""The most report processes at a time; each takes some 100 MB."""
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 5.0, 600.0
"""The first and the longest pause before a failed report is tried again, in seconds. The pause doubles after each failure."""
STOP_SECONDS = 10.0
"""The time that processes have to write the remaining steps after a request to stop, in seconds."""


class ReportProcess:
    """A process that writes a report. When it ends, all processes that its tracker started are killed, even those in other
    sessions.

    A surviving process of the tracker could send a step that the next report process sends too.
    """

    def __init__(self, report: TrackerReport, output: int | None = None) -> None:
        """Start the process that writes the report. `output` is the descriptor of its log; None for our stderr."""
        self.report, self.claim = report, claim_name()
        command = [sys.executable, "-P", "-m", "agentrl.workers.stack.reporter", str(report.run_id), report.tracker, self.claim]
        quiet, environment = subprocess.DEVNULL, {**os.environ, CLAIM: self.claim}
        self.process = subprocess.Popen(
            command, stdin=quiet, stdout=quiet, stderr=output, env=environment, start_new_session=True
        )

    def reap(self, db: Database) -> bool | None:
        """Check whether the process has ended. If so, kill the processes that it started, release its lease, and record a
        failure that it did not record itself.

        Returns:
            None while the process is running. After its end, True if it has written its report, else False.
        """
        code = self.process.poll()
        if code is None:
            return None
        self.kill()
        self.release(db)
        if code not in (0, FAILED):
            run_reports.record_failure(db, self.report, _describe_exit(self.report.tracker, code))
        return code == 0

    def release(self, db: Database) -> None:
        """Release the lease, so that another process can write the report at once."""
        leases.release_service_lease(db, run_reports.lease_name(self.report.run_id, self.report.tracker), self.claim)

    def kill(self) -> None:
        """Kill the process and all processes that it started."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        mark = f"{CLAIM}={self.claim}".encode()
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # another user's, or gone
                if mark in file.read_bytes().split(b"\0"):
                    os.kill(int(file.parent.name), signal.SIGKILL)


AGAIN = "The run continues; missing steps are written when it answers, or by `agentrl report`."
"""The text that follows the cause of a failure."""


def _describe_exit(tracker: str, code: int) -> str:
    if code == -signal.SIGALRM:
        return f"{tracker} did not answer within {settings().report_seconds:g} s (AGENTRL_REPORT_SECONDS). {AGAIN}"
    return f"The process that writes to {tracker} ended with exit code {code}. {AGAIN}"


@dataclass
class _Pause:
    """The pause before a failed report is tried again."""

    until: float
    seconds: float


class ReportProcesses:
    """The processes of all due reports."""

    def __init__(self) -> None:
        self._processes: dict[tuple[int, str], ReportProcess] = {}
        self._pauses: dict[tuple[int, str], _Pause] = {}

    @property
    def running(self) -> tuple[ReportProcess, ...]:
        """The processes that have not been reaped yet."""
        return tuple(self._processes.values())

    def tend(self, db: Database) -> None:
        """Reap the processes that have ended, and start processes for due reports that have none. Wait for no process."""
        for key, process in list(self._processes.items()):
            if (written := process.reap(db)) is None:
                continue
            del self._processes[key]
            before = self._pauses.pop(key, None)
            if not written:
                seconds = min(2 * before.seconds, MAX_PAUSE_SECONDS) if before else FIRST_PAUSE_SECONDS
                self._pauses[key] = _Pause(time.monotonic() + seconds, seconds)
        for report in run_reports.list_due_reports(db):
            key = report.run_id, report.tracker
            paused = key in self._pauses and time.monotonic() < self._pauses[key].until
            if key not in self._processes and not paused and len(self._processes) < MAX_PROCESSES:
                self._processes[key] = ReportProcess(report)

    def stop(self, open_database: Callable[[], Database]) -> None:
        """Ask all processes to write the remaining steps, and kill those that take longer than STOP_SECONDS. `open_database` is
        the function that returns the database. It is called only if there are processes, because a missing database may be the
        reason for stopping.
        """
        for process in self._processes.values():
            process.process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
        with suppress(ServiceError):  # leases that cannot be released run out
            for process in self._processes.values():
                process.release(open_database())
        self._processes.clear()
