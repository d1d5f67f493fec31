"""Replies to tool calls: each rollout process has one Redis list, and one thread that reads it.

A reply has the id of a call whose result is in the row; the waiting rollout also polls the row. If a call cannot run on the
worker that received it, the reply has the reason, which is only shown to the user.
"""

import math
import re
import threading
import time
import uuid
from collections.abc import Callable
from functools import cached_property
from logging import getLogger

import redis

from agentrl.workers.stack.broker import connect_redis, is_in_memory
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.settings import Settings

log = getLogger("agentrl.replies")
WAIT_SECONDS = 2
KEEP_SECONDS = 3600
_ADDRESS = re.compile(r"agentrl\.replies\.[0-9a-f]{32}")


_REPLY = re.compile(rb"([0-9]{1,19})(?: (.*))?", re.DOTALL)
MAX_REASON = 500
"""The most characters of the reason why a call cannot run."""

ReplyCallback = Callable[[int, str], None]
"""The type of a callback: its arguments are the call's id and the reason why it cannot run, which is empty once the result is
recorded.
"""

_local_lists: "dict[str, Replies]" = {}
"""The reply lists of this process by address. If the tools run in the same process, replies do not go through Redis."""


class Replies:
    """The reply list of this process. The callback of each call is called in the reader's thread, once after the call's result
    is recorded.

    Attributes:
        address: the name of the list in Redis.
        answered_at: the monotonic time of the last reply with a result, in seconds.
    """

    def __init__(self, where: Settings) -> None:
        self.address = f"agentrl.replies.{uuid.uuid4().hex}"
        self.answered_at = -math.inf
        self._waiting: dict[int, ReplyCallback] = {}
        _local_lists[self.address] = self
        if not is_in_memory(where):
            threading.Thread(target=self._run, args=(connect_redis(where),), name="replies", daemon=True).start()

    def expect(self, call: int, answered: ReplyCallback) -> None:
        """Register the callback `answered` of a call. It is called when the result is recorded, and before that with each
        reason why the call cannot run.
        """
        self._waiting[call] = answered

    def forget(self, call: int) -> None:
        """Remove the call's callback."""
        self._waiting.pop(call, None)

    def answer(self, call: int, reason: str = "") -> None:
        """Call the callback of the call and remove it. With a `reason`, it stays registered."""
        answered = self._waiting.get(call) if reason else self._waiting.pop(call, None)
        if not reason:
            self.answered_at = time.monotonic()
        if answered:
            answered(call, reason)

    def _run(self, connection: "redis.Redis") -> None:
        while True:
            try:
                self._read_replies(connection)
            except (redis.RedisError, OSError) as error:
                log.debug("the broker does not answer: %s", error)  # the worker's readiness says it once
                time.sleep(0.5)

    def _read_replies(self, connection: "redis.Redis") -> None:
        while True:
            reply = connection.blpop([self.address], timeout=WAIT_SECONDS)
            if reply is None:
                continue
            more = connection.lpop(self.address, 1000) or []
            for line in (reply[1], *more):
                self._parse_reply(line)

    def _parse_reply(self, line: bytes) -> None:
        match = _REPLY.fullmatch(line[: 4 * MAX_REASON])
        if match:
            self.answer(int(match[1]), (match[2] or b"").decode(errors="replace")[:MAX_REASON])
        else:  # anybody can push onto a list in Redis, which must not end the reader of all replies
            log.warning("invalid call id on %s: %.80r", self.address, line)


class Waker:
    """Sends replies from a tools process to the lists of rollout processes."""

    def __init__(self, where: Settings) -> None:
        self._where = where

    @cached_property
    def _redis(self) -> "redis.Redis":
        return connect_redis(self._where)

    def wake(self, address: str, call: int, reason: str = "") -> None:
        """Wake the rollout that waits for the call, or send it the reason why the call cannot run here.

        If the broker is away, nothing is lost, because the rollout also polls the row.

        Raises:
            ConfigError: the address is not a reply list. This is checked because anyone can write a message, and Redis has
                other lists too.
        """
        if not (isinstance(address, str) and _ADDRESS.fullmatch(address)):
            raise ConfigError(f"A tool call has an invalid reply list: {address!r:.100}.")
        if address in _local_lists:
            _local_lists[address].answer(call, reason[:MAX_REASON])
            return
        try:
            with self._redis.pipeline(transaction=False) as pipe:
                pipe.rpush(address, f"{call} {reason[:MAX_REASON]}".strip())
                pipe.expire(address, KEEP_SECONDS)
                pipe.execute()
        except (redis.RedisError, OSError) as error:
            log.debug("could not wake %s: %s", address, error)
