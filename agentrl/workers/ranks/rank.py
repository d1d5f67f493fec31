"""The process of one rank: `python -m agentrl.workers.ranks.rank`, which `rank_group` starts.

The process reads commands from an inherited socket, calls a `Trainer`, and replies. It ends when the worker closes the socket
or ends. A second thread reports every BEAT_SECONDS that the process runs, and how many microbatches it has begun.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

PR_SET_PDEATHSIG = 1
BEAT_SECONDS = 1.0
UNLIMITED = timedelta(days=30)
"""The timeout of sums over the ranks. The timeout is so long that it never expires: the worker decides how long it waits for a
rank, and then kills all ranks.
"""


class RankReplies:
    """The sender of this rank's lines of JSON to the worker. Both threads of the rank use it."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lock = threading.Lock()
        self.microbatches = 0
        """The number of microbatches that this rank has begun, over all updates."""

    def send(self, values: Mapping[str, Any]) -> None:
        """Send one line. End the process if the worker is gone."""
        try:
            with self._lock:
                self._link.sendall(json.dumps(values).encode() + b"\n")
        except OSError:
            os._exit(1)

    def count_microbatch(self) -> None:
        """Report progress: this rank begins a microbatch."""
        self.microbatches += 1

    def beat(self) -> None:
        """Send the number of microbatches, every BEAT_SECONDS, without end."""
        pause = threading.Event()
        while not pause.wait(BEAT_SECONDS):
            self.send({"microbatches": self.microbatches})


def main(rank: int, count: int, device: str, store: int, descriptor: int, worker: int) -> None:
    """Serve commands as one rank until the worker closes the socket.

    Args:
        rank, count: the number of this rank, from 0, and the number of ranks.
        device: the device of this rank.
        store: the descriptor of a file in memory, by which the ranks find each other.
        descriptor: the descriptor of this rank's end of the socket pair between it and the worker.
        worker: the pid of the worker. If the worker ends, the kernel kills this process.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != worker:  # it ended before
        return
    link = socket.socket(fileno=descriptor)
    replies = RankReplies(link)
    threading.Thread(target=replies.beat, name="beat", daemon=True).start()
    from agentrl.workers.ranks.rank_messages import encode_error, read_command

    try:
        server = _join(rank, count, device, store, replies)
    except Exception as error:  # noqa: BLE001 - the worker reports it
        replies.send({"error": encode_error(error)})
        return
    with link.makefile("rb") as commands:
        while (command := read_command(commands)) is not None:
            try:
                result = server.run(command)
            except Exception as error:  # noqa: BLE001 - the worker reports it, and ends this process
                replies.send({"error": encode_error(error)})
                return
            replies.send({"result": result})


def _join(rank: int, count: int, device: str, store: int, replies: RankReplies) -> Any:
    import torch
    import torch.distributed as dist

    from agentrl.workers.ranks.rank_server import RankServer
    from agentrl.workflow.settings import settings
    from agentrl.workflow.training.ranks import Ranks

    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(settings().threads or max(1, len(os.sched_getaffinity(0)) // count))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"file:///proc/self/fd/{store}",
        rank=rank,
        world_size=count,
        timeout=UNLIMITED,
        device_id=torch.device(device) if on_gpu else None,
    )
    return RankServer(Ranks(rank, count, replies.count_microbatch), device)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]))
