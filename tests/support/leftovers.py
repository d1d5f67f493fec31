"""What a cell of a session may leave behind, and what must hold of it in every kind of sandbox: nothing runs between cells."""

import os
import time
from pathlib import Path

from agentrl.workflow.sandbox import MIB, Limits, Sandbox, proc
from agentrl.workflow.sandbox.session import ENDED_TEXT, FULL_TEXT
from tests.support.sandbox_fixtures import UIDS

LIMITS = Limits(cpu_seconds=3, wall_seconds=40, memory_bytes=256 * MIB, processes=32)
TOO_MUCH = {"ok", "pids", "killed", "timeout_cpu"}
"""How a cell may end that leaves what multiplies: by itself, or ended for it."""
DETACHED = """
import os, resource, signal
if os.fork() == 0:
    os.setsid()
    for number in (signal.SIGXCPU, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
    for most in (-1, resource.getrlimit(resource.RLIMIT_CPU)[1]):
        try: resource.setrlimit(resource.RLIMIT_CPU, (most, most))
        except (ValueError, OSError): pass
"""
IN_THREADS = "import threading, time\nfor _ in range({}): threading.Thread(target={}, daemon=True).start()"
LEFT = {
    "a thread that spins": ("def spin():\n  while True: pass\n" + IN_THREADS.format(2, "spin"), {"ok"}),
    "a fork that spins with its limits raised": (DETACHED + "    while True: pass", {"ok"}),
    "a spinning thread of a process without its first": (
        DETACHED
        + "    import ctypes, threading\n    def spin():\n        while True: pass\n"
        + "    threading.Thread(target=spin).start()\n    ctypes.CDLL(None).pthread_exit(None)",
        {"ok"},
    ),
    "sleeping forks": ("import os, time\nfor _ in range(28):\n  if os.fork() == 0: time.sleep(999)", {"ok"}),
    "sleeping forks, as many as there may be": (
        "import os, time\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(999)\nexcept OSError: pass",
        TOO_MUCH,
    ),
    "sleeping threads": (IN_THREADS.format(24, "time.sleep, args=(999,)"), {"ok"}),
    "sleeping threads, as many as there may be": (
        "import threading, time\ntry:\n  while True: threading.Thread(target=time.sleep, args=(999,), daemon=True).start()\n"
        "except RuntimeError: pass",
        TOO_MUCH,
    ),
    "no free descriptor": ("import os\nkept = []\ntry:\n  while True: kept.append(os.dup(0))\nexcept OSError: pass", {"ok"}),
    "a timer that sets it going": (
        """
import ctypes, fcntl, os, signal
def spin(*_):
    for _ in range(500_000): pass
signal.signal(signal.SIGCONT, spin)
libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
event = (ctypes.c_int * 16)(0, 0, int(signal.SIGCONT))
due = (ctypes.c_long * 4)(0, 20_000_000, 0, 20_000_000)
if libc.timer_create(0, event, ctypes.byref(timer)) == 0: libc.timer_settime(timer, 0, due, None)
try: fcntl.fcntl(os.open("/tmp" if os.path.isdir("/tmp") else ".", 0), fcntl.F_NOTIFY, 1)
except OSError: pass
try: fcntl.fcntl(0, fcntl.F_SETSIG, int(signal.SIGCONT))
except OSError: pass
""",
        {"ok"},
    ),
    "a fork whose name is no text": (
        "import ctypes, os, time\nif os.fork() == 0:\n  ctypes.CDLL(None).prctl(15, b'\\xff) \\xfe')\n  time.sleep(999)\n"
        "time.sleep(0.1)",
        {"ok"},
    ),
    "an alarm": ("import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.05)", {"ok"}),
    "children that nobody asks for": ("import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nNone", {"ok"}),
    "forks that set all going": (
        "import os, signal\nfor _ in range(4):\n  if os.fork() == 0:\n    while True: os.kill(-1, signal.SIGCONT)",
        TOO_MUCH,
    ),
    "a fork bomb": (
        "import os\nif os.fork() == 0:\n  while True:\n    try: os.fork()\n    except OSError: pass",
        TOO_MUCH,
    ),
    "forks that fork and end": (
        "import os\nif os.fork() == 0:\n  while True:\n    try:\n      if os.fork(): os._exit(0)\n    except OSError: pass",
        TOO_MUCH,
    ),
}


TELLING = (
    *("a fork that spins with its limits raised", "sleeping threads, as many as there may be", "a fork bomb"),
    "a fork whose name is no text",
)
"""What is left where all of the rest has been tried in another kind of sandbox: a spinner, a full house, a crowd, a name."""


def descends(process: int) -> bool:
    """Whether this process is among the other's ancestors; what a sandbox orphans stays below its keeper."""
    while process not in (0, os.getpid()):
        try:
            process = int(proc.fields(process)[1])
        except IndexError:  # gone
            return False
    return process != 0


def ours() -> dict[int, tuple[str, int]]:
    """The state of each living process in a sandbox of this process, and its processor time in ticks."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            user, command = folder.stat().st_uid, (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if not (fields := proc.fields(int(folder.name))):
            continue
        ordinary = os.geteuid() != 0 and user == os.geteuid() and b"agentrl.workflow.sandbox" in command
        mine = user in UIDS or (ordinary and descends(int(folder.name)))
        if mine and (fields[0] not in "ZX" or int(fields[17]) > 1):
            found[int(folder.name)] = (fields[0], int(fields[11]) + int(fields[12]))
    return found


def stands_still(before: set[int]) -> bool:
    """Whether what has come since then uses no processor, and all of it but who keeps it is stopped."""
    first = {process: seen for process, seen in ours().items() if process not in before}
    time.sleep(0.2)
    second = {process: seen for process, seen in ours().items() if process not in before}
    used = sum(ticks - first[process][1] for process, (_, ticks) in second.items() if process in first)
    stopped = sum(state in "Tt" for state, _ in second.values())
    return second.keys() <= first.keys() and used <= 2 and stopped >= 1 and len(second) <= stopped + 3


def leaves_nothing(sandbox: Sandbox, name: str) -> None:
    """The cell's names last; all else ends with it, at once, and the next cell finds room."""
    before = set(ours())
    session = sandbox.session(LIMITS)
    assert session.run("x = 1").status == "ok"
    living = set(ours())
    code, allowed = LEFT[name]
    result = session.run(f"{code}\nx = 2", LIMITS)
    assert result.status in allowed, result
    if ENDED_TEXT in result.output:  # a keeper that looks ten times a second, and ends all where there is too much
        assert allowed is TOO_MUCH
        assert set(ours()) == before
        return
    assert (result.status == "pids") == result.output.endswith(FULL_TEXT), result
    assert len(ours()) == len(living)
    assert stands_still(before)
    assert session.run("x").output == ("2\n" if result.status == "ok" else "1\n")
    assert session.run("x").output == ("2\n" if result.status == "ok" else "1\n")
    assert stands_still(before)
    session.close()
