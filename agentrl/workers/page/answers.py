"""Responses of the page's service: rows as JSON that every browser can read, and errors with a message and a hint."""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import Response

from agentrl.workers.page.read_only import Busy
from agentrl.workflow.errors import AccessDenied, AgentRLError, ConfigError, NotFoundError, StateError

RETRY_SECONDS = 1
"""The time after which a page repeats its request to a busy store, in seconds."""
EXACT = 2**53 - 1
"""The largest integer that a browser represents exactly."""
_STATUS: tuple[tuple[type[AgentRLError], int], ...] = (
    (Busy, 503), (NotFoundError, 404), (AccessDenied, 403), (StateError, 409), (ConfigError, 422),
)  # fmt: skip


def answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response. Times become ISO 8601 texts, NaN and infinity become null, integers above EXACT become texts."""
    body = json.dumps(plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(body, status, media_type="application/json", headers=dict(headers or {}))


def plain(value: Any) -> Any:
    """Convert a value to JSON types, in the same way as `answer`."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if abs(value) <= EXACT else str(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes):
        return [plain(item) for item in value]
    return str(value)


def refuse(error: AgentRLError) -> Response:
    """Return an error response `{error, hint}` with the HTTP status of the error's class."""
    status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
    headers = {"Retry-After": str(RETRY_SECONDS)} if status == 503 else {}
    return answer({"error": error.message, "hint": error.hint}, status, headers)
