"""A time limit for asynchronous work."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def within(seconds: float, work: Coroutine[Any, Any, Answer]) -> Answer:
    """Run the coroutine and return its result. After `seconds`, cancel the coroutine; its connections are closed.

    The coroutine runs in a separate thread, so asynchronous callers can use this function too. Raise TimeoutError if the
    coroutine took longer than `seconds`.
    """

    async def limited() -> Answer:
        async with asyncio.timeout(seconds):
            return await work

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, limited()).result()
