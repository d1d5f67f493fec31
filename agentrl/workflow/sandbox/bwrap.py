"""bubblewrap's command line: what a program inside sees, and which user it runs as.

A read-only /usr and nothing else of this host; its own process, network, user, IPC and mount namespaces; /tmp and /dev/shm in
memory. Three things may surprise. Where root starts it, the user is dropped before bwrap begins:
inside a user namespace made by root, root stays root to the kernel, and could write /proc/sys. bwrap itself gets an empty
environment, because its own first process keeps it readable in /proc/1/environ; its options go over a descriptor. And it
joins its control groups before anything, so that nothing is started outside of them.
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
    """The strictness of bwrap that this machine allows.

    Args:
        bwrap: path of the bwrap program.
        python: path of the interpreter inside.
        folders: folders that the interpreter needs beside /usr.
        proc: whether a /proc of the sandbox's own can be mounted.
        disable_userns: whether further user namespaces can be forbidden by bwrap (the system call filter does it in any case).
        nests: whether a zygote can make namespaces of its own.
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
        info: the descriptor on which bwrap reports the sandbox's first process.
        go: the descriptor on which that process waits for a byte, so that it cannot be gone before its parent holds it.
        filter_file: the system call filter; None for the zygote, which forks into namespaces and sets the filter then.
        first: make the interpreter the first process of the namespace, and not a child of bwrap's own.
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
    """Return the whole command line, outermost first: join the groups, drop the user, bwrap, the interpreter."""
    argv = [profile.bwrap, "--args", str(args), "--", *inside]
    if uid is not None:
        number = str(uid)
        dropped = ["--reuid", number, "--regid", number, "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
        argv = [_find_program("setpriv"), *dropped, "--inh-caps=-all", *argv]
    return ["/bin/sh", "-c", JOIN, "sh", *joins, "--", *argv] if joins else argv


def _links() -> list[str]:
    """Options for /lib and the like: links into /usr, or folders on older systems."""
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
