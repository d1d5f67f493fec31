"""The command line of bubblewrap (bwrap). It decides which files a program inside can see, and as which user the program runs.

A program sees a read-only /usr and no other files of this host. It has separate process, network, user, IPC and mount
namespaces, and /tmp and /dev/shm in memory. Three details have reasons:

- If root starts bwrap, the user is changed before bwrap begins. In a user namespace that root made, the kernel would still
    treat the user as root, who could write to /proc/sys.
- bwrap gets an empty environment, because the environment of its first process can be read in /proc/1/environ. bwrap reads its
    options from a descriptor.
- bwrap joins its control groups before it starts other processes, so no process runs outside of them.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.workflow.sandbox.payload import ENVIRONMENT

JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; exec "$@"'
LINKS = ("bin", "sbin", "lib", "lib32", "lib64")
READ_ONLY = ("/etc/ld.so.cache", "/etc/alternatives")
SHM_BYTES = 1 << 20


@dataclass(frozen=True)
class Profile:
    """The options of bwrap that work on this machine.

    Args:
        bwrap: the path of the bwrap program.
        python: the path of the interpreter inside.
        folders: the folders that the interpreter needs in addition to /usr.
        proc: True if the sandbox can mount a separate /proc.
        disable_userns: True if bwrap can forbid further user namespaces. The system call filter forbids them in any case.
        nests: True if a warm interpreter inside the sandbox (a zygote) can create namespaces for its programs.
    """

    bwrap: str
    python: str
    folders: tuple[str, ...] = ()
    proc: bool = True
    disable_userns: bool = True
    nests: bool = False


def options(profile: Profile, tmp_bytes: int, info: int, go: int, filter_file: int | None, first: bool = False) -> bytes:
    """Return the options that bwrap reads from the descriptor of `--args`.

    Args:
        tmp_bytes: the size of /tmp, in bytes.
        info: the descriptor on which bwrap reports the id of the sandbox's first process.
        go: the descriptor on which that process waits for a byte. So it cannot end before its parent has opened a pidfd for it.
        filter_file: the descriptor of the system call filter; None for the zygote, whose children install the filter
            themselves.
        first: True to make the interpreter the first process of the namespace, instead of bwrap's process.
    """
    args = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    args += ["--hostname", "sandbox", "--ro-bind", "/usr", "/usr", *_links()]
    for path in READ_ONLY:
        args += ["--ro-bind-try", path, path]
    args += ["--size", str(tmp_bytes), "--tmpfs", "/tmp"]
    for path in profile.folders:  # after /tmp, which may contain some
        args += ["--ro-bind", path, path]
    args += ["--proc", "/proc"] if profile.proc else ["--tmpfs", "/proc"]
    args += ["--dev", "/dev", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    args += ["--remount-ro", "/", "--chdir", "/tmp"]
    for name, value in ENVIRONMENT.items():
        args += ["--setenv", name, value]
    args += ["--info-fd", str(info), "--block-fd", str(go), *(["--as-pid-1"] if first else [])]
    if filter_file is not None:
        args += ["--seccomp", str(filter_file), *(["--disable-userns"] if profile.disable_userns else [])]
    return b"".join(os.fsencode(arg) + b"\0" for arg in args)


def command(profile: Profile, args: int, uid: int | None, joins: Sequence[str], inside: Sequence[str]) -> list[str]:
    """Return the command line: join the control groups, change the user, run bwrap with the interpreter."""
    argv = [profile.bwrap, "--args", str(args), "--", *inside]
    if uid is not None:
        number = str(uid)
        dropped = ["--reuid", number, "--regid", number, "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
        argv = [_find_program("setpriv"), *dropped, "--inh-caps=-all", *argv]
    return ["/bin/sh", "-c", JOIN, "sh", *joins, "--", *argv] if joins else argv


def _links() -> list[str]:
    """Return the options for /lib and similar folders: links into /usr or, on older systems, bind mounts."""
    args: list[str] = []
    for name in LINKS:
        path = Path("/", name)
        if path.is_symlink():
            args += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            args += ["--ro-bind", str(path), str(path)]
    return args


def _find_program(program: str) -> str:
    return shutil.which(program) or f"/usr/bin/{program}"
