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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from agentrl.workers.ranks.rank_process import RankPlace

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


def main(place: RankPlace, descriptor: int, worker: int) -> None:
    """Serve commands as one rank until the train worker closes the socket.

    Args:
        place: the place of this rank in its group.
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
    from agentrl.workers.ranks.rank_messages import encode_error

    try:
        with _limit_join(place, replies):
            server = _join(place, replies)
        _serve(server, link, replies)
    except Exception as error:  # noqa: BLE001 - the worker reports it, and ends this process
        replies.send({"error": encode_error(error)})


@contextmanager
def _limit_join(place: RankPlace, replies: RankReplies) -> Iterator[None]:
    """End this process with an error if the context takes longer than JOIN_SECONDS, and some ranks are on other hosts."""
    from agentrl.workers.ranks.rank_messages import encode_error
    from agentrl.workflow.errors import InfraError

    def give_up() -> None:
        reason = f"It could not connect to the other ranks within {JOIN_SECONDS:g} s. Let TCP through between the hosts."
        replies.send({"error": encode_error(InfraError(f"Rank {place.rank} of {place.count}: {reason}"))})
        os._exit(1)

    timer = threading.Timer(JOIN_SECONDS, give_up)
    timer.daemon = True
    if place.has_other_hosts:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _join(place: RankPlace, replies: RankReplies) -> Any:
    """Join the process group. Return the `RankServer` of this rank."""
    import torch
    import torch.distributed as dist

    from agentrl.workers.ranks.rank_server import RankServer
    from agentrl.workflow.settings import settings
    from agentrl.workflow.training.ranks import Ranks

    device = place.device
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(settings().threads or max(1, len(os.sched_getaffinity(0)) // place.local_count))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        rank=place.rank,
        world_size=place.count,
        timeout=UNLIMITED,
        device_id=torch.device(device) if on_gpu else None,
        **_open_store(place),
    )
    ranks = Ranks(place.rank, place.count, replies.count_microbatch, replies.report_files, place.local_rank)
    return RankServer(ranks, device, place.has_other_hosts, replies.send)


def _open_store(place: RankPlace) -> dict[str, Any]:
    """Return the arguments of `init_process_group` that name the store at which the ranks find each other."""
    import torch.distributed as dist

    url = urlsplit(place.store)
    if url.scheme == "file":
        return {"init_method": place.store}
    host, _, port = url.netloc.rpartition(":")
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        int(port),
        place.count,
        is_master=place.rank == 0,
        timeout=UNLIMITED,
        wait_for_workers=False,
        master_listen_fd=int(url.query.removeprefix("fd=")) if url.query else None,  # else torch listens on all addresses
    )
    return {"store": dist.PrefixStore(url.path.strip("/"), store)}  # type: ignore[attr-defined]


def _serve(server: Any, link: socket.socket, replies: RankReplies) -> None:
    """Run commands until the train worker closes the socket. A rank on another host also ends after IDLE_SECONDS."""
    from agentrl.workers.ranks.rank_messages import read_command

    arrivals = select.poll()
    arrivals.register(link, select.POLLIN)
    idle_ms = IDLE_SECONDS * 1000 if link.family != socket.AF_UNIX else None
    with link.makefile("rb") as commands:
        while arrivals.poll(idle_ms) and (command := read_command(commands)) is not None:
            replies.send({"result": server.run(command)})


if __name__ == "__main__":
    main(RankPlace(**json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
