"""Redis as kombu reads it, except for what ends the whole worker there (no message at all, a job that outlived its link), and
for the client that it makes anew for each command, which is a fifth of what a message costs.
"""

from logging import getLogger
from queue import Empty
from typing import Any

from kombu.transport import redis

log = getLogger("agentrl.transport")


class Channel(redis.Channel):  # type: ignore[misc]
    """See the module's text; all three were met in kombu 5.7.0."""

    _own: Any = None

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # anybody who reaches Redis can push onto its lists
            log.exception("what came from the broker is no message, or could not be taken; the rows tell what is missing")
            raise Empty from error

    def _create_client(self, asynchronous: bool = False) -> Any:
        if asynchronous:  # made once, and with a connection of its own
            return super()._create_client(asynchronous)
        if self._own is None or self._own.connection_pool is not self.pool:
            self._own = super()._create_client()
        return self._own

    def _connparams(self, asynchronous: bool = False) -> Any:
        # A message is acknowledged, or given back, over a link that was given up: an AttributeError without this.
        if self.connection is None or self.connection.client is None:
            raise ConnectionError("the connection to the broker was given up")
        return super()._connparams(asynchronous)


class Transport(redis.Transport):  # type: ignore[misc]
    """Reads with that channel."""

    Channel = Channel
