"""The readiness of a worker process, shown by a file for health checks and by lines in the log."""

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
"""The logger on which Celery reports each attempt to reconnect to the broker."""
LOSS_PREFIXES = ("consumer: ", "Frequent restarts detected")
"""The beginnings of Celery's messages about a lost broker."""


class Readiness:
    """Whether this process can serve. Each change is logged as one line."""

    def __init__(self, file: Path | None) -> None:
        """Set the file that exists while the process can serve (None: no file), and remove an old one."""
        self._file = file
        self._state = "starting"
        self._remove()

    def confirm(self) -> None:
        """Record that the process can serve. Log it if the state has changed."""
        if self._state == "ready":
            return
        log.info("ready" if self._state == "starting" else "ready again")
        self._state = "ready"
        if self._file is not None:
            self._file.touch()

    def lose(self, reason: object) -> None:
        """Record that the broker or the database does not answer. Log the reason once, until the next `confirm`."""
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
    return Readiness(settings().ready_file)


def follow_celery() -> None:
    """Call `confirm` each time that Celery's consumer has connected to the broker, and `lose` when the broker is lost.

    This must be called before the worker is created.
    """
    from celery.bootsteps import StartStopStep

    from agentrl.workers.stack.celery_app import app

    class ReadyStep(StartStopStep):  # type: ignore[misc]
        """The step of the consumer's start after which it receives jobs."""

        requires = ("celery.worker.consumer.tasks:Tasks",)

        def start(self, parent: Any) -> None:
            readiness().confirm()

    app.steps["consumer"].add(ReadyStep)
    # At each lost broker Celery warns of a default that Celery 6 changes, and lets no filter of `warnings` hide it.
    getLogger("py.warnings").addFilter(lambda record: "CPendingDeprecationWarning" not in record.getMessage())
    getLogger(CONSUMER_LOG).addFilter(_report_loss)


def _reason_of(message: str) -> str:
    """Return the reason in Celery's message about a lost broker. The URL is left out, because it may contain a password."""
    match = re.match(r"consumer: Cannot connect to \S+: ([^\n]{1,200})", message)
    return f"the broker does not answer: {match[1].rstrip('. ')}." if match else "the broker does not answer."


def _report_loss(record: logging.LogRecord) -> bool:
    """Return whether to log a record of Celery's consumer."""
    if not record.getMessage().startswith(LOSS_PREFIXES):
        return True
    readiness().lose(_reason_of(record.getMessage()))
    return False
