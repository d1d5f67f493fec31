"""What every worker process has one of: its name, its database, its heartbeat, its wish to stop."""

import os
import socket
import threading
from functools import cache

from workers.heartbeat import Heartbeat
from workflow.settings import settings
from workflow.store.connect import Database
from workflow.store.migrate import open_database

stopping = threading.Event()
"""Set when the process was asked to stop: rollouts hand their claims back."""

_lock = threading.Lock()


def worker_name() -> str:
    """host:pid, as rows remember who worked on them."""
    return f"{socket.gethostname()}:{os.getpid()}"


def database() -> Database:
    """The process's database."""
    with _lock:
        return _open()


@cache
def _open() -> Database:
    return open_database(settings().database)


def heartbeat() -> Heartbeat:
    """The process's heartbeat, beating."""
    db = database()
    with _lock:
        return _beat(db)


@cache
def _beat(db: Database) -> Heartbeat:
    made = Heartbeat(db, settings().lease_seconds)
    made.start()
    return made
