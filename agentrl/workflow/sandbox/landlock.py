"""The sandbox for machines without user namespaces. It uses Landlock, a stricter system call filter, rlimits and a supervisor
process.

A program can read /usr and its interpreter, and can write to one private folder, to which HOME and TMPDIR are set. The kernel
refuses access to all other files, TCP, sockets with an address, abstract sockets, and signalling or tracing processes outside
the sandbox. This needs Linux 6.12 or newer (Landlock's ABI 6). If root starts the sandbox, each sandbox has a separate user id,
as with bwrap. `keeper.py` enforces the limits on memory, processes, processor time and the folder's size. It checks them ten
times a second. At the end it kills all processes.

This sandbox is weaker than bwrap:

- Limits are polled. For a tenth of a second a program can exceed the limits on memory (in one process, by at most 1 GiB) and
    disk. If agentrl can create control groups, the memory limit is exact. A deleted file whose only descriptor is in transit in
    an unread socket pair is not counted, and stays on the disk as long as the socket pair exists.
- There is no private /tmp, only the folder. /tmp, /proc and /dev/shm can be neither read nor written. Programs that need them
    (`multiprocessing` locks, `psutil`) fail.
- The names of files are not secret. `stat` shows whether a path exists, and its size, owner and times, if the user has access
    to its folder. File contents and folder listings stay hidden. Host name, uptime, load and process ids are those of the
    machine.
- If an ordinary user starts the sandbox, the program runs as that user. The filter protects that user's other processes and
    files: it denies changing the priorities, limits and scheduling of other processes, and the modes and times of all files. So
    `chmod` and `utime` also fail in the program's own folder. The kernel's count of processes includes all other processes of
    the user. So a fork bomb is killed by the supervisor, and is not refused by the kernel.
- A single filter protects the kernel's file and process calls; there are no namespaces behind it. If the supervisor itself is
    killed (no process inside can do this), all of its descendants except the first survive.
"""

import ctypes
import errno
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from agentrl.workflow.errors import SandboxUnavailable
from agentrl.workflow.runtime.socket_pair import socket_pair
from agentrl.workflow.sandbox import Limits, cgroups, keeper, payload, seccomp, spawn, uid_pool
from agentrl.workflow.sandbox.boxed import Boxed
from agentrl.workflow.sandbox.cgroups import Cgroup, CgroupEvents
from agentrl.workflow.sandbox.launch import Inside, Launch
from agentrl.workflow.sandbox.self_test import holds, interpreters
from agentrl.workflow.sandbox.uid_pool import UidLease
from agentrl.workflow.settings import Settings

NEEDED_ABI = 6
LANDLOCK_CREATE_RULESET_VERSION = 1
LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
READABLE = ("/usr", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/dev/full")
SLACK_PROCESSES = 512
"""The number of processes that the other programs of an ordinary user may start while a sandbox runs. If they start more, the
kernel refuses new processes in the sandbox.
"""
SLACK_BYTES = 1 << 30
"""The amount of memory by which one process may exceed the memory limit between two checks, in bytes."""

AGENT_DENIED = (
    *("shmget", "shmat", "shmctl", "semget", "semop", "semtimedop", "semctl", "msgget", "msgsnd", "msgrcv", "msgctl"),
    *("mq_open", "mq_unlink", "migrate_pages", "move_pages", "process_mrelease", "sched_setattr"),
)
"""System calls that are denied to agents' programs, because no IPC namespace makes them harmless."""
FAMILIES = (
    *("socket", "connect", "bind", "listen", "memfd_create", "memfd_secret", "inotify_init", "inotify_init1"),
    *AGENT_DENIED,
)
"""System calls that are denied because this sandbox has no mount, network or IPC namespace to make them harmless."""
PROCESS_CALLS = ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam")
"""System calls whose first argument is a process id. They are allowed only with 0, which is the calling process."""
OWNER_CALLS = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"),
    *("utime", "utimes", "futimesat", "utimensat", "setxattr", "lsetxattr", "fsetxattr", "setxattrat"),
    *("removexattr", "lremovexattr", "fremovexattr", "removexattrat"),
)
"""System calls that Landlock does not cover. By these calls, a program of an ordinary user could change all files of that user.
"""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4


def abi() -> int:
    """Return the version of Landlock's ABI on this machine; 0 if the kernel has no Landlock."""
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(keeper.CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_CREATE_RULESET_VERSION)))


def check() -> None:
    """Check that Landlock works here. Raise SandboxUnavailable if the kernel is too old, or libseccomp is missing."""
    if abi() < NEEDED_ABI:
        raise SandboxUnavailable(
            f"The landlock sandbox needs Landlock's ABI {NEEDED_ABI} (Linux 6.12), and this kernel has {abi()}.",
            "If this machine allows user namespaces, install bubblewrap. Otherwise set AGENTRL_SANDBOX=docker.",
        )
    filters(owner=True)


@lru_cache(maxsize=2)
def filters(owner: bool) -> tuple[str, str]:
    """Return two system call filters, in hex: the one of programs in bwrap, and the additional one of this sandbox. `owner` is
    True if the program's user owns files of the host.
    """
    import pyseccomp

    rules = seccomp.rules()
    denied, arg = pyseccomp.ERRNO(errno.EPERM), pyseccomp.Arg
    syscall_filter = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in (*FAMILIES, *(OWNER_CALLS if owner else ())):
        if pyseccomp.resolve_syscall(pyseccomp.system_arch(), name) >= 0:
            syscall_filter.add_rule(denied, name)
    _deny_calls_on_others(syscall_filter)
    for option in (PR_SET_PDEATHSIG, PR_SET_DUMPABLE):
        # The kernel reads 32 bits of it.
        syscall_filter.add_rule(denied, "prctl", arg(0, pyseccomp.MASKED_EQ, 0xFFFFFFFF, option))
    for kind in range(seccomp.SOCK_TYPE_MASK + 1):  # a pair of datagram sockets could still send to an address
        if kind != seccomp.SOCK_STREAM:
            syscall_filter.add_rule(denied, "socketpair", arg(1, pyseccomp.MASKED_EQ, seccomp.SOCK_TYPE_MASK, kind))
    return rules.hex(), _exported(syscall_filter)


@lru_cache(maxsize=1)
def agent_filters() -> tuple[str, str]:
    """Return two system call filters, in hex, for an agent's program. Unlike other programs it may use TCP, and change the
    modes and times of its own files.

    Raises:
        SandboxUnavailable: libseccomp is missing.
    """
    rules = seccomp.rules(tcp=True)
    import pyseccomp

    syscall_filter = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in AGENT_DENIED:
        if pyseccomp.resolve_syscall(pyseccomp.system_arch(), name) >= 0:
            syscall_filter.add_rule(pyseccomp.ERRNO(errno.EPERM), name)
    _deny_calls_on_others(syscall_filter)
    return rules.hex(), _exported(syscall_filter)


def _deny_calls_on_others(syscall_filter: Any) -> None:
    import pyseccomp

    denied, arg = pyseccomp.ERRNO(errno.EPERM), pyseccomp.Arg
    for name in PROCESS_CALLS:
        syscall_filter.add_rule(denied, name, arg(0, pyseccomp.NE, 0))
    for name in ("setpriority", "ioprio_set"):  # (which, who): the caller is (0, 0) in the first and (1, 0) in the second
        syscall_filter.add_rule(denied, name, arg(0, pyseccomp.GT, 1 if name == "ioprio_set" else 0))
        syscall_filter.add_rule(denied, name, arg(1, pyseccomp.NE, 0))


def _exported(syscall_filter: Any) -> str:
    with TemporaryFile() as file:
        syscall_filter.export_bpf(file)
        file.seek(0)
        return file.read().hex()


def readable_paths(folders: tuple[str, ...]) -> list[str]:
    """Return the paths that a program may read: /usr, the folders that older systems have outside of /usr, and the
    interpreter's folders.
    """
    real = [path for path in LINKS if Path(path).is_dir() and not Path(path).is_symlink()]
    return [path for path in (*READABLE, *real, *folders) if Path(path).exists()]


@lru_cache(maxsize=1)
def keeper_source() -> str:
    """Return the supervisor's source code. It is passed as text, because the user that runs the interpreter may be unable to
    read agentrl's files.
    """
    return Path(keeper.__file__).read_text(encoding="utf-8")


def processes_of(uid: int) -> Iterator[int]:
    """Yield the ids of a user's current processes."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):
            if os.stat(f"/proc/{pid}").st_uid == uid:
                yield int(pid)


def threads_of(uid: int) -> int:
    """Return the current number of a user's processes and threads, as the kernel counts them."""
    return sum(len(keeper.names(f"/proc/{pid}/task")) for pid in processes_of(uid))


class Tally:
    """Counters of a Landlock sandbox: the kernel's counts or, if there are no control groups, the supervisor's report."""

    def __init__(self, cgroup: Cgroup, report: int) -> None:
        self._cgroup = cgroup
        self._report = report
        self._said: keeper.ExitReport | None = None

    def report(self) -> keeper.ExitReport | None:
        """Return the supervisor's report; None until the supervisor has ended."""
        if self._said is None and spawn.wait_readable(self._report, 0):
            line = os.read(self._report, 4096)
            self._said = json.loads(line) if line else None
        return self._said

    def set_limits(self, memory_bytes: int, processes: int) -> None:
        """See `Counts.set_limits`."""
        self._cgroup.set_limits(memory_bytes, processes)

    def events(self) -> CgroupEvents:
        """See `Counts.events`."""
        kernel, report = self._cgroup.events(), self.report()
        passed = report["passed"] if report else ""
        return CgroupEvents(kernel.oom + (passed == "oom"), kernel.pids + (passed == "pids"), int(passed == "disk"))

    def members(self) -> set[int] | None:
        """Return the ids of the processes in the control group; None if there is no control group."""
        return self._cgroup.members()

    def cpu_seconds(self) -> float | None:
        """See `Counts.cpu_seconds`. Without a control group, the processor time is known only after the end of the sandbox."""
        counted, report = self._cgroup.cpu_seconds(), self.report()
        return report["cpu_seconds"] if counted is None and report else counted


class KeptProcess:
    """A `RunningSandbox` under a supervisor process.

    Args:
        process: the supervisor.
        hold: the host's end of the control socket. When this end is closed, the supervisor kills all processes.
        uid: the sandbox's user id; None if the sandbox runs as the current user.
        tally: the counters of the sandbox.
        undone: a stack whose closing removes everything that was created for the sandbox.
    """

    def __init__(
        self, process: "subprocess.Popen[bytes]", hold: socket.socket, uid: int | None, tally: Tally, undone: ExitStack
    ) -> None:
        self.cgroup = tally
        self.end_fd = os.pidfd_open(process.pid)
        self._process = process
        self._hold = hold
        self._uid = uid
        self._undone = undone
        self._closed = False
        self._said: keeper.ExitReport | None = None

    def members(self) -> set[int]:
        """See `RunningSandbox.members`. Without a control group, return the processes of the sandbox's user or, without a
        separate user, the supervisor's descendants.

        Descendants are listed twice: an orphan that gets another parent during one listing could be missed.
        """
        if (counted := self.cgroup.members()) is not None:
            return counted
        if self._uid is not None:
            return set(processes_of(self._uid))
        return {int(pid) for _ in range(2) for pid, _ in keeper.descendants(self._process.pid)}

    def stop(self) -> None:
        """See `RunningSandbox.stop`."""
        spawn.send_order(self._hold, keeper.STOP)

    def go_on(self) -> None:
        """See `RunningSandbox.go_on`."""
        self._hold.sendall(keeper.GO_ON)

    def close(self) -> int:
        """See `RunningSandbox.close`."""
        if not self._closed:
            self._closed = True
            self._hold.close()
            spawn.wait_readable(self.end_fd)
            os.close(self.end_fd)
            self._process.wait()
            self._said = self.cgroup.report()  # read before its pipe is closed
            self._undone.close()
        return os.waitstatus_to_exitcode(self._said["status"]) if self._said else self._process.wait()


def launch(python: str, folders: tuple[str, ...], uids: range) -> Launch:
    """Return a launcher of Landlock sandboxes. Programs may also read `folders`. If this process is root, each sandbox gets a
    user id from `uids`.
    """

    def start_one(limits: Limits, inside: Inside) -> KeptProcess:
        return start(python, folders, uids, limits, inside)

    return Launch("landlock", start_one)


def find(settings: Settings) -> Boxed:
    """Create the Landlock sandbox, and test it by running a program. Raise SandboxUnavailable if the kernel or libseccomp lacks
    a feature, or the test program does not run. Raise ConfigError if the range of user ids is invalid.
    """
    check()
    uids, problem = uid_pool.uid_range(settings.sandbox_uids), "no interpreter was found"
    for python, folders in interpreters(settings):
        sandbox = Boxed(launch(python, folders, uids))
        runs, problem = holds(sandbox)
        if runs:
            return sandbox
    raise SandboxUnavailable(
        f"The kernel has Landlock, but its sandbox does not start here: {problem}", "See `agentrl doctor`."
    )


def start(python: str, folders: tuple[str, ...], uids: range, limits: Limits, inside: Inside) -> KeptProcess:
    """Start a sandbox. See `spawn.start`. Raise InfraError if the sandbox did not start."""
    with ExitStack() as undone, ExitStack() as passed_on:
        seat = uid_pool.lease_uid(uids)
        undone.callback(seat.release)
        cgroup = cgroups.make()
        undone.callback(cgroup.remove)
        cgroup.set_limits(limits.memory_bytes, limits.processes)
        folder = make_folder(seat)
        undone.callback(keeper.remove, folder)  # in case the keeper could not
        (hold, control), (reports, report) = socket_pair(), os.pipe()
        undone.callback(os.close, reports)
        source = spawn.memory_file(payload.sources(*inside.scripts))
        passed_on.enter_context(control)
        for file in (report, source):
            passed_on.callback(os.close, file)
        with ExitStack() as held:
            held.enter_context(hold)
            spec = make_spec(python, folders, seat, cgroup, folder, limits, inside, source, control.fileno(), report)
            command = [python, "-I", "-S", "-c", keeper_source(), json.dumps(spec)]
            process = spawn.start_process(command, inside, [control.fileno(), report, source, *inside.files])
            held.pop_all()
        return KeptProcess(process, hold, seat.uid, Tally(cgroup, reports), undone.pop_all())


def make_spec(
    python: str,
    folders: tuple[str, ...],
    seat: UidLease,
    cgroup: Cgroup,
    folder: str,
    limits: Limits,
    inside: Inside,
    source: int,
    control: int,
    report: int,
) -> keeper.Spec:
    """Build the request to the supervisor."""
    # The keeper and the control group limit the processes; the kernel's limit by user is the wall behind them.
    processes = 2 * inside.numbers[-1] if seat.uid else threads_of(os.getuid()) + SLACK_PROCESSES
    numbers = (*inside.numbers[:-1], processes)
    return {
        "argv": payload.command(python, source, *inside.files, *numbers),
        "env": payload.ENVIRONMENT | {"HOME": folder, "TMPDIR": folder},
        "folder": folder,
        "uid": seat.uid or 0,
        "joins": cgroup.joins,
        "readable": readable_paths((*folders, *inside.reads)),
        "devices": [path for path in DEVICES if Path(path).exists()],
        "rlimits": {"RLIMIT_DATA": limits.memory_bytes + SLACK_BYTES, "RLIMIT_FSIZE": limits.tmp_bytes},
        "filters": list(filters(owner=seat.uid is None)),
        "memory": limits.memory_bytes,
        "processes": limits.processes + cgroups.SPARE_PROCESSES,
        "disk": limits.tmp_bytes,
        "cpu": limits.cpu_seconds if inside.scripts[-1] == "runner" else 0.0,
        "control": control,
        "report": report,
    }


def make_folder(seat: UidLease) -> str:
    """Create an empty folder to which only the sandbox's user has access; return its path."""
    folder = tempfile.mkdtemp(prefix="agentrl-sandbox-")
    if seat.uid is not None:
        os.chown(folder, seat.uid, seat.uid)
    return folder
