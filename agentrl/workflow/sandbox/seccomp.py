"""The system calls that are denied inside a sandbox. They access other processes, namespaces or rarely used parts of the
kernel.

libseccomp (`pyseccomp`) builds the filter as BPF. All other calls are allowed, because the mount, process, network and user
namespaces contain their effects. A denied call fails with EPERM. `clone3` fails with ENOSYS, because its flags are in memory,
which a filter cannot read. The C library then uses `clone`, whose flags the filter can read.
"""

import errno
from functools import lru_cache
from tempfile import TemporaryFile
from typing import Any

from agentrl.workflow.errors import SandboxUnavailable

DENIED_CALLS = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp", "process_madvise"),
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "fsopen", "fsmount"),
    *("fsconfig", "fspick", "mount_setattr", "keyctl", "add_key", "request_key", "bpf", "perf_event_open", "userfaultfd"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "open_by_handle_at", "name_to_handle_at", "personality"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff"),
    *("acct", "quotactl", "syslog", "settimeofday", "clock_settime", "adjtimex", "clock_adjtime", "sethostname"),
    *("setdomainname", "iopl", "ioperm", "modify_ldt", "vhangup", "lookup_dcookie", "nfsservctl", "fanotify_init"),
    # Calls that let the kernel send any signal later on: SIGCONT, for one, to a stopped session.
    *("timer_create", "mq_notify"),
)
F_SETSIG, F_NOTIFY = 10, 1026
"""The commands of fcntl that let the kernel send a signal later. The filter denies them."""

NEW_NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
SOCK_STREAM, SOCK_TYPE_MASK, IPPROTO_TCP, MSG_FASTOPEN = 1, 0xF, 6, 0x20000000


@lru_cache(maxsize=2)
def rules(tcp: bool = False) -> bytes:
    """Return the filter as BPF instructions of 8 bytes. Raise SandboxUnavailable if libseccomp is not installed.

    With `tcp`, the filter allows TCP sockets too, which Landlock then limits. It denies everything that Landlock would not
    limit: other protocols, and connections without a call of `connect`.
    """
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise SandboxUnavailable(
            f"A system call filter was asked for, but libseccomp cannot be loaded: {error}.", "apt-get install libseccomp2"
        ) from error
    denied = pyseccomp.ERRNO(errno.EPERM)
    syscall_filter = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in DENIED_CALLS:
        if pyseccomp.resolve_syscall(pyseccomp.system_arch(), name) >= 0:
            syscall_filter.add_rule(denied, name)
    for flag in NEW_NAMESPACES:
        syscall_filter.add_rule(denied, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag))
    syscall_filter.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    for request in (TIOCSTI, TIOCLINUX):
        syscall_filter.add_rule(denied, "ioctl", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 0xFFFFFFFF, request))
    for command in (F_SETSIG, F_NOTIFY):
        syscall_filter.add_rule(denied, "fcntl", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 0xFFFFFFFF, command))
    if tcp:
        _deny_other_than_tcp(syscall_filter, denied)
    else:
        syscall_filter.add_rule(denied, "socket", pyseccomp.Arg(0, pyseccomp.NE, AF_UNIX))
    with TemporaryFile() as file:
        syscall_filter.export_bpf(file)
        file.seek(0)
        return file.read()


def _deny_other_than_tcp(syscall_filter: Any, denied: Any) -> None:
    import pyseccomp

    arg = pyseccomp.Arg
    for place in range(3):  # the kernel reads 32 bits of each, so more bits would be compared wrongly
        syscall_filter.add_rule(denied, "socket", arg(place, pyseccomp.GT, 0xFFFFFFFF))
    for family in set(range(AF_INET6)) - {AF_UNIX, AF_INET}:
        syscall_filter.add_rule(denied, "socket", arg(0, pyseccomp.EQ, family))
    syscall_filter.add_rule(denied, "socket", arg(0, pyseccomp.GT, AF_INET6))
    for family in (AF_INET, AF_INET6):
        of_family = arg(0, pyseccomp.EQ, family)
        for kind in set(range(SOCK_TYPE_MASK + 1)) - {SOCK_STREAM}:
            syscall_filter.add_rule(denied, "socket", of_family, arg(1, pyseccomp.MASKED_EQ, SOCK_TYPE_MASK, kind))
        for protocol in range(1, IPPROTO_TCP):
            syscall_filter.add_rule(denied, "socket", of_family, arg(2, pyseccomp.EQ, protocol))
        syscall_filter.add_rule(denied, "socket", of_family, arg(2, pyseccomp.GT, IPPROTO_TCP))
    for name, place in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)):
        syscall_filter.add_rule(denied, name, arg(place, pyseccomp.MASKED_EQ, MSG_FASTOPEN, MSG_FASTOPEN))
