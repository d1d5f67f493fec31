"""Notifications: a request to AGENTRL_NOTIFY_URL, or AGENTRL_NOTIFY_COMMAND, when a run ends and when it waits.

Both come from the machine's settings alone: a run's config cannot name them. The control loop sends them from the runs' events,
in a thread, so that a server that hangs delays nothing. The last event that was sent is in the database: each is sent at least
once, also if the control loop was away meanwhile, and given up after some attempts.
"""

import json
import os
import shlex
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from logging import getLogger
from typing import Any

from agentrl.workflow.settings import Settings
from agentrl.workflow.store import run_events
from agentrl.workflow.store.connect import Database

log = getLogger("agentrl.notify")
MAX_ATTEMPTS = 3
URL_SECONDS, COMMAND_SECONDS = 10.0, 60.0


class Notifier:
    """A sender of new events, one after the other."""

    def __init__(self, where: Settings) -> None:
        self._url, self._command = where.notify_url, shlex.split(where.notify_command)
        self._thread: threading.Thread | None = None
        self._attempts = 0

    def tend(self, db: Database) -> None:
        """Start a thread that sends what is new, unless one is still at it, or nobody is to be notified."""
        if not (self._url or self._command) or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._send_new, args=[db], name="notify", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until what was started is sent."""
        if self._thread is not None:
            self._thread.join()

    def _send_new(self, db: Database) -> None:
        try:
            for event in run_events.list_unsent_events(db):
                if not self._send(event):
                    return
                self._attempts = 0
                run_events.mark_sent(db, event["id"])
        except Exception as error:  # noqa: BLE001 - the next tick tries again
            log.warning("events could not be read: %s", error)

    def _send(self, event: Mapping[str, Any]) -> bool:
        """Send one event; return whether it is done with: sent, or tried often enough."""
        body = json.dumps({name: event[name] for name in ("event", "run", "kind", "status", "detail", "at")}).encode()
        try:
            if self._url:
                _post(self._url, body)
            if self._command:
                _run(self._command, body)
        except (OSError, subprocess.SubprocessError) as error:
            self._attempts += 1
            cause = _describe(error)
            log.warning("the notification of %s failed (attempt %d): %s", event["run"], self._attempts, cause)
            return self._attempts >= MAX_ATTEMPTS
        return True


def _run(command: Sequence[str], body: bytes) -> None:
    """Run a program with `body` on its standard input; end all that it started if it takes too long. Its output is not kept.

    Raises:
        OSError: it cannot be started.
        SubprocessError: it fails, or takes longer than COMMAND_SECONDS.
    """
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True) as process:
        try:
            process.communicate(body, timeout=COMMAND_SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # it is not reaped yet, so that its number is its own
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def _describe(error: Exception) -> str:
    """The cause, without the target, which may hold a key."""
    if isinstance(error, subprocess.CalledProcessError):
        return f"the command ended with exit code {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"the command took more than {COMMAND_SECONDS:g} s"
    return getattr(error, "strerror", None) or type(error).__name__


def _post(url: str, body: bytes) -> None:
    """Send JSON.

    Raises:
        OSError: the server does not answer, or answers with an error.
    """
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "agentrl"}, method="POST")
    with urllib.request.urlopen(request, timeout=URL_SECONDS):
        pass
