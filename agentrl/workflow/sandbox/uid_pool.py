"""The user of a sandbox. If this process is root, each sandbox has a separate user id, because the kernel counts processes by
user. Otherwise the current user is used.

To lease an id, this process binds an abstract socket whose name contains the id. The kernel gives each name to at most one
process of this host, and frees it when that process ends in any way.
"""

import os
import socket
from dataclasses import dataclass

from agentrl.workflow.errors import ConfigError, InfraError


@dataclass(frozen=True)
class UidLease:
    """The lease of a sandbox's user id. `uid` is None if the sandbox runs as the current user."""

    uid: int | None
    _lock: socket.socket | None = None

    def release(self) -> None:
        """Release the id, so another sandbox can lease it."""
        if self._lock is not None:
            self._lock.close()


def uid_range(text: str) -> range:
    """Parse `FIRST-LAST`. Raise ConfigError if the text is not such a range of user ids, or contains root's."""
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise ConfigError(
            f"AGENTRL_SANDBOX_UIDS is {text!r}: no range of user ids.", "Write FIRST-LAST, for example 231000-231255."
        )
    return range(int(first), int(last) + 1)


def lease_uid(uids: range) -> UidLease:
    """Lease a free user id of the range. Raise InfraError if all ids of the range are in use."""
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
