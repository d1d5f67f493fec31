"""The route for SQL: one read-only SELECT of the user, within limits."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from threading import BoundedSemaphore
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel

from agentrl.workers.page.answers import answer
from agentrl.workers.page.read_only import Busy, ReadOnlyStore
from agentrl.workers.page.routes import Store
from agentrl.workers.page.shown.shown_texts import LEAST_CHARS, SHOWN_CHARS
from agentrl.workflow.errors import AccessDenied, ConfigError, ServiceError
from agentrl.workflow.store.reads.user_sql import run_query

router = APIRouter(prefix="/api", tags=["sql"])

MAX_ROWS = 1000
SECONDS = 5.0
MAX_BODY = 100_000
"""The largest body of a request, in bytes. MAX_ROWS limits the rows of a response, SECONDS the time of a query."""
ANSWER_CHARS = 4_000_000
"""The approximate limit on the characters of a response."""
AT_ONCE = 2
"""The most queries that run at the same time, so that the statements of a run are not delayed."""
_running = BoundedSemaphore(AT_ONCE)
MAX_WAITING = 8
"""The most queries that run or wait. Each query occupies a thread, and other requests need threads too."""
_waiting = BoundedSemaphore(MAX_WAITING)


class Query(BaseModel):
    """The request: one SELECT."""

    query: str


class Result(BaseModel):
    """The result of a SELECT. `cut` is true if there are more rows. `cells_cut` is the number of shortened values."""

    columns: list[str]
    rows: list[list[Any]]
    seconds: float
    cut: bool
    cells_cut: int


@router.post(
    "/sql",
    response_model=Result,
    openapi_extra={"requestBody": {"content": {"application/json": {"schema": Query.model_json_schema()}}}},
)
async def run_sql(store: Store, request: Request) -> Response:
    """Run one SELECT over the tables and views, and return at most 1,000 rows. The time limit is 5 seconds."""
    query = _parse(await _read_body(request))
    return await run_in_threadpool(lambda: answer(_run(store, query)))


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise AccessDenied(f"The request has more than {MAX_BODY} bytes.", "Ask for less at a time.")
    return bytes(body)


def _parse(body: bytes) -> str:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("query"), str):
        raise ConfigError('The request is not {"query": "SELECT ..."}.', "Send one SELECT as JSON.")
    query: str = document["query"]
    return query


def _run(store: ReadOnlyStore, query: str) -> dict[str, Any]:
    with _entered(_waiting, 0), _entered(_running, SECONDS):
        started = time.perf_counter()
        try:
            columns, rows = run_query(store.settings, query, MAX_ROWS + 1, SECONDS)
        except ServiceError as error:  # locked, or away
            raise Busy(error.message, error.hint) from error
        seconds = time.perf_counter() - started
    cells, cut = _show(rows[:MAX_ROWS])
    return {"columns": columns, "rows": cells, "seconds": seconds, "cut": len(rows) > MAX_ROWS, "cells_cut": cut}


@contextmanager
def _entered(room: BoundedSemaphore, seconds: float) -> Iterator[None]:
    """Hold one of the semaphore's places during the `with` block."""
    if not room.acquire(timeout=seconds):
        raise Busy("Other queries are still running.", "Try again when they have ended.")
    try:
        yield
    finally:
        room.release()


def _show(rows: list[tuple[Any, ...]]) -> tuple[list[list[Any]], int]:
    """Return the rows as JSON values with long values shortened, and the number of shortened values."""
    left, cut = ANSWER_CHARS, 0
    shortened = []
    for row in rows:
        cells = []
        for value in row:
            plain = _plain(value)
            if isinstance(plain, str):
                max_chars = max(LEAST_CHARS, min(SHOWN_CHARS, left))
                cut += len(plain) > max_chars
                plain = plain[:max_chars]
                left -= len(plain)
            cells.append(plain)
        shortened.append(cells)
    return shortened, cut


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return float(value)
    return f"({len(value)} bytes)" if isinstance(value, bytes) else value
