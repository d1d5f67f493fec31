"""The user of a sandbox. Under root: a separate user id, because the kernel counts processes by user; else this user.

An id is taken by binding an abstract socket named after it: the kernel gives it to one process of this host and takes it back
when that process is gone, however it ended.
"""

import os
import socket
from dataclasses import dataclass

from agentrl.workflow.errors import ConfigError, InfraError


@dataclass(frozen=True)
class UidLease:
    """The user of one sandbox; `uid` is None where it stays the current one."""

    uid: int | None
    _lock: socket.socket | None = None

    def release(self) -> None:
        """Give the id back."""
        if self._lock is not None:
            self._lock.close()


def uid_range(text: str) -> range:
    """Return the range that the setting `AGENTRL_SANDBOX_UIDS` (`FIRST-LAST`) names.

    Raises:
        ConfigError: the text is no such range, or the range contains root.
    """
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise ConfigError(f"AGENTRL_SANDBOX_UIDS is {text!r}, not a range of user ids.", "Write FIRST-LAST: 231000-231255.")
    return range(int(first), int(last) + 1)


def lease_uid(uids: range) -> UidLease:
    """Leases a free user id.

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
