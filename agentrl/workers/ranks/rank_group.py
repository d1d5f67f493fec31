"""The ranks of this worker. The worker starts them, sends each command to all of them, watches them, and kills them together.
Workers `ranks` on other hosts can start some of them (`rendezvous`); such a rank ends when this worker closes its link.

The ranks keep running between updates and between runs. If a rank ends, reports an error or hangs, all ranks are killed,
because the others would wait for it. The update is then made again, by new ranks, from the last checkpoint.

No late message of a lost rank or of an earlier job is taken for a new one. Each group has its own sockets, and its own keys in
the store by which its ranks find each other. A command is sent after all ranks have replied to the command before, and after
any error the sockets are closed. A rank whose socket is closed ends within two beats, or, if its host is cut off, after
SILENCE_SECONDS.
"""

import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any

from agentrl.workers.ranks.rank_messages import RankCommand, decode_error
from agentrl.workers.ranks.rank_process import RankPlace, kill_ranks, start_rank
from agentrl.workers.ranks.rendezvous import JoinedHost, Rendezvous, interfaces_at, listen
from agentrl.workflow.errors import AgentRLError, Fenced, InfraError, RankLost
from agentrl.workflow.settings import settings

log = getLogger("agentrl.ranks")

POLL_SECONDS = 0.2
LEASES_WITHOUT_PROGRESS = 20
"""The time, in leases, after which a group counts as hanging if all of its ranks run but none begins a microbatch. A rank that
reads or writes files, such as a checkpoint, may take longer. If the process of a rank is stopped, so that it sends nothing, the
ranks are killed after one lease, or after MIN_SILENCE_SECONDS if that is longer.
"""

MIN_SILENCE_SECONDS = 10.0
"""The shortest time without a line from a rank after which the rank's process counts as stopped, in seconds."""

END_SECONDS = 1.0
"""The time in which the kernel ends a process whose connections it has closed, in seconds."""

DEADLY_SIGNALS = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)
"""The exit codes of a rank that was killed (for example out of memory) or crashed. An error of another rank never has this
consequence.
"""

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""The environment variables that keep the ranks' connections on this machine. If the worker's environment sets one of them to
another interface, that interface is used.
"""

Report = Callable[[Any], None]
"""A function that receives the progress of a training, as JSON."""


@dataclass
class Rank:
    """One rank as the worker sees it: the rank's process, the worker's end of the socket, and what the worker received last.

    Attributes:
        process: None for a rank on another host.
        host: the name of the other host; empty for this host.
        unread: the beginning of a line that is not complete yet.
        last_beat: the time of the last line, by the monotonic clock; None before the first.
        microbatches: the number of microbatches that the rank has begun.
        uses_files: whether the rank reads or writes files.
    """

    process: "subprocess.Popen[bytes] | None"
    link: socket.socket
    host: str = ""
    unread: bytes = b""
    last_beat: float | None = None
    microbatches: int = 0
    uses_files: bool = False

    @property
    def is_alive(self) -> bool:
        """True if the rank runs. For a rank on another host: if its link is open."""
        if self.process is not None:
            return self.process.poll() is None
        self.link.setblocking(False)
        try:
            while data := self.link.recv(1 << 16):
                self.unread += data
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


@dataclass
class RankGroup:
    """Running ranks, one for each of `devices`, and those of the other hosts of `rendezvous`. Use `start` to make a group."""

    devices: Sequence[str]
    rendezvous: Rendezvous | None = None
    _ranks: list[Rank] = field(default_factory=list)

    @classmethod
    def start(cls, devices: Sequence[str], rendezvous: Rendezvous | None = None) -> "RankGroup":
        """Start a rank for each device. If the start of a rank fails, the first command reports the error.

        With a `rendezvous`, wait for the ranks of other hosts, and raise what `Rendezvous.gather` raises.
        """
        group = cls(tuple(devices), rendezvous)
        try:
            if rendezvous is None:
                # The ranks find each other by a file in memory. It has no name, so only they can open it. It ends with them.
                store = os.memfd_create("agentrl-ranks")
                try:
                    group._start_ranks(len(devices), f"file:///proc/self/fd/{store}", LOOPBACK, store)
                finally:
                    os.close(store)
            else:
                group._start_with_hosts(rendezvous.gather(devices[0].partition(":")[0]))
        except BaseException:
            group.close()
            raise
        log.info("started %d ranks on %s", len(devices), ", ".join(devices))
        return group

    def _start_with_hosts(self, hosts: Sequence[JoinedHost]) -> None:
        """Start the ranks of this host, and let the other hosts start theirs, whose numbers follow."""
        others = [Rank(None, link, host.name) for host in hosts for link in host.links]
        count = len(self.devices) + len(others)
        try:
            with listen() as server:
                address, port = server.getsockname()
                store = f"tcp://{address}:{port}/{secrets.token_hex(8)}"
                self._start_ranks(count, store, interfaces_at(address), server.fileno())
            for number, rank in enumerate(others, start=len(self.devices)):
                rank.link.settimeout(_beat_limit())
                rank.link.sendall(json.dumps({"rank": number, "count": count, "store": store}).encode() + b"\n")
        except OSError as error:
            raise InfraError(f"Another host was lost before the ranks started: {error}.") from error
        finally:
            self._ranks += others
        log.info("%d ranks on %s take part", len(others), ", ".join(host.name for host in hosts))

    def _start_ranks(self, count: int, store: str, interfaces: Mapping[str, str], descriptor: int) -> None:
        """Start the ranks of this host. They inherit `descriptor`, with which rank 0 serves a `tcp://` store."""
        for number, device in enumerate(self.devices):
            ours, theirs = socket.socketpair()
            url = f"{store}?fd={descriptor}" if number == 0 and store.startswith("tcp:") else store
            place = RankPlace(number, count, number, len(self.devices), device, url)
            with theirs:
                self._ranks.append(Rank(start_rank(place, theirs.fileno(), interfaces, descriptor), ours))

    @property
    def is_alive(self) -> bool:
        """True if all ranks run."""
        return bool(self._ranks) and all(rank.is_alive for rank in self._ranks)

    def call(self, command: RankCommand, fenced: threading.Event, report: Report = lambda progress: None) -> list[Any]:
        """Send the command to all ranks. Return their results, by rank. After any error, all ranks have been killed.

        Raise the error that a rank reported. Raise RankLost if a rank ended or hangs. Raise Fenced if another trainer has
        claimed the iteration (`fenced` is set). `report` is called with the progress that a rank sends.
        """
        try:
            self._send(command)
            return self._receive_results(command.name, fenced, report)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill all ranks. Those of other hosts end when they notice that their link is closed."""
        for rank in self._ranks:
            rank.link.close()
        kill_ranks([rank.process for rank in self._ranks if rank.process is not None], settings().lease_seconds)
        self._ranks = []

    def _send(self, command: RankCommand) -> None:
        data = command.encode()
        for number, rank in enumerate(self._ranks):
            rank.link.settimeout(_beat_limit())
            try:
                rank.link.sendall(data)
            except OSError as error:
                raise self._lost_error(number, command.name) from error

    def _receive_results(self, name: str, fenced: threading.Event, report: Report) -> list[Any]:
        results: dict[int, Any] = {}
        began = progressed = time.monotonic()
        for rank in self._ranks:
            rank.last_beat = None if rank.last_beat is None else began
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self._ranks):
                selector.register(rank.link, selectors.EVENT_READ, number)
            while len(results) < len(self._ranks):
                if fenced.is_set():
                    raise Fenced(
                        f"The {name} on {len(self._ranks)} ranks was stopped: another worker has taken over its claim."
                    )
                for key, _ in selector.select(POLL_SECONDS):
                    for values in self._read_lines(key.data, name):
                        if "result" in values:
                            results[key.data] = values["result"]
                        if "progress" in values:
                            report(values["progress"])
                        progressed = self._note_progress(self._ranks[key.data], values, progressed)
                self._check_hanging(name, began, None if self._may_pause(name) else progressed)
        return [results[number] for number in range(len(self._ranks))]

    def _read_lines(self, number: int, name: str) -> list[Mapping[str, Any]]:
        """Return the complete lines that a rank has sent. Raise the error that it reports, or RankLost if it has ended."""
        rank = self._ranks[number]
        try:
            data = rank.link.recv(1 << 20)
        except OSError as error:
            raise self._lost_error(number, name) from error
        if not data:
            raise self._lost_error(number, name)
        *lines, rank.unread = (rank.unread + data).split(b"\n")
        received = [json.loads(line) for line in lines]
        for values in received:
            if "error" in values:
                raise self._cause(number, values["error"], name)
        return received

    def _cause(self, number: int, error: Mapping[str, Any], name: str) -> AgentRLError:
        """Return the error that a rank reported. If it is the consequence of another rank's end, return that.

        A rank may report the error of another rank (`ErrorOfRank`). An error is a consequence if another rank ended before it,
        or by one of DEADLY_SIGNALS, which may be seen a little later. Another end that is seen later may itself be a
        consequence.
        """
        others = {other: rank.process for other, rank in enumerate(self._ranks) if other != number and rank.process is not None}
        ended = [] if error["class"] else [other for other, process in others.items() if process.poll()]
        deadline = time.monotonic() + (0 if error["class"] else END_SECONDS)
        while not ended and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 10)
            ended = [other for other, process in others.items() if process.poll() in DEADLY_SIGNALS]
        origin = error.get("rank", number)
        return self._lost_error(ended[0], name) if ended else decode_error(error, origin, self._ranks[origin].host)

    def _note_progress(self, rank: Rank, values: Mapping[str, Any], progressed: float) -> float:
        """Note a line of a rank. Return the time of the last progress: a result, another microbatch, or the beginning or end of
        the rank's use of files.
        """
        rank.last_beat = time.monotonic()
        before, rank.microbatches = rank.microbatches, values.get("microbatches", rank.microbatches)
        rank.uses_files = values.get("uses_files", rank.uses_files)
        has_progressed = "result" in values or "uses_files" in values or rank.microbatches > before
        return rank.last_beat if has_progressed else progressed

    def _may_pause(self, name: str) -> bool:
        """Return True if a long time without a microbatch is no fault: before the first microbatch of a training, while ranks
        load the model; while a rank reads or writes files; and in all commands but `update` and `training`.
        """
        if name == "training":
            return any(rank.uses_files for rank in self._ranks) or not any(rank.microbatches for rank in self._ranks)
        return name != "update"

    def _check_hanging(self, name: str, began: float, progressed: float | None) -> None:
        """Raise RankLost if a rank sends nothing, or if none has begun a microbatch since `progressed`; None: since now."""
        now, patience = time.monotonic(), LEASES_WITHOUT_PROGRESS * settings().lease_seconds
        for number, rank in enumerate(self._ranks):
            silent, limit = (now - began, patience) if rank.last_beat is None else (now - rank.last_beat, _beat_limit())
            if silent > limit:
                raise RankLost(f"{self._describe(number)} did not respond for {silent:.0f} s in the {name}.")
        if progressed is not None and now - progressed > patience:
            raise RankLost(f"In the last {now - progressed:.0f} s, none of {len(self._ranks)} ranks began a microbatch.")

    def interrupt(self) -> None:
        """Send Ctrl-C to rank 0. A training ends after its current step, on all ranks."""
        process = self._ranks[0].process
        if process is not None:
            process.send_signal(signal.SIGINT)

    def _lost_error(self, number: int, name: str) -> RankLost:
        process = self._ranks[number].process
        if process is None:
            return RankLost(
                f"{self._describe(number)} was lost in the {name}.", "The log of that host's worker has its last lines."
            )
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        code = process.returncode
        how = "" if code is None else f" with signal {-code}" if code < 0 else f" with exit code {code}"
        return RankLost(f"{self._describe(number)} ended in the {name}{how}.", "The worker's log has its last lines.")

    def _describe(self, number: int) -> str:
        host = self._ranks[number].host
        return f"Rank {number} of {len(self._ranks)}" + (f", on {host}," if host else "")


def _beat_limit() -> float:
    return max(settings().lease_seconds, MIN_SILENCE_SECONDS)


_running: list[RankGroup] = []


def group_for(devices: Sequence[str], rendezvous: Rendezvous | None = None) -> RankGroup:
    """Return the running ranks on these devices, and on those of other hosts if there is a `rendezvous`. If there are none, or
    the running ranks use other devices, start new ranks.
    """
    same = [one for one in _running if one.is_alive and (one.devices, one.rendezvous) == (tuple(devices), rendezvous)]
    if not same:
        close_group()
        _running.append(RankGroup.start(devices, rendezvous))
    return _running[0]


def close_group() -> None:
    """Kill the running ranks, if there are any. This frees the memory of their devices."""
    while _running:
        _running.pop().close()
