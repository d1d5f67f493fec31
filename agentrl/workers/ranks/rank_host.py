"""The worker `ranks`: it lends the devices of this host to updates of train workers on other hosts, one group at a time.

The worker reads the table of meetings every second. It joins the oldest one, starts a rank for each device, and waits until the
ranks have ended. The ranks get commands from the train worker over connections that this worker has opened. They never use the
database.
"""

import json
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from logging import getLogger
from typing import Any, Literal

from agentrl.workers.ranks.host_meeting import (
    MAX_LINE_BYTES,
    MEETING_SECONDS,
    OFFER_SECONDS,
    RankOffer,
    interfaces_at,
    keep_alive,
    versions,
)
from agentrl.workers.ranks.rank_process import RankPlace, kill_rank, start_rank
from agentrl.workflow.errors import ConfigError, ServiceError
from agentrl.workflow.models.devices import devices_of_ranks
from agentrl.workflow.settings import settings
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.rank_meetings import RankMeeting, list_meetings

log = getLogger("agentrl.ranks")
POLL_SECONDS = 1.0


class MeetingRefused(Exception):
    """This host cannot take part in a meeting. The message is the train worker's reason."""


def serve(database: Database, stopping: threading.Event, ready: Callable[[], None], lost: Callable[[object], None]) -> None:
    """Join meetings until `stopping` is set. Call `ready` after each answer of the database, and `lost` if there is none."""
    refused: set[str] = set()
    while not stopping.wait(POLL_SECONDS):
        try:
            meetings = list_meetings(database)
        except ServiceError as error:
            lost(error)
            continue
        ready()
        refused &= {meeting.token for meeting in meetings}
        for meeting in (one for one in meetings if one.token not in refused):
            try:
                if _join(meeting, stopping):
                    break
            except MeetingRefused as error:
                log.warning("%s refused this host: %s", meeting.address, error)
                refused.add(meeting.token)


def _join(meeting: RankMeeting, stopping: threading.Event) -> bool:
    """Join a meeting, and run ranks until they end. Return False if the train worker is gone, or has enough hosts."""
    devices, error = _find_devices(meeting)
    with ExitStack() as stack:
        try:
            links = [stack.enter_context(_connect(meeting.address)) for _ in devices]
            address = links[0].getsockname()[0]
            interfaces, error = _find_interfaces(address, error)
            kind, member = devices[0].partition(":")[0], secrets.token_hex(8)
            for index, link in enumerate(links):
                offer = RankOffer(meeting.token, **versions(), host=socket.gethostname(), member=member, device=kind,
                                  devices=len(devices), index=index, error=error)  # fmt: skip
                link.sendall(offer.encode())
            places = [_read_place(link, device, len(devices), stopping) for link, device in zip(links, devices, strict=True)]
        except (OSError, EOFError):
            return False
        processes = [start_rank(place, link.fileno(), interfaces) for place, link in zip(places, links, strict=True)]
    log.info("lending %s to the train worker at %s", ", ".join(devices), meeting.address)
    _wait_for_end(processes, stopping)
    log.info("the ranks of the train worker at %s have ended", meeting.address)
    return True


def _find_devices(meeting: RankMeeting) -> tuple[list[str], str]:
    """Return the devices that the meeting wants of this host, or one name and the reason why it does not have them."""
    number: int | Literal["auto"] = int(meeting.devices) if meeting.devices.isdecimal() else "auto"
    try:
        return devices_of_ranks(number, settings().device, meeting.numerics, hosts=2), ""
    except ConfigError as error:
        return ["none"], str(error)


def _find_interfaces(address: str, error: str) -> tuple[Mapping[str, str], str]:
    try:
        return interfaces_at(address), error
    except ConfigError as missing:
        return {}, error or str(missing)


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    link = socket.create_connection((host, int(port)), OFFER_SECONDS)
    keep_alive(link)
    return link


def _read_place(link: socket.socket, device: str, here: int, stopping: threading.Event) -> RankPlace:
    """Wait for the answer to an offer. Read no byte of what follows: the rank's process reads the commands.

    Raise MeetingRefused with the train worker's reason. Raise EOFError if the train worker has ended, has enough hosts or
    sends no valid answer, or if this worker is to stop.
    """
    line, deadline = b"", time.monotonic() + MEETING_SECONDS + OFFER_SECONDS
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
    answer = _parse(line)
    if "error" in answer:
        raise MeetingRefused(str(answer["error"]))
    return RankPlace(int(answer["rank"]), int(answer["count"]), here, device, str(answer["store"]))


def _parse(line: bytes) -> Mapping[str, Any]:
    try:
        answer = json.loads(line)
    except ValueError:
        raise EOFError from None
    if not isinstance(answer, dict) or not ("error" in answer or {"rank", "count", "store"} <= answer.keys()):
        raise EOFError
    return answer


def _wait_for_end(processes: "list[subprocess.Popen[bytes]]", stopping: threading.Event) -> None:
    try:
        while any(process.poll() is None for process in processes) and not stopping.wait(POLL_SECONDS / 2):
            pass
    finally:
        for process in processes:
            kill_rank(process)
            process.wait()
