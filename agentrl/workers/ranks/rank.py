"""The process of one rank: `python -m agentrl.workers.ranks.rank`, which `rank_process` starts.

The process reads commands from an inherited socket, calls a `Trainer`, and replies. It ends when the train worker closes the
socket, or when the worker that started it ends. A second thread reports every BEAT_SECONDS that the process runs, and how many
microbatches it has begun. If `agentrl sft` or `dpo` starts ranks, it takes the place of the train worker.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

PR_SET_PDEATHSIG = 1
BEAT_SECONDS = 1.0
UNLIMITED = timedelta(days=30)
"""The timeout of sums over the ranks. The timeout is so long that it never expires: the worker decides how long it waits for a
rank, and then kills all ranks.
"""
JOIN_SECONDS = 120.0
"""How long a rank may take to connect to the ranks of other hosts, in seconds. Without a limit, a firewall
that drops packets would block it for ever.
"""

IDLE_SECONDS = 600.0
"""The seconds without a command after which a rank on another host ends, so that its host can join another train worker."""


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

    def report_files(self, uses_files: bool) -> None:
        """Report that this rank begins, or has ended, to read or write files. Meanwhile it begins no microbatch."""
        self.send({"microbatches": self.microbatches, "uses_files": uses_files})

    def beat(self) -> None:
        """Send the number of microbatches, every BEAT_SECONDS, without end."""
        pause = threading.Event()
        while not pause.wait(BEAT_SECONDS):
            self.send({"microbatches": self.microbatches})


def main(rank: int, count: int, here: int, device: str, store: str, descriptor: int, worker: int) -> None:
    """Serve commands as one rank until the train worker closes the socket.

    Args:
        rank, count: the number of this rank, from 0, and the number of ranks.
        here: the number of ranks on this host.
        device: the device of this rank.
        store: the URL at which the ranks find each other: `file://` with a file in memory, or `tcp://HOST:PORT` with torch's
            TCPStore. Rank 0 serves the TCPStore: in its URL, `fd` is the descriptor of the listening socket.
        descriptor: the descriptor of this rank's end of the socket between it and the train worker.
        worker: the pid of the worker that starts this rank. If that worker ends, the kernel kills this process.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a training catches it while it takes steps
    if os.getppid() != worker:  # it ended before
        return
    link = socket.socket(fileno=descriptor)
    replies = RankReplies(link)
    threading.Thread(target=replies.beat, name="beat", daemon=True).start()
    from agentrl.workers.ranks.rank_messages import encode_error, read_command
    from agentrl.workflow.errors import InfraError

    def give_up() -> None:
        reason = f"It could not connect to the other ranks within {JOIN_SECONDS:g} s. Let TCP through between the hosts."
        replies.send({"error": encode_error(InfraError(f"Rank {rank} of {count}: {reason}"))})
        os._exit(1)

    timer = threading.Timer(JOIN_SECONDS, give_up)
    timer.daemon = True
    if here < count:
        timer.start()
    try:
        server = _join(rank, count, here, device, store, replies)
    except Exception as error:  # noqa: BLE001 - the worker reports it
        replies.send({"error": encode_error(error)})
        return
    timer.cancel()
    arrivals = select.poll()
    arrivals.register(link, select.POLLIN)
    idle_ms = IDLE_SECONDS * 1000 if link.family != socket.AF_UNIX else None
    with link.makefile("rb") as commands:
        while arrivals.poll(idle_ms) and (command := read_command(commands)) is not None:
            try:
                result = server.run(command)
            except Exception as error:  # noqa: BLE001 - the worker reports it, and ends this process
                replies.send({"error": encode_error(error)})
                return
            replies.send({"result": result})


def _join(rank: int, count: int, here: int, device: str, store: str, replies: RankReplies) -> Any:
    import torch
    import torch.distributed as dist

    from agentrl.workers.ranks.rank_server import RankServer
    from agentrl.workflow.settings import settings
    from agentrl.workflow.training.ranks import Ranks

    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(settings().threads or max(1, len(os.sched_getaffinity(0)) // here))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        rank=rank,
        world_size=count,
        timeout=UNLIMITED,
        device_id=torch.device(device) if on_gpu else None,
        **_open_store(rank, count, store),
    )
    return RankServer(Ranks(rank, count, replies.count_microbatch, replies.report_files), device, here < count, replies.send)


def _open_store(rank: int, count: int, url: str) -> dict[str, Any]:
    """Return the arguments of `init_process_group` that name the store at which the ranks find each other."""
    import torch.distributed as dist

    place = urlsplit(url)
    if place.scheme == "file":
        return {"init_method": url}
    host, _, port = place.netloc.rpartition(":")
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        int(port),
        count,
        is_master=rank == 0,
        timeout=UNLIMITED,
        wait_for_workers=False,
        master_listen_fd=int(place.query.removeprefix("fd=")) if place.query else None,  # else torch listens on all addresses
    )
    return {"store": store}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5], int(sys.argv[6]), int(sys.argv[7]))
