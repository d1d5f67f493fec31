"""Adds fields to log records (run, iteration, episode, attempt), and formats records as JSON, one object per line."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

_fields: ContextVar[Mapping[str, object]] = ContextVar("log_fields", default={})  # noqa: B039 - never changed in place


@contextmanager
def log_fields(**fields: object) -> Iterator[None]:
    """Add fields to records logged in the `with` block, in this thread and threads with a copy of its context."""
    token = _fields.set({**_fields.get(), **fields})
    try:
        yield
    finally:
        _fields.reset(token)


class JsonFormatter(logging.Formatter):
    """A formatter for JSON: `at`, `level`, `logger`, `message`, `pid`, the fields, and `error` with a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a JSON object on one line."""
        row = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
            **_fields.get(),
        }
        if record.exc_info:
            row["error"] = self.formatException(record.exc_info)
        return json.dumps(row, default=str)
