"""The supervisor process of a Landlock sandbox. It confines a child, watches the resources of all descendants, and kills them.

The supervisor is a separate script (`python3 -I keeper.py SPEC`). It imports only the standard library, and its environment is
empty, so it has no secrets. Without namespaces, Linux cannot kill all descendants of a process, because daemons leave their
group and their parent. So the supervisor enters a Landlock domain that limits signals, and its child enters a second domain
inside the first. The descendants of the child can then signal one another, but no other process, not even the supervisor. The
supervisor can signal only its descendants. So `kill(-1)` reaches exactly these, in one step that a fork cannot escape.

SPEC is JSON (see `Spec`). Over the control socket the supervisor receives two kinds of orders. The first is to stop all
descendants; the supervisor acknowledges it with the same byte. The second is to continue them. While the descendants are
stopped, the supervisor checks no limits.

The supervisor kills all descendants and removes the folder in three cases: its first child ends, a limit is passed, or the
other end of the socket is closed. The socket is also closed if the host is killed. Finally it writes one line of JSON (see
`ExitReport`).
"""

import ctypes
import json
import os
import resource
import select
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import NoReturn, TypedDict

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on all architectures
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_SOCK, MAKE_BLOCK, REFER, TRUNCATE, IOCTL_DEV = 1 << 6, 1 << 9, 1 << 11, 1 << 13, 1 << 14, 1 << 15
EVERY_FILE_RIGHT = (1 << 16) - 1
EVERY_TCP_RIGHT = 0b11  # bind, connect
EVERY_SCOPE = 0b11  # abstract unix sockets, signals
CONNECT_TCP = 0b10
PATH_BENEATH, NET_PORT = 1, 2

READ = EXECUTE | READ_FILE | READ_DIR
WRITE = EVERY_FILE_RIGHT & ~(MAKE_CHAR | MAKE_SOCK | MAKE_BLOCK | IOCTL_DEV)
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE  # the rights that may be granted on a path that is no folder

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
SECCOMP_MODE_FILTER = 2
TICK_MS, STILL_TICK_MS = 100, 1000
STOP, GO_ON = b"s", b"g"
PAGE = resource.getpagesize()
CLOCK = os.sysconf("SC_CLK_TCK")
ENTRIES = 10_000  # files and folders in the sandbox's own folder
MAPPINGS = 50_000  # of all processes together: as many as can be read ten times a second
GONE_ERRORS = (
    FileNotFoundError,
    ProcessLookupError,
    PermissionError,
)  # the process is gone meanwhile, or cannot be read before it has executed


class Spec(TypedDict):
    """The request of the host to the supervisor.

    `filters` are seccomp programs in hex. `memory`, `processes`, `disk` and `cpu` limit all descendants together. `memory` and
    `disk` are in bytes. `cpu` is in seconds; 0 means no limit. `joins` are the paths of control group files to which the child
    writes its id. `control` (a socket) and `report` are descriptors.
    """

    argv: list[str]
    env: dict[str, str]
    folder: str
    uid: int
    joins: list[str]
    readable: list[str]
    devices: list[str]
    rlimits: dict[str, int]
    filters: list[str]
    memory: int
    processes: int
    disk: int
    cpu: float
    control: int
    report: int


class ExitReport(TypedDict):
    """The report that the supervisor writes when it ends.

    `status` is the wait status of the first child. `passed` is the name of the limit that was passed; it is empty if no limit
    was passed, and "closed" if the control socket was closed. `cpu_seconds` is the processor time of all descendants, in
    seconds. `left` is the number of descendants that lived longer than the first child.
    """

    status: int
    passed: str
    cpu_seconds: float
    left: int


class RulesetAttr(ctypes.Structure):
    """The C structure `landlock_ruleset_attr` of ABI 6: the rights that a domain restricts."""

    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class PathBeneathAttr(ctypes.Structure):
    """The C structure `landlock_path_beneath_attr`: a rule that grants rights below a path."""

    _pack_ = 1
    _fields_ = [("access", ctypes.c_uint64), ("fd", ctypes.c_int32)]


class NetPortAttr(ctypes.Structure):
    """The C structure `landlock_net_port_attr`: a rule that grants TCP rights for a port."""

    _fields_ = [("access", ctypes.c_uint64), ("port", ctypes.c_uint64)]


class SockFprog(ctypes.Structure):
    """The C structure `sock_fprog`: a seccomp filter."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


LIBC = ctypes.CDLL(None, use_errno=True)


def check_answer(answer: int) -> int:
    """Return the result of a system call; raise OSError if the call failed."""
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return answer


def enter_domain(files: int, tcp: int, rules: list[tuple[str, int]], port: int = 0) -> None:
    """Enter a Landlock domain: give up the file rights `files` and the TCP rights `tcp`, except those that a rule grants.

    Afterwards, signals and abstract sockets reach only processes in the domain.

    Args:
        files, tcp: bit masks of Landlock's rights.
        rules: pairs of a path and the bit mask of the rights below it.
        port: the port to which TCP may still connect; 0: none.
    """
    attr = RulesetAttr(files, tcp, EVERY_SCOPE)
    ruleset = check_answer(LIBC.syscall(CREATE_RULESET, ctypes.byref(attr), ctypes.c_size_t(ctypes.sizeof(attr)), 0))
    for path, rights in rules:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        granted = rights if stat.S_ISDIR(os.fstat(fd).st_mode) else rights & FILE_RIGHTS
        beneath = PathBeneathAttr(granted, fd)
        check_answer(LIBC.syscall(ADD_RULE, ruleset, PATH_BENEATH, ctypes.byref(beneath), 0))
        os.close(fd)
    if port:
        check_answer(LIBC.syscall(ADD_RULE, ruleset, NET_PORT, ctypes.byref(NetPortAttr(CONNECT_TCP, port)), 0))
    check_answer(LIBC.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def enter_filters(filters: list[str]) -> None:
    """Enter seccomp filters, which are given in hex."""
    for hexadecimal in filters:
        code = bytes.fromhex(hexadecimal)
        program = SockFprog(len(code) // 8, code)
        check_answer(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0))


def scope_signals() -> None:
    """Enter the supervisor's domain, which only removes the right to signal processes outside of it. Raise SystemExit if the
    kernel does not enforce the domain. `kill(-1)` would then kill all processes of the machine.
    """
    check_answer(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    check_answer(LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    enter_domain(REFER, 0, [("/", REFER)])  # a domain that does not name this right denies it
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        return
    sys.exit("signals are not scoped")


def confine(spec: Spec) -> None:
    """Give up the child's rights and set its limits. The order of the steps matters: later steps give up rights that earlier
    steps need.
    """
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # out of memory, the kernel kills these before the keeper
    for group in spec["joins"]:
        with open(group, "w") as file:
            file.write("0")
    for name, value in spec["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if spec["uid"]:
        os.setgroups([])
        os.setresgid(spec["uid"], spec["uid"], spec["uid"])
        os.setresuid(spec["uid"], spec["uid"], spec["uid"])
    check_answer(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    os.chdir(spec["folder"])
    rules = [(path, READ) for path in spec["readable"]] + [(path, READ_FILE | WRITE_FILE) for path in spec["devices"]]
    enter_domain(EVERY_FILE_RIGHT, EVERY_TCP_RIGHT, [*rules, (spec["folder"], WRITE)])
    enter_filters(spec["filters"])


def become(spec: Spec) -> NoReturn:
    """Confine the child, and exec its command."""
    try:
        os.setsid()
        confine(spec)
        os.execve(spec["argv"][0], spec["argv"], spec["env"])
    except BaseException as error:  # noqa: BLE001 - a child that failed must never go on as the keeper
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(125)


def words(path: str) -> list[str]:
    """Return the fields of a file like /proc/PID/stat that follow the process's name; empty if the process is gone. The name is
    skipped, because a process can give itself a name that is not valid text.
    """
    try:
        with open(path, "rb") as file:
            return file.read().rpartition(b")")[2].decode(errors="replace").split()
    except GONE_ERRORS:
        return []


def names(folder: str) -> list[str]:
    """Return the names of the entries in a folder; empty if the folder is gone."""
    try:
        return os.listdir(folder)
    except GONE_ERRORS:
        return []


def descendants(of: int) -> Iterator[tuple[str, int]]:
    """Yield the process id and the number of threads of each descendant of the process `of`."""
    waiting = [str(of)]
    while waiting:
        pid = waiting.pop()
        threads = names(f"/proc/{pid}/task")
        waiting += [child for thread in threads for child in words(f"/proc/{pid}/task/{thread}/children")]
        if pid != str(of):
            yield pid, len(threads)


def proportional(pid: str) -> int:
    """Return a process's share of memory in bytes (proportional set size). Memory that several processes share is divided among
    them.
    """
    fields = words(f"/proc/{pid}/smaps_rollup")
    return int(fields[fields.index("Pss:") + 1]) * 1024 if "Pss:" in fields else 0


def memory(pids: list[str]) -> int:
    """Return the sum of the resident set sizes (RSS) of the processes, in bytes. A shared page counts once for each process."""
    rows = [words(f"/proc/{pid}/statm") for pid in pids]
    return sum(int(fields[1]) * PAGE for fields in rows if fields)


def cpu_seconds(pids: list[str]) -> float:
    """Return the processor time of these processes, their reaped children and the supervisor's reaped children, in seconds."""
    rows = [words(f"/proc/{pid}/stat") for pid in pids]
    dead = resource.getrusage(resource.RUSAGE_CHILDREN)
    return dead.ru_utime + dead.ru_stime + sum(sum(map(int, fields[11:15])) for fields in rows if fields) / CLOCK


def files_below(folder: str) -> Iterator[os.stat_result]:
    """Yield the stat result of each entry below a folder. Raise OSError if a folder cannot be listed."""
    waiting = [folder]
    while waiting:
        try:
            for entry in os.scandir(waiting.pop()):
                status = entry.stat(follow_symlinks=False)
                yield status
                if stat.S_ISDIR(status.st_mode):
                    waiting.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # gone meanwhile


def nameless_files(pids: list[str], device: int) -> Iterator[os.stat_result]:
    """Yield the stat result of each deleted file on a device that one of these processes still has open."""
    for path in [f"/proc/{pid}/fd/{fd}" for pid in pids for fd in names(f"/proc/{pid}/fd")]:
        try:
            status = os.stat(path)
        except GONE_ERRORS:
            continue
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 0 and status.st_dev == device:
            yield status


def mappings(pids: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield (process, line of its maps file) for every memory mapping of the processes."""
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                yield from ((pid, line) for line in file)
        except GONE_ERRORS:
            continue


def mapped_files(pids: list[str], folder: str) -> Iterator[tuple[int, int | None]]:
    """Yield (inode, size in bytes) of each deleted file of a folder that a process still maps. The size is None if this user
    may not read it. Raise OSError if there are more than `MAPPINGS` mappings, which are too many to read in time.
    """
    prefix = os.fsencode(os.path.realpath(folder)) + b"/"
    for number, (pid, line) in enumerate(mappings(pids)):
        if number > MAPPINGS:
            raise OSError("too many memory mappings")
        if not line.endswith(b" (deleted)\n") or prefix not in line:
            continue
        area, _, _, _, inode, _ = line.decode(errors="replace").split(maxsplit=5)
        name = "-".join(f"{int(end, 16):x}" for end in area.split("-"))
        try:
            yield int(inode), os.stat(f"/proc/{pid}/map_files/{name}").st_blocks * 512
        except PermissionError:
            yield int(inode), None
        except GONE_ERRORS:
            continue


def too_full(folder: str, pids: list[str], max_bytes: int) -> bool:
    """Return whether the folder holds more than `max_bytes` bytes or more than `ENTRIES` files.

    Deleted files that are still open or mapped are counted too. A mapped file of unknown size counts as `max_bytes`. Return
    True if the folder cannot be read.
    """
    sizes: dict[int, int] = {}
    try:
        for status in chain(files_below(folder), nameless_files(pids, os.stat(folder).st_dev)):
            sizes[status.st_ino] = status.st_blocks * 512
            if len(sizes) > ENTRIES:
                return True
        for inode, size in mapped_files(pids, folder):
            sizes.setdefault(inode, max_bytes if size is None else size)
    except OSError:
        return True
    return len(sizes) > ENTRIES or sum(sizes.values()) > max_bytes


def passed_limit(spec: Spec) -> str:
    """Return the name of the limit that the descendants together have passed; empty if they have passed no limit."""
    # Count no further than needed: among the hundreds of a fork bomb this process hardly gets a core.
    processes = list(islice(descendants(os.getpid()), spec["processes"] + 1))
    pids = [pid for pid, _ in processes]
    if sum(threads for _, threads in processes) > spec["processes"]:
        return "pids"
    if memory(pids) > spec["memory"] and sum(map(proportional, pids)) > spec["memory"]:
        return "oom"
    if too_full(spec["folder"], pids, spec["disk"]):
        return "disk"
    return "timeout_cpu" if spec["cpu"] and cpu_seconds(pids) > spec["cpu"] else ""


def watch(spec: Spec, child: int) -> tuple[int | None, str]:
    """Wait for the first child while serving the host's orders. Return (wait status of the child, "") if the child has ended,
    or (None, the limit that was passed) if it must be killed.
    """
    poll = select.poll()
    poll.register(spec["control"], select.POLLIN)
    poll.register(os.pidfd_open(child), select.POLLIN)
    still = False
    while True:
        events = dict(poll.poll(STILL_TICK_MS if still else TICK_MS))
        for pid, status in reap():
            if pid == child:
                return status, ""
        if spec["control"] in events:
            order = os.read(spec["control"], 1)
            if not order:
                return None, "closed"
            still = carry_out(order, spec["control"])
            continue
        limit = passed_limit(spec)
        if limit:
            return None, limit


def carry_out(order: bytes, control: int) -> bool:
    """Carry out an order to stop or continue all descendants; return True if they are stopped now."""
    with suppress(ProcessLookupError, PermissionError):  # none is left
        os.kill(-1, signal.SIGSTOP if order == STOP else signal.SIGCONT)
    if order == STOP:
        os.write(control, order)
    return order == STOP


def reap() -> Iterator[tuple[int, int]]:
    """Reap ended children, orphans included; yield the process id and wait status of each."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def end_all() -> dict[int, int]:
    """Kill all descendants and wait for them; return their wait statuses by process id."""
    with suppress(ProcessLookupError, PermissionError):  # none is left
        os.kill(-1, signal.SIGKILL)
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return ended
        ended[pid] = status


def remove(folder: str) -> None:
    """Remove the folder if it exists, even with too long paths or folders without access rights."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return
    except OSError:  # not empty
        if os.spawnlp(os.P_WAIT, "rm", "rm", "-rf", "--", folder):
            os.spawnlp(os.P_WAIT, "chmod", "chmod", "-R", "u+rwx", "--", folder)
            os.spawnlp(os.P_WAIT, "rm", "rm", "-rf", "--", folder)


def let_go(spec: Spec) -> None:
    """Close the supervisor's copies of the child's files, so that the host notices when the child closes its own."""
    first, last = sorted((spec["control"], spec["report"]))
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(nothing, fd)
    os.closerange(3, first)
    os.closerange(first + 1, last)
    os.closerange(last + 1, 1 << 16)


def main(spec: Spec) -> None:
    """Start the confined child and watch it. At the end, kill all descendants, remove the folder, and report."""
    for fd in (spec["control"], spec["report"]):
        os.set_inheritable(fd, False)
    scope_signals()
    child = os.fork()
    if child == 0:
        become(spec)
    let_go(spec)
    status, limit = None, ""
    try:
        status, limit = watch(spec, child)
    finally:
        ended = end_all()
    code = ended.pop(child) if status is None else status
    report = ExitReport(status=code, passed=limit, cpu_seconds=cpu_seconds([]), left=len(ended))
    remove(spec["folder"])
    os.write(spec["report"], json.dumps(report).encode() + b"\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
