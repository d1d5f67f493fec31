"""Notifications when a run ends or waits. A notification is a request to AGENTRL_NOTIFY_URL, a start of AGENTRL_NOTIFY_COMMAND,
or both.

The control loop reads the events of the runs, and sends the notifications in a thread. The database records the last event that
was sent, so each event is sent at least once. After MAX_ATTEMPTS failures, an event is skipped.
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
    """The sender of notifications. It sends the notifications of new events one after the other."""

    def __init__(self, where: Settings) -> None:
        self._url, self._command = where.notify_url, shlex.split(where.notify_command)
        self._thread: threading.Thread | None = None
        self._attempts = 0

    def tend(self, db: Database) -> None:
        """Start a thread that sends new events. Do nothing if a thread is still sending or no target is set."""
        if not (self._url or self._command) or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._send_new, args=[db], name="notify", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the running thread has ended."""
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
        """Send an event. Return whether the next event follows: the event was sent, or has failed MAX_ATTEMPTS times."""
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
    """Return the cause of the error. The target is left out, because it may contain a key."""
    if isinstance(error, subprocess.CalledProcessError):
        return f"the command ended with exit code {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"the command took more than {COMMAND_SECONDS:g} s"
    return getattr(error, "strerror", None) or type(error).__name__


def _post(url: str, body: bytes) -> None:
    """Send the body as JSON to the URL. Raise OSError if the server does not respond, or responds with an error."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "agentrl"}, method="POST")
    with urllib.request.urlopen(request, timeout=URL_SECONDS):
        pass
