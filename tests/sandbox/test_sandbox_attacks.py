"""What model-written code may try: each attempt is contained, told as what it was, and leaves nothing behind."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyseccomp
import pytest

from agentrl.workers.stack import broker
from agentrl.workflow.sandbox import MIB, Limits, cgroups, seccomp
from agentrl.workflow.sandbox.boxed import Boxed
from agentrl.workflow.sandbox.payload import ENVIRONMENT
from agentrl.workflow.settings import Settings
from tests.conftest import forbidden, missing
from tests.support.leftovers import LEFT, TELLING, descends, leaves_nothing, ours
from tests.support.leftovers import LIMITS as LEFTOVERS
from tests.support.sandbox_fixtures import MODES, UIDS, alive, boxed, result_with_a_core

LIMITS = Limits(cpu_seconds=1, wall_seconds=60, memory_bytes=96 * MIB, processes=16, tmp_bytes=4 * MIB, output_bytes=4096)
BRIEF = replace(LIMITS, cpu_seconds=0.3)
SHORT = Limits(cpu_seconds=1, wall_seconds=0.5, output_bytes=4096)
OF_A_ZYGOTE = 3
"""bwrap twice, and the zygote."""
OF_A_SESSION = 3 if os.geteuid() == 0 else 2
"""bwrap (as an ordinary user not told from others), the keeper and the state."""


@pytest.fixture(params=MODES)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Boxed]:
    with boxed(request.param) as made:
        yield made


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {then}
        time.sleep(1000)
    os._exit(0)
os.wait()
print("parent")
"""
IN_TWELVE = """
import os
def one():
    kept = []
    while len(kept) < 3:
        kept.append(b"x" * (1 << 24))
    import time
    time.sleep(0.5)
    os._exit(0)
for _ in range(12):
    os.fork() or one()
ended = [os.wait()[1] for _ in range(12)]
raise SystemExit(1 if any(ended) else 0)
"""
CPU = {"timeout_cpu"}
ATTACKS = {
    "fork bomb": ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", {"timeout_cpu", "pids", "killed"}),
    "thread bomb": ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=[99]).start()", {"pids"}),
    "memory bomb": ("kept = []\nwhile True: kept.append(b'x' * (1 << 22))", {"oom"}),
    "memory bomb in twelve processes": (IN_TWELVE, {"oom"}),
    "inode bomb": ("n = 0\nwhile True:\n  n += 1\n  open(f'/tmp/{n}', 'w').close()", {"oom", "timeout_cpu", "error"}),
    "endless output": ("while True: print('x' * 99)", {"output_cap"}),
    "endless errors": ("import sys\nwhile True: sys.stderr.write('x' * 99)", {"output_cap"}),
    "spin": ("while True: pass", CPU),
    "spin in C": ("sum(range(10 ** 13))", CPU),
    "regular expression": ("import re\nre.match('(a+)+$', 'a' * 60 + 'b')", CPU),
    "signals ignored": ("import signal\nfor n in (15, 24, 2): signal.signal(n, signal.SIG_IGN)\nwhile True: pass", CPU),
    "abort": ("import os\nos.abort()", {"killed"}),
    "segmentation fault": ("import ctypes\nctypes.string_at(0)", {"killed"}),
    "kill everybody": ("import os, signal\nos.kill(-1, signal.SIGKILL)\nos.kill(1, 9)\nprint('?')", {"ok", "killed", "error"}),
    "deep recursion": ("def f(): f()\nf()", {"error"}),
    "deep recursion in C": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", {"killed", "oom"}),
    "daemon": (DAEMON.format(then="os.close(1), os.close(2)"), {"ok"}),
    "daemon that holds stdout": (DAEMON.format(then="pass"), {"ok"}),
    "a name that is no text": ("import ctypes, time\nctypes.CDLL(None).prctl(15, b'\\xff) \\xfe')\ntime.sleep(0.3)", {"ok"}),
    "exit without an end": ("import os\nos._exit(7)", {"error"}),
    "closed output": ("import os\nos.close(1)\nos.close(2)\nprint('x')", {"error", "ok"}),
}
NEEDS_MEMORY = {"memory bomb", "memory bomb in twelve processes"}
IN_TIME = {
    "sleep": "import time\ntime.sleep(1000)",
    "slow drip": "import time\nwhile True: print('.', flush=True); time.sleep(0.01)",
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_contained_and_leaves_nothing(sandbox: Boxed, name: str) -> None:
    code, allowed = ATTACKS[name]
    if name in NEEDS_MEMORY and "memory" not in cgroups.parents():
        forbidden("a memory control group")
    result = sandbox.run(code, limits=BRIEF if allowed == CPU else LIMITS)
    assert result.status in allowed, result
    assert len(result.output) <= 4096
    assert len(alive()) in (0, OF_A_ZYGOTE)
    assert sandbox.run("print(1)").output == "1\n"


def test_program_with_binary_name_ends_without_cgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "parents", dict)
    for mode in MODES:
        with boxed(mode) as sandbox:
            assert sandbox.run(ATTACKS["a name that is no text"][0], limits=LIMITS).status == "ok"


@pytest.mark.parametrize("name", IN_TIME)
def test_slow_attack_ends_at_wall_limit(sandbox: Boxed, name: str) -> None:
    assert result_with_a_core(lambda: sandbox.run(IN_TIME[name], limits=SHORT)).status == "timeout_wall"
    assert alive() == []


@pytest.mark.parametrize(
    ("name", "counted"),
    [
        *(pytest.param(name, True, id=f"{name}, in a control group") for name in LEFT),
        *(pytest.param(name, False, id=f"{name}, without one") for name in TELLING),
    ],
)
@pytest.mark.slow
def test_leftovers_of_cell_end_with_it(name: str, counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not counted:
        monkeypatch.setattr(cgroups, "parents", dict)
    with boxed("cold") as sandbox:
        leaves_nothing(sandbox, name)


def test_fork_bomb_left_by_cell_is_ended_each_time() -> None:
    with boxed("cold") as sandbox:
        session = sandbox.session(LEFTOVERS)
        for number in range(20):
            result = session.run(f"x = {number}\n{LEFT['a fork bomb'][0]}", LEFTOVERS)
            assert result.status == "ok"
            assert result.left > 0
            assert session.run("x").output == f"{number}\n"
        assert len(ours()) == OF_A_SESSION


def test_sandbox_tmp_is_limited_and_empty_for_next_program(sandbox: Boxed) -> None:
    fill = "n = 0\ntry:\n  f = open('/tmp/x', 'wb', 0)\n  while True: n += f.write(b'x' * 4096)\nexcept OSError: print(n)"
    shared = fill.replace("/tmp", "/dev/shm")
    assert int(sandbox.run(fill, limits=LIMITS).output) <= 4 * MIB
    assert int(sandbox.run(shared, limits=LIMITS).output) <= MIB
    assert sandbox.run("import os; print(os.listdir('/tmp'), os.listdir('/dev/shm'))").output == "[] []\n"


def test_sandbox_output_of_any_bytes_is_text(sandbox: Boxed) -> None:
    code = "import sys\nprint('\\ud800\\0'); sys.stdout.flush(); sys.stdout.buffer.write(b'\\xff\\x00'); print('é')"
    assert sandbox.run(code).output == "\\ud800\0\n\\xff\0é\n"


def test_sandbox_input_of_50_mb_is_read_or_left(sandbox: Boxed) -> None:
    much = "x" * 50 * MIB
    roomy = Limits(memory_bytes=1024 * MIB)
    assert sandbox.run("import sys; print(len(sys.stdin.read()))", much, roomy).output == f"{len(much)}\n"
    assert sandbox.run("print(1)", much).output == "1\n"


PATHS = {
    "read": ("/etc/passwd", "/etc/shadow", "/root", "/home", "/work", "/var", "/sys", "/boot", "/proc/kcore", "/proc/1/mem"),
    "write": ("/x", "/usr/x", "/usr/bin/x", "/dev/x", "/etc/x", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger"),
}
TRY_PATHS = """
import os
def read(path):
    return os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
def write(path):
    open(path, "w")
for verb, paths in {paths!r}.items():
    for path in paths:
        try:
            if {{"read": read, "write": write}}[verb](path) != b"": print(verb, path)
        except OSError: pass
"""


def test_host_files_are_neither_read_nor_written(sandbox: Boxed) -> None:
    assert sandbox.run(TRY_PATHS.format(paths=PATHS)).output == ""


def test_warm_namespace_first_process_is_not_writable() -> None:
    with boxed("warm") as sandbox:
        code = "import os\nfor part in ('mem', 'fd/1', 'fd/2'): print(os.open(f'/proc/1/{part}', os.O_RDWR))"
        assert "PermissionError" in sandbox.run(code).output


def test_files_can_be_made_only_in_tmp(sandbox: Boxed) -> None:
    code = """
import os
for folder, _, _ in os.walk("/"):
    if folder.startswith(("/tmp", "/dev/shm", "/proc/")): continue
    try: os.close(os.open(folder + "/made", os.O_CREAT | os.O_WRONLY)); print(folder)
    except OSError: pass
"""
    assert sandbox.run(code).output == ""


SECRET = "s3cret-of-the-parent"
HUNT = """
import os
def read(path):
    if os.path.isdir(path):
        return b" ".join(os.readlink(f"{path}/{name}").encode() for name in os.listdir(path))
    return open(path, "rb").read()
for name in os.listdir("/proc"):
    for part in ("environ", "cmdline", "maps", "fd"):
        try: found = read(f"/proc/{name}/{part}")
        except OSError: continue
        if b"s3" + b"cret" in found: print("/proc", name, part)
print(sorted(os.environ))
"""


def test_environment_secrets_are_unreadable(sandbox: Boxed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_SECRET", SECRET)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    said = sandbox.run(HUNT).output
    assert "/proc" not in said
    assert "TOKEN" not in said
    assert "AGENTRL" not in said


@pytest.fixture
def loopback_redis(tmp_path: Path) -> Iterator[int]:
    """A Redis that listens on 127.0.0.1, as a user's own may; its port."""
    server = broker.find_server(Settings())
    if server is None:
        missing("a Redis server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(server), "--port", str(port), "--dir", str(tmp_path), "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            continue
    yield port
    process.terminate()
    process.wait()


def test_redis_on_loopback_is_unreachable(sandbox: Boxed, loopback_redis: int) -> None:
    code = "import socket\nsocket.create_connection(('127.0.0.1', {})).send(b'FLUSHALL')"
    result = sandbox.run(code.format(loopback_redis))
    assert result.status == "error"
    assert "PermissionError" in result.output


def test_host_abstract_socket_is_unreachable(sandbox: Boxed) -> None:
    name = f"\0agentrl-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        result = sandbox.run(f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})")
        assert "ConnectionRefusedError" in result.output


def numbers() -> dict[str, int]:
    """The denied calls that this machine knows."""
    found = {name: pyseccomp.resolve_syscall(pyseccomp.system_arch(), name) for name in seccomp.DENIED_CALLS}
    return {name: number for name, number in found.items() if number >= 0}


CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def errno(number, *args):
    ctypes.set_errno(0)
    libc.syscall(number, *args)
    return ctypes.get_errno()
"""


def test_sandbox_denied_system_calls_fail(sandbox: Boxed) -> None:
    code = f"{CALL}\nprint([name for name, number in {numbers()!r}.items() if errno(number, 0, 0, 0, 0, 0) != 1])"
    assert sandbox.run(code).output == "[]\n"


def test_clone_makes_no_namespace(sandbox: Boxed) -> None:
    clone, clone3 = (pyseccomp.resolve_syscall(pyseccomp.system_arch(), name) for name in ("clone", "clone3"))
    code = (
        f"{CALL}\nprint([errno({clone}, flag | 17, 0, 0, 0, 0) for flag in {seccomp.NEW_NAMESPACES!r}], errno({clone3}, 0, 0))"
    )
    assert sandbox.run(code).output == f"{[1] * len(seccomp.NEW_NAMESPACES)} 38\n"


def test_capabilities_are_none_and_cannot_be_gained(sandbox: Boxed) -> None:
    said = sandbox.run("print(open('/proc/self/status').read())").output
    assert re.search(r"NoNewPrivs:\t1\n.*Seccomp:\t2\n", said, re.DOTALL)
    assert set(re.findall(r"Cap(?:Inh|Prm|Eff|Amb):\t(\w+)", said)) == {"0" * 16}


def test_terminal_input_cannot_be_forged(sandbox: Boxed) -> None:
    code = f"import fcntl\nfcntl.ioctl(0, {seccomp.TIOCSTI}, b'x')"
    assert "PermissionError" in sandbox.run(code).output


# The four traps.


def test_sandbox_drops_root_before_bwrap(sandbox: Boxed) -> None:
    session = sandbox.session()
    assert len(alive()) >= 3  # the kernel's own word: as users of the range, or as this test's
    session.close()
    assert sandbox.run("import os; print(os.getuid() == 0)").output == "False\n"
    assert "PermissionError" in sandbox.run("open('/proc/sys/kernel/core_pattern', 'w')").output


def test_sandbox_bwrap_process_has_empty_environment(sandbox: Boxed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_SECRET", SECRET)
    session = sandbox.session()
    assert "PermissionError" in session.run("open('/proc/1/environ')").output
    found = environments()
    assert [name for name, environment in found if SECRET in environment] == []
    inside = {f"{name}={value}" for name, value in ENVIRONMENT.items()}
    for name, environment in found:
        allowed = {"", "PWD=/"} if name == "bwrap\n" else {"", "PWD=/", "PWD=/tmp", *inside}
        assert set(environment.split("\0")) <= allowed, name
    assert "bwrap\n" in [name for name, _ in found] or os.geteuid() != 0
    session.close()


def environments() -> list[tuple[str, str]]:
    """(name, environment) of what is alive in a sandbox of this process, seen from outside."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            apart = os.readlink(folder / "ns/pid") != os.readlink("/proc/self/ns/pid")
            if folder.stat().st_uid in UIDS or (apart and descends(int(folder.name))):
                found.append(((folder / "comm").read_text(), (folder / "environ").read_text()))
        except OSError:
            continue
    return found


def test_sandbox_outlives_thread_that_made_it(sandbox: Boxed) -> None:
    made: list[object] = []
    thread = threading.Thread(target=lambda: made.extend([sandbox.session(), sandbox.run("print(1)")]))
    thread.start()
    thread.join()
    session = made[0]
    assert session.run("1 + 1").output == "2\n"  # type: ignore[attr-defined]


def test_process_limit_holds_for_root(sandbox: Boxed) -> None:
    code = """
import os, time
n = 0
try:
    while True:
        if os.fork() == 0: time.sleep(99)
        n += 1
except OSError: print(n)
"""
    assert 8 <= int(sandbox.run(code, limits=LIMITS).output) <= 16 + cgroups.SPARE_PROCESSES


def test_concurrent_sandboxes_have_their_own_users(sandbox: Boxed) -> None:
    if os.geteuid() != 0:
        forbidden("the right to change the user")
    code = "import os; print(os.getuid())"
    with closing(sandbox.session()) as one, closing(sandbox.session()) as other:  # a program beside them is the third
        users = [one.run(code).output, other.run(code).output, sandbox.run(code).output]
        assert one.run(code).output == users[0]
    assert len(set(users)) == 3
    assert "0\n" not in users


def test_sandbox_processes_end_with_parent(tmp_path: Path) -> None:
    code = """
import os, sys, threading
from tests.support.sandbox_fixtures import boxed
with boxed("cold") as sandbox:
    session = sandbox.session()
    cell = "import subprocess; subprocess.run(['sleep', '1000'])"
    threading.Thread(target=session.run, args=[cell], daemon=True).start()
    print("up", flush=True)
    sys.stdin.read()
"""
    root = Path(__file__).parents[2]
    command, both = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, cwd=root, stdin=both, stdout=both, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "up\n":
            missing("bubblewrap")
        while "sleep" not in alive():  # pytest's own timeout ends this
            time.sleep(0.01)
        process.kill()
    while alive():  # pytest's own timeout ends this
        time.sleep(0.01)
