"""The program of a process that writes one run to one tracker: `python -m agentrl.workers.stack.reporter RUN_ID TRACKER CLAIM`.

The process reads database rows, and holds no transaction while it waits for the tracker. At its start, it asks the tracker
which steps the tracker already has. So a process that replaces a killed one neither repeats nor omits a step. If the tracker
hangs, SIGALRM ends the process.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from types import FrameType

from agentrl.workers.stack.process import database, stopping
from agentrl.workers.stack.report_processes import AGAIN, FAILED
from agentrl.workers.stack.worker import set_up_logging
from agentrl.workflow.analysis.transcript import transcript_lines
from agentrl.workflow.errors import AgentRLError, Fenced
from agentrl.workflow.installation import install_command
from agentrl.workflow.plugins import find
from agentrl.workflow.runtime.shown_text import one_line
from agentrl.workflow.settings import PAGE_HOST, PAGE_PORT, settings
from agentrl.workflow.store import leases, run_reports
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import curves, episode_rows
from agentrl.workflow.store.reads.paging import Paging
from agentrl.workflow.store.run_reports import TrackerReport
from agentrl.workflow.trackers import (
    EVALUATION,
    ITERATION,
    TrackedRun,
    TrackedStep,
    Tracker,
    TrackerSession,
    eval_metrics,
    iteration_metrics,
    mask_text,
    masked_config,
)
from agentrl.workflow.trajectory import OPEN

log = getLogger("agentrl.reporter")
MAX_ERROR_CHARS = 300
LEASE_MARGIN_SECONDS = 30.0
"""The time, in seconds, that the lease lasts beyond the time limit of a step. So the lease is still valid when SIGALRM ends the
process.
"""


class Reporter:
    """The writer of one run to one tracker. It writes until the run has ended or the process is asked to stop."""

    def __init__(self, db: Database, report: TrackerReport, claim: str) -> None:
        self.db, self.report, self.claim = db, report, claim
        self.tracker: Tracker = find("trackers", report.tracker)
        self.run = load_run(db, report.run_id)
        self.seconds = settings().report_seconds
        self.last = {ITERATION: 0, EVALUATION: -1}

    def write(self) -> None:
        """Open the run in the tracker, and write each committed step. Raise Fenced if another process writes this report."""
        parent = os.getppid()
        with self._limited():
            session = self.tracker.open(self.run, self.report.handle)
            self.last |= session.last_numbers()
        run_reports.record_opened(self.db, self.report, session.handle, mask_text(session.url, os.environ))
        while True:
            # Read before the steps: none can follow a status that is final.
            status = run_reports.load_run_status(self.db, self.report.run_id)
            waits = self._write_steps(session)
            if stopping.is_set() or os.getppid() != parent or (status != "running" and not waits):
                break
            stopping.wait(settings().tick_seconds)
        with self._limited():
            session.finish(status)
        done = status != "running" and not waits
        run_reports.record_written(self.db, self.report, self.last[ITERATION], status if done else None)

    def _write_steps(self, session: TrackerSession) -> bool:
        """Write the steps that the tracker does not have. Return whether an evaluation of the run is still open."""
        for step in self._iteration_steps():
            self._write_step(session, step)
        for row in run_reports.load_own_evals(self.db, self.report.run_id, self.last[EVALUATION]):
            if row["status"] in OPEN:
                return True
            if row["status"] == "paused":  # it goes on with its run
                return False
            if row["mean_reward"] is not None:
                self._write_step(session, TrackedStep(EVALUATION, row["version"], row["finished_at"], eval_metrics(row)))
        return False

    def _write_step(self, session: TrackerSession, step: TrackedStep) -> None:
        with self._limited():
            session.log(step)
        self.last[step.series] = step.number
        run_reports.record_written(self.db, self.report, self.last[ITERATION])

    def _iteration_steps(self) -> Iterator[TrackedStep]:
        """Yield, in order, the finished iterations that the tracker does not have. Stop at the first unfinished one."""
        table = curves.load_curves(self.db, str(self.report.run_id), after=self.last[ITERATION])
        for values in table.rows:
            row = dict(zip(curves.COLUMNS, values, strict=True))
            if row["status"] in OPEN:
                return
            if row["status"] == "done":
                text = self._samples(row["iteration"])
                yield TrackedStep(ITERATION, row["iteration"], row["finished_at"], iteration_metrics(row), text)

    def _samples(self, iteration: int) -> str:
        if not self.report.samples:
            return ""
        chosen = episode_rows.EpisodeFilter(self.run.name, iteration=iteration, status="done")
        rows = episode_rows.list_episodes(self.db, chosen, Paging(size=self.report.samples)).rows
        return "\n\n".join(f"Episode {row.id}, reward {row.reward:g}\n\n{_transcript(self.db, row.id)}" for row in rows)

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Take the report's lease, and let SIGALRM end the process if the block takes longer than AGENTRL_REPORT_SECONDS. The
        signal ends the process even if the tracker's code is not in Python and hangs. Raise Fenced if another process holds the
        lease of this report.
        """
        lease, seconds = run_reports.lease_name(self.report.run_id, self.report.tracker), self.seconds + LEASE_MARGIN_SECONDS
        if not leases.take_service_lease(self.db, lease, self.claim, seconds):
            raise Fenced("Another process is writing this report.")
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _transcript(db: Database, episode: int) -> str:
    lines = (text for text, _ in transcript_lines(episode_rows.find_episode(db, episode)))
    return "\n".join(f"    {line}" for text in lines for line in text.split("\n"))


def load_run(db: Database, run_id: int) -> TrackedRun:
    """Return the run in the form that trackers receive."""
    row = run_reports.load_tracked_run(db, run_id)
    config = masked_config(row["config"], os.environ)
    tags = dict.fromkeys([config.get("algorithm.name", ""), *row["tags"]])
    page = f"http://{PAGE_HOST}:{PAGE_PORT}/#/run/{run_id}"
    return TrackedRun(
        row["manifest"].get("id") or row["name"],
        row["name"],
        config,
        tuple(tag for tag in tags if tag),
        page,
        settings().trackers_dir,
    )


def describe_failure(report: TrackerReport, tracker: Tracker | None, error: BaseException) -> str:
    """Return a text that says why the report failed and what the user can do."""
    if isinstance(error, ModuleNotFoundError) and tracker is not None and error.name == tracker.package:
        return f"{report.tracker} is not installed here: {install_command(tracker.package)}. {AGAIN}"
    if isinstance(error, AgentRLError):
        return str(error)
    cause = one_line(str(error), MAX_ERROR_CHARS).rstrip(".") or "no reason was given"
    return f"{report.tracker} failed: {type(error).__name__}: {cause}. {AGAIN}"


def main(run_id: int, name: str, claim: str) -> int:
    """Write the report and return the exit code of the process."""

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()

    set_up_logging()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    db = database()
    (report,) = [candidate for candidate in run_reports.list_reports(db, str(run_id)) if candidate.tracker == name]
    tracker = None
    try:
        reporter = Reporter(db, report, claim)
        tracker = reporter.tracker
        reporter.write()
    except Fenced as error:  # of a control loop that was killed: it ends soon
        log.info("%s", error)
        return FAILED
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a tracker may raise anything; the run must not feel it
        sentence = mask_text(describe_failure(report, tracker, error), os.environ)
        log.warning("%s", sentence)
        run_reports.record_failure(db, report, sentence)
        return FAILED
    return 0


if __name__ == "__main__":
    code = main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the threads and exit handlers of a tracker may hang
