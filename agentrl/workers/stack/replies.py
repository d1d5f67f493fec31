"""Replies to tool calls. Each rollout process has one Redis list for its replies, and one thread that reads the list.

A reply contains the id of a tool call whose result is stored in the row of the call. The rollout also polls this row, so a lost
reply only delays the rollout. If the worker that received a call cannot run it, the reply contains the reason instead. The
reason is only shown to the user.
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
"""The most characters of the reason why a call was not run."""

ReplyCallback = Callable[[int, str], None]
"""The type of a callback. Its arguments are the call's id and the reason why the call was not run; the reason is empty if the
result is recorded.
"""

_local_lists: "dict[str, Replies]" = {}
"""The reply lists of this process, by address. If the tools worker is in this process too, replies do not go through Redis."""


class Replies:
    """The reply list of this process. When the result of a call is recorded, the reader's thread calls the call's callback
    once.

    Attributes:
        address: the name of the list in Redis.
        answered_at: the time of the last reply with a result, in seconds of the monotonic clock.
    """

    def __init__(self, where: Settings) -> None:
        self.address = f"agentrl.replies.{uuid.uuid4().hex}"
        self.answered_at = -math.inf
        self._waiting: dict[int, ReplyCallback] = {}
        _local_lists[self.address] = self
        if not is_in_memory(where):
            threading.Thread(target=self._run, args=(connect_redis(where),), name="replies", daemon=True).start()

    def expect(self, call: int, answered: ReplyCallback) -> None:
        """Register a call's callback. The callback receives each reason why a worker cannot run the call, and "" when the
        result is recorded.
        """
        self._waiting[call] = answered

    def forget(self, call: int) -> None:
        """Remove the call's callback."""
        self._waiting.pop(call, None)

    def answer(self, call: int, reason: str = "") -> None:
        """Call the callback of the call. Then remove the callback, unless there is a `reason` why the call was not run."""
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
    """The sender of a tools process's replies to the Redis lists on which rollout processes wait."""

    def __init__(self, where: Settings) -> None:
        self._where = where

    @cached_property
    def _redis(self) -> "redis.Redis":
        return connect_redis(self._where)

    def wake(self, address: str, call: int, reason: str = "") -> None:
        """Wake the rollout process that waits for the call. If `reason` is not empty, it says why this worker cannot run the
        call.

        If the broker does not answer, nothing is lost, because the rollout process also polls the row. Raise ConfigError if the
        address is not that of a reply list. The check is needed because anyone can write a message, and Redis has other lists
        too.
        """
        if not (isinstance(address, str) and _ADDRESS.fullmatch(address)):
            raise ConfigError(f"A tool call names {address!r:.100}, which is not a Redis list for replies.")
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
