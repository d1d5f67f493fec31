"""The start and the end of a rank's process, by the train worker or by a worker `ranks`."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a rank in its group.

    Args:
        rank, count: the number of this rank, from 0, and the number of ranks.
        local_rank, local_count: the same among the ranks of this host. Their numbers `rank` are consecutive.
        device: the device of this rank.
        store: the URL at which the ranks find each other: `file://` with a file in memory, or `tcp://HOST:PORT/GROUP` with
            torch's TCPStore. All keys of the group begin with GROUP, so a rank of another group cannot change them. Rank 0
            serves the TCPStore: in its URL, `fd` is the descriptor of the listening socket.
    """

    rank: int
    count: int
    local_rank: int
    local_count: int
    device: str
    store: str

    @property
    def has_other_hosts(self) -> bool:
        """True if some ranks are on other hosts."""
        return self.local_count < self.count


def start_rank(place: RankPlace, link: int, interfaces: Mapping[str, str], *descriptors: int) -> "subprocess.Popen[bytes]":
    """Start the process of a rank, which ends with this process.

    Args:
        link: the descriptor of the rank's end of the socket between it and the train worker.
        interfaces: environment variables that name the network interface. Those of this process have priority.
        descriptors: more descriptors that the rank inherits.
    """
    arguments = [json.dumps(asdict(place)), str(link), str(os.getpid())]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "agentrl.workers.ranks.rank", *arguments],
        env={**interfaces, **os.environ},
        stdin=subprocess.DEVNULL,
        pass_fds=[link, *descriptors],
        start_new_session=True,  # so that Ctrl-C reaches the worker only, and killpg all of the rank
    )


def kill_ranks(processes: "Sequence[subprocess.Popen[bytes]]", timeout_seconds: float | None) -> None:
    """Kill ranks, and the processes that they started. Wait at most `timeout_seconds` for each of the ranks; None: until it has
    ended.
    """
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        with suppress(subprocess.TimeoutExpired):  # the kernel may hold a process whose device hangs
            process.wait(timeout_seconds)
