"""A time limit for asynchronous work."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def within(seconds: float, work: Coroutine[Any, Any, Answer]) -> Answer:
    """Run the coroutine and return its result. After `seconds` it is cancelled, and its connections are closed.

    It runs in a thread of its own, so that asynchronous callers can use it too.

    Raises:
        TimeoutError: the work took longer.
    """

    async def limited() -> Answer:
        async with asyncio.timeout(seconds):
            return await work

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, limited()).result()
