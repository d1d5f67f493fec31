"""A time limit on all of a piece of asynchronous work."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def within(seconds: float, work: Coroutine[Any, Any, Answer]) -> Answer:
    """What the work gives; where the time is over it is cut off, whatever it waits for, and its connections are closed.

    It runs in a thread of its own, so that whoever calls may be asynchronous too.

    Raises:
        TimeoutError: it took longer.
    """

    async def limited() -> Answer:
        async with asyncio.timeout(seconds):
            return await work

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, limited()).result()
