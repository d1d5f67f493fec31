"""The Landlock domain of an agent without a sandbox. In this domain, the agent can neither signal nor read processes outside
the domain.

From Linux 6.12 on (ABI 6), Landlock limits signals to a domain. It also stops a process in a domain from reading the
environment and the memory of processes outside, even of processes of the same user. If the agent runs as root, it first loses
the capabilities with which it could ignore these limits. Files and network are not limited. On older kernels, an agent cannot
read the worker's process, but it can read the worker's parent processes if they have the same user.
"""

import ctypes
import os

CREATE_RULESET, RESTRICT_SELF = 444, 446
VERSION = 1
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
CAPABILITY_VERSION, PR_CAPBSET_DROP = 0x20080522, 24
LOOKING = (16, 17, 19, 21, 38, 39)
"""The numbers of the capabilities sys_module, sys_rawio, sys_ptrace, sys_admin, perfmon and bpf. With any of these, root can
read processes outside its domain.
"""
SIGNALS = 0b10
SCOPING_ABI = 6
_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    """The kernel's struct landlock_ruleset_attr of ABI 6."""

    _fields_ = [("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


def enter() -> bool:
    """Put this process into a new Landlock domain, whose processes cannot signal processes outside. Return False if the kernel
    does not support this.

    The process and its children cannot leave the domain. Programs that they execute, such as sudo, get no additional rights.
    """
    if _libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION) < SCOPING_ABI:
        return False
    attributes = _Ruleset(0, 0, SIGNALS)
    ruleset = _libc.syscall(CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)), 0)
    if ruleset < 0:
        return False
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    entered: int = _libc.syscall(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return entered == 0


def hide() -> None:
    """Prevent other processes of this user from reading this process's environment and memory. This does not apply to programs
    that this process executes.
    """
    _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def drop_capabilities() -> None:
    """Permanently drop the capabilities that let root read other processes."""
    header, data = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    if _libc.capget(header, data) != 0:
        return
    for capability in LOOKING:
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # else a program that root starts has it again
        word, bit = divmod(capability, 32)
        for kind in range(3):  # effective, permitted, inheritable
            data[3 * word + kind] &= ~(1 << bit) & 0xFFFFFFFF
    _libc.capset(header, data)
