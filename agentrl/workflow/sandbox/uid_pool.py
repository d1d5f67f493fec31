"""The user of a sandbox. Under root it is a separate user id, because the kernel counts processes by user; else the current
user.

An id is leased by binding an abstract socket that is named after it. The kernel gives the name to one process of this host, and
frees it when that process ends in any way.
"""

import os
import socket
from dataclasses import dataclass

from agentrl.workflow.errors import ConfigError, InfraError


@dataclass(frozen=True)
class UidLease:
    """The user of one sandbox; `uid` is None if it is the current user."""

    uid: int | None
    _lock: socket.socket | None = None

    def release(self) -> None:
        """Free the id for other sandboxes."""
        if self._lock is not None:
            self._lock.close()


def uid_range(text: str) -> range:
    """Parse the setting `AGENTRL_SANDBOX_UIDS` (`FIRST-LAST`).

    Raises:
        ConfigError: the text is not such a range, or the range contains root.
    """
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise ConfigError(f"AGENTRL_SANDBOX_UIDS is {text!r}, not a range of user ids.", "Write FIRST-LAST: 231000-231255.")
    return range(int(first), int(last) + 1)


def lease_uid(uids: range) -> UidLease:
    """Lease a free user id of the range.

    Raises:
        InfraError: all ids of the range are in use.
    """
    if os.geteuid() != 0:
        return UidLease(None)
    for uid in uids:
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            lock.bind(f"\0agentrl-sandbox-uid-{uid}")
        except OSError:
            lock.close()
            continue
        return UidLease(uid, lock)
    raise InfraError(
        f"A sandbox was asked for, but all {len(uids)} user ids are in use.", "Set a larger range in AGENTRL_SANDBOX_UIDS."
    )
