"""A bubblewrap sandbox, seen from the host: bwrap's process, the first process inside, a control group and a leased user id.

bwrap's `--die-with-parent` refers to the thread that started bwrap, not to the process: the sandbox dies with that thread. So a
single thread starts all sandboxes, and it lives as long as this process. To end a sandbox, the host kills the first process of
its namespace. The sandbox has ended when the kernel has reaped all of its processes. When `Box.close` returns, no process of
the sandbox is left.
"""

import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from agentrl.workflow.errors import InfraError
from agentrl.workflow.runtime.socket_pair import socket_pair
from agentrl.workflow.sandbox import Limits, bwrap, cgroups, keeper, payload, proc, seccomp, uid_pool
from agentrl.workflow.sandbox.cgroups import Cgroup
from agentrl.workflow.sandbox.launch import Inside, Launch
from agentrl.workflow.sandbox.uid_pool import UidLease

BWRAP_SECONDS = 5.0
"""The longest time in which bwrap exits after the first process has ended, in seconds. bwrap exits with the exit code of that
process.
"""
SIGNAL_EXIT_BASE = 128
"""The number that bwrap adds to a signal's number. The sum is bwrap's exit code if that signal ended the program."""
ORDER_SECONDS = 10.0
START_SECONDS = 60.0
"""The longest time for the start of a sandbox, in seconds. It allows for a very busy machine."""

_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox-spawner")


def memory_file(data: bytes) -> int:
    """Create an unnamed file with these bytes, positioned at its beginning; return its descriptor."""
    file = os.memfd_create("sandbox")
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


class Box:
    """A running bubblewrap sandbox.

    Args:
        process: bwrap's process.
        first: the id of the first process inside.
        cgroup: the control groups of the sandbox.
        seat: the user id of the sandbox.
        orders: the socket over which the first process receives orders to stop and continue the others; None if it does not
            take orders.
    """

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        first: int,
        cgroup: Cgroup,
        seat: UidLease,
        orders: socket.socket | None = None,
    ) -> None:
        self.process = process
        self.cgroup = cgroup
        self.end_fd = os.pidfd_open(process.pid)
        self._first_id = first
        self._first = os.pidfd_open(first)
        self._seat = seat
        self._orders = orders
        self._closed = False

    def members(self) -> set[int]:
        """See `RunningSandbox.members`. The members are the first process and all of its descendants."""
        if self._closed or wait_readable(self._first, 0):
            return set()  # another process may have its number by now
        if (counted := self.cgroup.members()) is not None:
            return counted
        if Path(f"/proc/{self._first_id}/task/{self._first_id}/children").exists():
            # Listed twice, since processes orphaned meanwhile move up.
            return {self._first_id} | {int(process) for _ in range(2) for process, _ in keeper.descendants(self._first_id)}
        parents = dict(filter(None, map(_parent, filter(str.isdigit, os.listdir("/proc")))))
        processes: set[int] = set()
        layer = {self._first_id}
        while layer:
            processes |= layer
            layer = {process for process, parent in parents.items() if parent in layer}
        return processes

    def stop(self) -> None:
        """See `RunningSandbox.stop`."""
        assert self._orders is not None
        send_order(self._orders, keeper.STOP)

    def go_on(self) -> None:
        """See `RunningSandbox.go_on`."""
        assert self._orders is not None
        self._orders.sendall(keeper.GO_ON)

    def close(self) -> int:
        """See `RunningSandbox.close`."""
        if not self._closed:
            self._closed = True
            if self._orders is not None:
                self._orders.close()
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            wait_readable(self._first)
            if not wait_readable(self.end_fd, BWRAP_SECONDS):
                self.process.kill()
            bury(self.process, self.cgroup)
            with suppress(ChildProcessError):  # it is a child only where this process is the machine's first, heir of orphans
                os.waitid(os.P_PIDFD, self._first, os.WEXITED)
            os.close(self._first)
            os.close(self.end_fd)
            self.cgroup.remove()
            self._seat.release()
        code = self.process.wait()
        return SIGNAL_EXIT_BASE - code if code > SIGNAL_EXIT_BASE else code


def launch(profile: bwrap.Profile, uids: range) -> Launch:
    """Return a launcher of bwrap sandboxes. If this process is root, each sandbox gets a user id from the range `uids`."""

    def start_one(limits: Limits, inside: Inside) -> Box:
        return start(profile, uids, limits, inside)

    return Launch("bwrap", start_one, profile.nests)


def start(profile: bwrap.Profile, uids: range, limits: Limits, inside: Inside) -> Box:
    """Start a sandbox. Raise InfraError if the sandbox did not start."""
    with ExitStack() as files, ExitStack() as undone:
        (info_reader, info), (waits, go) = os.pipe(), os.pipe()
        source, rules = memory_file(payload.sources(*inside.scripts)), memory_file(seccomp.rules())
        full_profile = replace(profile, folders=(*profile.folders, *inside.reads))
        filter_file = None if inside.zygote else rules
        options = memory_file(bwrap.options(full_profile, limits.tmp_bytes, info, waits, filter_file, inside.session))
        for file in (info_reader, waits, go, source, rules, options):
            files.callback(os.close, file)
        orders, theirs = socket_pair() if inside.session else (None, None)
        if orders and theirs:
            undone.callback(orders.close)
            files.callback(theirs.close)
        seat = uid_pool.lease_uid(uids)
        undone.callback(seat.release)
        cgroup = cgroups.make()
        undone.callback(cgroup.remove)
        cgroup.set_limits(limits.memory_bytes, limits.processes)
        last = [rules] if inside.zygote else [theirs.fileno()] if theirs else []
        argv = payload.command(profile.python, source, *inside.files, *inside.numbers, *last)
        command = bwrap.command(profile, options, seat.uid, cgroup.joins, argv)
        try:
            process = start_process(command, inside, [info, waits, source, rules, options, *inside.files, *last])
        finally:
            os.close(info)
        undone.callback(process.wait)
        undone.callback(process.kill)
        try:
            box = Box(process, _first_process(info_reader), cgroup, seat, orders)
        except ProcessLookupError as error:
            raise InfraError("A sandbox ended while it started.") from error
        os.write(go, b"1")
        undone.pop_all()
        return box


def bury(process: "subprocess.Popen[bytes]", cgroup: Cgroup) -> None:
    """Reap a process that has ended. Store the processor time of the process and its children in `cgroup`."""
    _, code, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(code)
    cgroup.note_final_cpu_seconds(used.ru_utime + used.ru_stime)


def send_order(line: socket.socket, order: bytes) -> None:
    """Send an order to a sandbox's process, and wait for the acknowledgement. Raise OSError if the process is gone, or does not
    acknowledge within 10 s.
    """
    line.settimeout(ORDER_SECONDS)
    line.sendall(order)
    if line.recv(1) != order:
        raise ConnectionResetError("the sandbox's processes are gone")


def wait_readable(file: int, seconds: float | None = None) -> bool:
    """Return whether `file` becomes readable within `seconds` (None: no time limit). A pidfd becomes readable when its process
    ends.
    """
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(None if seconds is None else max(0, seconds * 1000)))


def start_process(
    command: Sequence[str], inside: Inside, files: Sequence[int], env: Mapping[str, str] | None = None, cwd: str = "/"
) -> "subprocess.Popen[bytes]":
    """Start a process from the single thread that starts all sandboxes. `env` is the complete environment of the process."""

    def popen() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            command,
            env=env or {},
            stdin=inside.stdin,
            stdout=inside.output,
            stderr=inside.output,
            pass_fds=files,
            cwd=cwd,
            start_new_session=True,
        )

    return _spawner.submit(popen).result()


def _first_process(info_reader: int) -> int:
    """Return the id of the sandbox's first process, which bwrap reports on its info descriptor."""
    info = b""
    while wait_readable(info_reader, START_SECONDS) and (part := os.read(info_reader, 4096)):
        info += part
    try:
        return int(json.loads(info)["child-pid"])
    except (ValueError, KeyError) as error:
        raise InfraError("A sandbox did not start.") from error


def _parent(process: str) -> tuple[int, int] | None:
    """Return the ids of a process and of its parent; None if the process is gone or dead."""
    stat = proc.fields(int(process))
    if not stat or (stat[0] in "ZX" and not proc.threads_of(int(process))[0]):
        return None
    return int(process), int(stat[1])
