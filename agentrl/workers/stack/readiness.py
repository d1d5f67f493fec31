"""Readiness of a worker process: whether it serves, as a file for health checks and as lines in its log.

A worker that reaches its broker has the file `AGENTRL_READY_FILE`; for control and the endpoint it is the database. A worker
removes the file when it loses that, and when it starts: a process killed in a container leaves its file there.
"""

import logging
import re
from contextlib import suppress
from logging import getLogger
from pathlib import Path
from typing import Any

from agentrl.workflow.runtime.once_per_process import Once
from agentrl.workflow.settings import settings

log = getLogger("agentrl.ready")

CONSUMER_LOG = "celery.worker.consumer.consumer"
"""The logger on which Celery reports each attempt to reach the broker again."""
LOSS_PREFIXES = ("consumer: ", "Frequent restarts detected")
"""How Celery's messages about a lost broker begin."""


class Readiness:
    """Whether this process serves. Each change is one line in the log; threads that race may log it twice."""

    def __init__(self, file: Path | None) -> None:
        """Remove the file that an earlier process left.

        Args:
            file: exists while the process serves; None for none.
        """
        self._file = file
        self._state = "starting"
        self._remove()

    def confirm(self) -> None:
        """Record that the process serves; log it if it did not before."""
        if self._state == "ready":
            return
        log.info("ready" if self._state == "starting" else "ready again")
        self._state = "ready"
        if self._file is not None:
            self._file.touch()

    def lose(self, reason: object) -> None:
        """Record that the broker or the database is away; log the reason, once until `confirm`."""
        if self._state == "lost":
            return
        log.warning("not ready: %s Retrying until it answers.", reason)
        self._state = "lost"
        self._remove()

    def _remove(self) -> None:
        if self._file is not None:
            with suppress(FileNotFoundError):
                self._file.unlink()


@Once
def readiness() -> Readiness:
    """Return the readiness of this process."""
    return Readiness(settings().ready_file)


def follow_celery() -> None:
    """Let Celery's heartbeats confirm readiness, and its reports of a lost broker end it. Call before the worker is made."""
    from celery.signals import heartbeat_sent

    heartbeat_sent.connect(_confirm, weak=False)
    # At each lost broker Celery warns of a default that Celery 6 changes, and lets no filter of `warnings` hide it.
    getLogger("py.warnings").addFilter(lambda record: "CPendingDeprecationWarning" not in record.getMessage())
    getLogger(CONSUMER_LOG).addFilter(_report_loss)


def _confirm(sender: Any, **kwargs: Any) -> None:
    if sender.tref is not None:  # without a timer it is the last event of a consumer that stops
        readiness().confirm()


def _reason_of(message: str) -> str:
    """Why the broker is lost, from a message of Celery; its URL, which may hold a password, is left out."""
    match = re.match(r"consumer: Cannot connect to \S+: ([^\n]{1,200})", message)
    return f"the broker does not answer: {match[1].rstrip('. ')}." if match else "the broker does not answer."


def _report_loss(record: logging.LogRecord) -> bool:
    """Keep a record of Celery's consumer, unless it reports a lost broker."""
    if not record.getMessage().startswith(LOSS_PREFIXES):
        return True
    readiness().lose(_reason_of(record.getMessage()))
    return False
