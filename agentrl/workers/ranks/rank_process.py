"""The start of a rank's process, by the train worker or by a worker `ranks`."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a rank in its group. See `rank.main`.

    Args:
        here: the number of ranks on this host.
    """

    rank: int
    count: int
    here: int
    device: str
    store: str


def start_rank(place: RankPlace, link: int, interfaces: Mapping[str, str], *descriptors: int) -> "subprocess.Popen[bytes]":
    """Start the process of a rank, which ends with this process.

    Args:
        link: the descriptor of the rank's end of the socket between it and the train worker.
        interfaces: environment variables that name the network interface. Those of this process have priority.
        descriptors: more descriptors that the rank inherits.
    """
    arguments = [place.rank, place.count, place.here, place.device, place.store, link, os.getpid()]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "agentrl.workers.ranks.rank", *map(str, arguments)],
        env={**interfaces, **os.environ},
        stdin=subprocess.DEVNULL,
        pass_fds=[link, *descriptors],
        start_new_session=True,  # so that Ctrl-C reaches the worker only, and killpg all of the rank
    )


def kill_rank(process: "subprocess.Popen[bytes]") -> None:
    """Kill a rank, and the processes that it started. Do not wait for their end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
