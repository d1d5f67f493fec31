"""The worker `ranks`: it runs ranks on the devices of this host for the train worker of another host, one group at a time.

The worker reads the table `rank_meetings` every second. It joins the train worker of the oldest row, starts a rank for each
device, and waits until the ranks have ended. The ranks get commands from the train worker over connections that this worker has
opened. They never use the database.
"""

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from logging import getLogger
from typing import Any, Literal

from agentrl.workers.ranks.rank_process import RankPlace, kill_ranks, start_rank
from agentrl.workers.ranks.rendezvous import (
    MAX_LINE_BYTES,
    RENDEZVOUS_SECONDS,
    REQUEST_SECONDS,
    JoinRequest,
    interfaces_at,
    keep_alive,
    versions,
)
from agentrl.workflow.errors import ConfigError, ServiceError
from agentrl.workflow.models.devices import devices_of_ranks
from agentrl.workflow.settings import settings
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.rendezvous_rows import RendezvousRow, list_rendezvous

log = getLogger("agentrl.ranks")
POLL_SECONDS = 1.0
ANSWER = {"rank": int, "count": int, "store": str}
"""The values of the answer to a `JoinRequest`, and their types: the rank's number, the number of ranks, and the store's URL."""


class JoinRefused(Exception):
    """This host cannot take part in an update. The message is the train worker's reason."""


def serve(database: Database, stopping: threading.Event, ready: Callable[[], None], lost: Callable[[object], None]) -> None:
    """Join train workers until `stopping` is set. Call `ready` after each answer of the database, and `lost` without one."""
    refused: set[str] = set()
    while not stopping.wait(POLL_SECONDS):
        try:
            rows = list_rendezvous(database)
        except ServiceError as error:
            lost(error)
            continue
        ready()
        refused &= {row.token for row in rows}
        for row in (one for one in rows if one.token not in refused):
            try:
                if _run_ranks_for(row, stopping):
                    break
            except JoinRefused as error:
                log.warning("%s refused this host: %s", row.address, error)
                refused.add(row.token)


def _run_ranks_for(row: RendezvousRow, stopping: threading.Event) -> bool:
    """Join a train worker, and run ranks until they end. Return False if the train worker is gone, or has enough hosts."""
    devices, error = _find_devices(row)
    with ExitStack() as stack:
        try:
            links = [stack.enter_context(_connect(row.address)) for _ in devices]
            interfaces, no_interface = _find_interfaces(links[0].getsockname()[0])
            _send_requests(row, devices, error or no_interface, links)
            answers = [_read_answer(link, stopping) for link in links]
        except (OSError, EOFError):
            return False
        processes = [
            start_rank(
                RankPlace(**answer, local_rank=index, local_count=len(devices), device=devices[index]),
                link.fileno(),
                interfaces,
            )
            for index, (answer, link) in enumerate(zip(answers, links, strict=True))
        ]
    log.info("%s: ranks for the train worker at %s", ", ".join(devices), row.address)
    try:
        while any(process.poll() is None for process in processes) and not stopping.wait(POLL_SECONDS / 2):
            pass
    finally:
        kill_ranks(processes, timeout_seconds=None)  # a rank that still has its device must not meet the next one
    log.info("the ranks for the train worker at %s have ended", row.address)
    return True


def _find_devices(row: RendezvousRow) -> tuple[list[str], str]:
    """Return the devices that the run wants of this host, or one name and the reason why this host does not have them."""
    number: int | Literal["auto"] = int(row.devices) if row.devices.isdecimal() else "auto"
    try:
        return devices_of_ranks(number, settings().device, row.numerics, has_other_hosts=True), ""
    except ConfigError as error:
        return ["none"], str(error)


def _send_requests(row: RendezvousRow, devices: list[str], error: str, links: list[socket.socket]) -> None:
    """Send a `JoinRequest` for each device on its connection. `error` is why this host cannot take part."""
    member = secrets.token_hex(8)
    for index, (device, link) in enumerate(zip(devices, links, strict=True)):
        request = JoinRequest(
            token=row.token,
            **versions(),
            host=socket.gethostname(),
            member=member,
            device=device.partition(":")[0],
            devices=len(devices),
            index=index,
            error=error,
        )
        link.sendall(request.encode())


def _find_interfaces(address: str) -> tuple[dict[str, str], str]:
    """Return the environment variables of `interfaces_at`, or none and the reason why this host has no interface for ranks."""
    try:
        return interfaces_at(address), ""
    except ConfigError as error:
        return {}, str(error)


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    link = socket.create_connection((host, int(port)), REQUEST_SECONDS)
    keep_alive(link)
    return link


def _read_answer(link: socket.socket, stopping: threading.Event) -> dict[str, Any]:
    """Wait for the answer to a request, and return its values. Read no byte of what follows: the rank's process reads the
    commands.

    Raise JoinRefused with the train worker's reason. Raise EOFError if the train worker has ended, has enough hosts or
    sends no valid answer, or if this worker is to stop.
    """
    line, deadline = b"", time.monotonic() + RENDEZVOUS_SECONDS + REQUEST_SECONDS
    link.settimeout(POLL_SECONDS)
    while not line.endswith(b"\n"):
        try:
            byte = link.recv(1)
        except TimeoutError:
            byte = None
        if byte == b"" or len(line) == MAX_LINE_BYTES or stopping.is_set() or time.monotonic() > deadline:
            raise EOFError
        line += byte or b""
    link.settimeout(None)  # also for the rank, which inherits the socket
    return _decode_answer(line)


def _decode_answer(line: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        raise EOFError from None
    if isinstance(answer, dict) and "error" in answer:
        raise JoinRefused(str(answer["error"]))
    if not isinstance(answer, dict) or {name: type(value) for name, value in answer.items()} != ANSWER:
        raise EOFError
    return answer
