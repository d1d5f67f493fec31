"""The sandboxes beside bwrap: what is contained by each, and, each named, what is known not to be."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.cli import doctor
from agentrl.workflow.errors import CodeFailure, ConfigError, SandboxUnavailable
from agentrl.workflow.sandbox import MIB, Limits, Sandbox, Session, exact_json, keeper, landlock, spawn
from agentrl.workflow.sandbox.boxed import Boxed
from agentrl.workflow.sandbox.docker import Docker, check
from agentrl.workflow.sandbox.find import find_sandbox
from agentrl.workflow.sandbox.launch import Inside
from agentrl.workflow.sandbox.session import ENDED_TEXT, CellSession
from agentrl.workflow.settings import Settings
from agentrl.workflow.tools.python import observation
from tests.conftest import forbidden, missing
from tests.sandbox.test_sandbox import (
    DEATHS,
    EVERYBODY,
    FORGERIES,
    KILLS,
    NO_PLAIN_DATA,
    TOO_LONG,
    claimed,
    forks_once,
    hands_out_no_more_than_it_may,
    keeps_nothing_of_what_passed_its_limit,
)
from tests.sandbox.test_sandbox_attacks import ATTACKS, BRIEF, CPU, HUNT, IN_TIME, LIMITS, SECRET, SHORT, TRY_PATHS, numbers
from tests.support.docker_image import docker, image
from tests.support.leftovers import LEFT, TELLING, leaves_nothing
from tests.support.sandbox_fixtures import SETTINGS, UIDS, result_with_a_core
from tests.support.unprivileged import PYTHON, Ordinary

KINDS = ("landlock", "landlock as an ordinary user", "docker")
LANDLOCKS = KINDS[:2]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def docker_sandbox() -> Iterator[Docker]:
    with (
        tempfile.TemporaryDirectory(prefix="arl-", dir="/tmp") as name,
        docker(Path(name)) as command,
        image(command, Path(name)) as made,
    ):
        yield Docker(made, UIDS[-2], command)


@pytest.fixture(scope="module")
def landlock_sandbox() -> Iterator[Boxed]:
    needs_landlock()
    found = landlock.find(SETTINGS)
    assert isinstance(found, Boxed)
    yield found
    found.close()


@pytest.fixture(scope="module")
def ordinary_sandbox() -> Iterator[Ordinary]:
    needs_landlock()
    if os.geteuid() != 0:
        forbidden("the right to change the user: the test beside this one is the ordinary user's")
    made = Ordinary(UIDS[-1])
    made.run("")  # it is up
    yield made
    made.close()


def needs_landlock() -> None:
    if landlock.abi() < landlock.NEEDED_ABI:
        missing(f"Landlock's ABI {landlock.NEEDED_ABI}")


@pytest.fixture(params=KINDS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    yield from nothing_left(request)


@pytest.fixture(params=LANDLOCKS)
def landlocked(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    yield from nothing_left(request)


def nothing_left(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """One of each kind for all tests; after each nobody and no folder is left."""
    fixture = {"docker": "docker_sandbox", "landlock": "landlock_sandbox"}.get(request.param, "ordinary_sandbox")
    made: Sandbox = request.getfixturevalue(fixture)
    lasting = request.getfixturevalue("lasting")
    living, folders, opened = alive(), sandbox_folders(), len(lasting)
    yield made
    assert alive() == living or len(lasting) > opened
    assert sandbox_folders() <= folders


def alive() -> list[str]:
    """The processes of our users, by name; as an ordinary user: those that read their program from a descriptor."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            user, command = folder.stat().st_uid, (folder / "cmdline").read_bytes()
            mine = user in UIDS or (os.geteuid() != 0 and user == os.geteuid() and b"agentrl.workflow.sandbox" in command)
            if mine and b"\nState:\tZ" not in (folder / "status").read_bytes():
                found.append((folder / "comm").read_text(errors="replace").strip())
        except OSError:
            continue
    return sorted(found)


def sandbox_folders() -> set[Path]:
    """The folders of our own users' sandboxes: others run theirs beside us."""
    found = Path(tempfile.gettempdir()).glob("agentrl-sandbox-*")
    return {path for path in found if path.exists() and path.stat().st_uid in (*UIDS, os.geteuid())}


@pytest.fixture
def session(sandbox: Sandbox) -> Iterator[Session]:
    opened = sandbox.session()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def lasting() -> Iterator[list[CellSession]]:
    """The container of the tests that leave a session as it was, once it is open."""
    opened: list[CellSession] = []
    yield opened
    for session in opened:
        session.close()


@pytest.fixture
def kept_session(sandbox: Sandbox, lasting: list[CellSession], request: pytest.FixtureRequest) -> Iterator[Session]:
    """A session that others may have used before, where a new one would cost a container."""
    if not isinstance(sandbox, Docker):
        yield request.getfixturevalue("session")
        return
    if not lasting:
        lasting.append(sandbox.session())
    assert lasting[0].alive
    living = len(alive())
    yield lasting[0]
    deadline = time.monotonic() + 10
    while len(alive()) > living and time.monotonic() < deadline:  # the state from before the last cell ends by itself
        time.sleep(0.01)


def test_supervisor_without_report_leaves_no_open_file(landlock_sandbox: Boxed, monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(file: int, seconds: float | None = None) -> bool:
        os.fstat(file)
        return seen(file, seconds)

    seen = spawn.wait_readable
    monkeypatch.setattr(spawn, "wait_readable", ready)
    nothing = os.open(os.devnull, os.O_RDWR)
    kept = landlock_sandbox.launch.start(Limits(), Inside(("runner",), (nothing, nothing), (1, 1 << 32, 9), nothing, nothing))
    os.close(nothing)
    assert isinstance(kept, landlock.KeptProcess)
    kept._process.kill()
    assert kept.close() == -signal.SIGKILL


# The attacks that bwrap meets.


OF_THE_PARENT = {
    *("endless errors", "spin in C", "regular expression", "segmentation fault", "deep recursion", "deep recursion in C"),
    *("exit without an end", "closed output"),
}
"""Attacks that our own eye on a program ends, as others of their kind; a container for each would cost a second."""
MET = [(kind, name) for kind in KINDS for name in ATTACKS if kind != "docker" or name not in OF_THE_PARENT]


@pytest.mark.parametrize(("sandbox", "name"), MET, indirect=["sandbox"])
def test_backend_contains_attack_and_leaves_nothing(sandbox: Sandbox, name: str) -> None:
    code, allowed = ATTACKS[name]
    if isinstance(sandbox, Ordinary) and name == "thread bomb":
        allowed = {"pids", "error"}  # its address space may be full of stacks before the keeper looks
    result = sandbox.run(code, limits=BRIEF if allowed == CPU else LIMITS)
    assert result.status in allowed, result
    assert len(result.output) <= 4096


@pytest.mark.parametrize("name", IN_TIME)
def test_backend_ends_slow_attack_at_wall_limit(sandbox: Sandbox, name: str) -> None:
    assert result_with_a_core(lambda: sandbox.run(IN_TIME[name], limits=SHORT)).status == "timeout_wall"


FILLS = {
    "one file": "f = open('x', 'wb', 0)\nwhile True: f.write(b'x' * 65536)",
    "many files": "for n in range(64): open(f'{n}', 'wb').write(b'x' * (1 << 20))",
    "files without a name": """
import os
kept = []
for n in range(64):
    kept.append(open("x", "wb", 0))
    os.unlink("x")
    kept[-1].write(b"x" * (1 << 20))
""",
    "files without a name or a descriptor": """
import ctypes, os
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
for n in range(32):
    file = os.open("x", os.O_RDWR | os.O_CREAT)
    os.write(file, b"x" * (1 << 20))
    assert libc.mmap(None, ctypes.c_size_t(4096), 1, 1, file, ctypes.c_long(0)) not in (None, 2**64 - 1)
    os.unlink("x")
    os.close(file)
""",
    "folders without end": "import os\nfor n in range(40000): os.mkdir('d' * 50); os.chdir('d' * 50)",
    "a folder that cannot be listed": """
import os
os.mkdir("d", 0o300)
for n in range(64): open(f"d/{n}", "wb").write(b"x" * (1 << 20))
""",
}
THEN_WAITS = "\nimport time\ntime.sleep(1000)"


@pytest.mark.parametrize("name", FILLS)
def test_backend_folder_has_size_limit(sandbox: Sandbox, name: str) -> None:
    limits = Limits(cpu_seconds=20, wall_seconds=60, tmp_bytes=4 * MIB)
    assert sandbox.run(FILLS[name] + THEN_WAITS, limits=limits).status in ("error", "disk", "oom")


def test_landlock_counts_mapped_temporary_file_once(landlocked: Sandbox) -> None:
    half = "import mmap, tempfile, time\nf = tempfile.TemporaryFile()\nf.truncate(5 << 19)\nm = mmap.mmap(f.fileno(), 0)\n"
    fills = "m[:] = b'x' * len(m)\ntime.sleep(0.5)\nprint(len(m))"
    result = landlocked.run(half + fills, limits=Limits(tmp_bytes=4 * MIB))
    assert (result.status, result.output) == ("ok", f"{5 << 19}\n")


def test_landlock_reports_writing_too_much(landlocked: Sandbox) -> None:
    limits = Limits(cpu_seconds=20, wall_seconds=60, tmp_bytes=4 * MIB)
    result = landlocked.run(FILLS["many files"] + THEN_WAITS, limits=limits)
    assert result.status == "disk"
    session = landlocked.session(limits)
    lost = session.run(FILLS["many files"] + THEN_WAITS, limits)
    assert (lost.status, ENDED_TEXT in lost.output) == ("disk", True)
    session.close()
    with pytest.raises(CodeFailure, match="wrote more than 4 MB of files"):
        observation(result, limits)


def test_backend_output_of_any_bytes_is_text(sandbox: Sandbox) -> None:
    code = "import sys\nprint('\\ud800\\0'); sys.stdout.flush(); sys.stdout.buffer.write(b'\\xff\\x00'); print('é')"
    assert sandbox.run(code).output == "\\ud800\0\n\\xff\0é\n"


def test_backend_input_of_megabytes_is_read_or_left(sandbox: Sandbox) -> None:
    much = "x" * 50 * MIB
    roomy = Limits(memory_bytes=1024 * MIB)
    assert sandbox.run("import sys; print(len(sys.stdin.read()))", much, roomy).output == f"{len(much)}\n"
    assert sandbox.run("print(1)", much, roomy).output == "1\n"


PATHS = {
    "read": ("/root", "/home", "/work", "/boot", "/proc/kcore", "/proc/1/mem", "/proc/1/environ"),
    "write": ("/x", "/usr/x", "/usr/bin/x", "/dev/x", "/etc/x", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger"),
}
FILES_OF_THE_HOST = ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/kmsg", "/tmp", "/var/log", "/proc/self/environ")


def test_backend_hides_host_files(sandbox: Sandbox) -> None:
    assert sandbox.run(TRY_PATHS.format(paths=PATHS)).output == ""


def test_landlock_denies_other_files(landlocked: Sandbox) -> None:
    paths = {"read": FILES_OF_THE_HOST, "write": ("/tmp/x", "/dev/shm/x", "/var/tmp/x")}
    assert landlocked.run(TRY_PATHS.format(paths=paths)).output == ""


def test_backend_makes_files_only_in_its_folder(sandbox: Sandbox) -> None:
    code = """
import os
ours = os.path.realpath(os.environ["HOME"])
for top in ("/usr", "/var", "/etc", "/opt", "/dev", "/"):
    for folder, folders, _ in os.walk(top):
        if top == "/": folders.clear()
        if folder.startswith((ours, "/dev/shm", "/dev/mqueue")): continue
        try: os.close(os.open(folder + "/made", os.O_CREAT | os.O_WRONLY)); print(folder)
        except OSError: pass
"""
    assert sandbox.run(code).output == ""


def test_backend_hides_environment_secrets(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_SECRET", SECRET)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    said = sandbox.run(HUNT.replace('os.listdir("/proc")', "[*map(str, range(9999))]")).output
    assert "/proc" not in said
    assert "TOKEN" not in said
    assert "AGENTRL" not in said


CONNECT = """
import socket
try: {made}
except OSError as error: print(type(error).__name__)
else: print("reached")
"""


def test_backend_reaches_no_host_socket(sandbox: Sandbox, short_folder: Path) -> None:
    short_folder.chmod(0o755)
    abstract, named, letters = f"\0agentrl-test-{os.getpid()}", str(short_folder / "s"), str(short_folder / "d")
    with (
        socket.socket(socket.AF_UNIX) as one,
        socket.socket(socket.AF_UNIX) as two,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as three,
        socket.socket() as loopback,
    ):
        for bound, address in ((one, abstract), (two, named), (three, letters), (loopback, ("127.0.0.1", 0))):
            bound.bind(address)
        for file in (named, letters):
            os.chmod(file, 0o777)
        for listener in (one, two, loopback):
            listener.listen()
        port = loopback.getsockname()[1]
        code = "".join(
            CONNECT.format(made=made)
            for made in (
                f"socket.socket(socket.AF_UNIX).connect({abstract!r})",
                f"socket.socket(socket.AF_UNIX).connect({named!r})",
                f"socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', {letters!r})",
                f"socket.create_connection(('127.0.0.1', {port}))",
                f"socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
            )
        )
        said = sandbox.run(code).output.splitlines()
        assert len(said) == 5
        assert "reached" not in said


CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def errno(number, *args):
    ctypes.set_errno(0)
    libc.syscall(number, *args)
    return ctypes.get_errno()
"""


def test_backend_denied_system_calls_fail(sandbox: Sandbox) -> None:
    code = f"{CALL}\nprint([name for name, number in {numbers()!r}.items() if errno(number, 0, 0, 0, 0, 0) != 1])"
    assert sandbox.run(code).output == "[]\n"


def test_backend_is_not_root_and_cannot_become_root(sandbox: Sandbox) -> None:
    code = "import os\nprint(0 in os.getresuid() + os.getresgid())\ntry: os.setuid(0)\nexcept PermissionError: print('refused')"
    assert sandbox.run(code).output == "False\nrefused\n"


# Others on the machine, which another namespace of process ids would hide.

TOUCH = """
import os, resource, signal
def tried(name, call, *args):
    try: call(*args)
    except (PermissionError, ProcessLookupError): return
    except OSError as error: print(name, error); return
    print(name)
tried("kill", os.kill, {other}, 0)
tried("pidfd", lambda: signal.pidfd_send_signal(os.pidfd_open({other}), 0))
tried("limits", resource.prlimit, {other}, resource.RLIMIT_NOFILE, (99, 99))
tried("limits of the parent", resource.prlimit, os.getppid(), resource.RLIMIT_CPU, (1, 1))
tried("the parent", os.kill, os.getppid(), 9)
tried("priority", os.setpriority, os.PRIO_PROCESS, {other}, 19)
tried("priority of the user", os.setpriority, os.PRIO_USER, 0, 19)
tried("cores", os.sched_setaffinity, {other}, {{0}})
tried("scheduling", os.sched_setscheduler, {other}, os.SCHED_OTHER, os.sched_param(0))
"""


def test_landlock_leaves_other_processes_of_user_alone(landlocked: Sandbox) -> None:
    user = UIDS[-1] if os.geteuid() == 0 and isinstance(landlocked, Ordinary) else None
    other = subprocess.Popen(["sleep", "1000"], user=user)
    try:
        assert landlocked.run(TOUCH.format(other=other.pid)).output == ""
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_landlock_keeps_file_modes_of_same_user(ordinary_sandbox: Ordinary, short_folder: Path) -> None:
    file = short_folder / "mine"
    file.touch(mode=0o600)
    for path in (short_folder, file):
        os.chown(path, UIDS[-1], UIDS[-1])
    before = file.stat()
    code = """
import os
for name, *args in (("chmod", 0o777), ("chown", -1, -1), ("utime",), ("setxattr", "user.x", b"x"), ("unlink",)):
    try: getattr(os, name)({path!r}, *args); print(name)
    except PermissionError: pass
"""
    assert ordinary_sandbox.run(code.format(path=str(file))).output == ""
    assert file.stat() == before


def test_backend_folder_serves_as_tmp(landlocked: Sandbox) -> None:
    code = """
import os, tempfile, shutil
with tempfile.TemporaryDirectory() as folder:
    open(folder + "/a", "w").write("x")
    os.mkdir(folder + "/d")
    os.rename(folder + "/a", folder + "/d/b")
    os.link(folder + "/d/b", folder + "/c")
    os.symlink("/etc", folder + "/e")
    shutil.copyfile(folder + "/c", folder + "/f")
    print(sorted(os.listdir(folder)), open(folder + "/f").read())
    try: os.listdir(folder + "/e")
    except PermissionError: print("refused")
"""
    assert landlocked.run(code).output == "['c', 'd', 'e', 'f'] x\nrefused\n"


# Sessions.


def test_backend_session_keeps_names_and_files(kept_session: Session) -> None:
    assert kept_session.run("x = [1]\nopen('kept', 'w').write('k')\nNone").output == ""
    assert kept_session.run("x.append(open('kept').read())\nx").output == "[1, 'k']\n"
    assert kept_session.run("def both(a): return (a, x)").status == "ok"
    result = kept_session.call("both", [{"k": None}])
    assert exact_json.decode(result.value) == ({"k": None}, [1, "k"])


@pytest.mark.parametrize("name", DEATHS)
@pytest.mark.slow
def test_backend_session_is_restored_after_cell_death(kept_session: Session, name: str) -> None:
    code, status = DEATHS[name]
    kept_session.run("x = 1")
    assert kept_session.run(code, Limits(cpu_seconds=1)).status == status
    assert kept_session.run("x").output == "1\n"
    assert "sleep" not in alive()


OF_A_CELL = [(kind, name) for kind in KINDS for name in (TELLING if kind == "landlock as an ordinary user" else LEFT)]


@pytest.mark.parametrize(("sandbox", "name"), OF_A_CELL, indirect=["sandbox"])
@pytest.mark.slow
def test_backend_ends_leftovers_of_cell(sandbox: Sandbox, name: str) -> None:
    leaves_nothing(sandbox, name)


def test_backend_sleeping_cell_with_daemons_ends_at_wall_limit(kept_session: Session) -> None:
    kept_session.run("x = 1")
    daemons = (
        "import os, time\nfor _ in range(5):\n  if os.fork() == 0: os.setsid(); os.fork(); time.sleep(999)\ntime.sleep(999)"
    )
    assert result_with_a_core(lambda: kept_session.run(daemons, Limits(wall_seconds=0.5))).status == "timeout_wall"
    assert kept_session.run("x").output == "1\n"


def test_backend_session_is_restored_if_cell_ends_at_limit(kept_session: Session) -> None:
    keeps_nothing_of_what_passed_its_limit(kept_session)


def test_backend_cell_that_forks_ends_once(kept_session: Session) -> None:
    forks_once(kept_session)


@pytest.mark.parametrize("name", KILLS | {"everybody": EVERYBODY})
def test_backend_session_that_destroys_itself_is_killed(session: Session, name: str) -> None:
    assert session.run((KILLS | {"everybody": EVERYBODY})[name], Limits(cpu_seconds=2, wall_seconds=20)).status in (
        "killed",
        "ok",
    )
    while (
        after := session.run("1")
    ).status != "killed":  # the kernel's `kill(-1)` spares who says it, until its keeper is missed
        assert name == "everybody"
    assert after.value == ""


@pytest.mark.parametrize("name", NO_PLAIN_DATA)
def test_backend_call_without_plain_data_has_no_value(kept_session: Session, name: str) -> None:
    kept_session.run(NO_PLAIN_DATA[name])
    result = kept_session.call("f", [])
    assert (result.status, result.value) == ("error", "")
    assert kept_session.run("1 + 1").output == "2\n"


@pytest.mark.parametrize("name", FORGERIES)
def test_backend_call_value_forged_is_only_data(session: Session, name: str) -> None:
    session.run(FORGERIES[name])
    result = session.call("f", [])
    assert result.status in ("ok", "error", "killed")
    assert claimed(result) is not True


@pytest.mark.parametrize("name", list(TOO_LONG)[:2])
def test_backend_call_value_beyond_limits_is_refused(session: Session, name: str) -> None:
    hands_out_no_more_than_it_may(session, name)


# The end of whoever started it.

HOLDER = """
import os, sys, threading
from tests.support.sandbox_fixtures import UIDS
from agentrl.workflow.sandbox import landlock
from agentrl.workflow.sandbox.boxed import Boxed
from agentrl.workflow.sandbox.docker import Docker
sandbox = {made}
session = sandbox.session()
cell = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True).wait()"
threading.Thread(target=session.run, args=[cell], daemon=True).start()
print("ok", flush=True)
sys.stdin.read()
"""


def held(made: str) -> None:
    """A process holds the sandbox and is killed: nobody inside outlives it."""
    command, both = [sys.executable, "-c", HOLDER.format(made=made)], subprocess.PIPE
    before, folders = alive(), sandbox_folders()
    with subprocess.Popen(command, cwd=ROOT, stdin=both, stdout=both, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ok\n"
        while "sleep" not in alive():  # the kernel names a process a moment after whoever started it goes on
            time.sleep(0.01)
        process.kill()
    while alive() != before or sandbox_folders() - folders:  # pytest's own timeout ends this
        time.sleep(0.01)


def test_landlock_processes_end_with_parent(landlock_sandbox: Boxed) -> None:
    held(f"Boxed(landlock.launch({PYTHON!r}, (), UIDS))")


def test_docker_processes_end_with_parent(docker_sandbox: Docker) -> None:
    held(f"Docker({docker_sandbox.image!r}, {docker_sandbox.user}, {docker_sandbox.command!r})")


# What a person is told.

DOCTOR_WITHOUT = """
import errno, os, pyseccomp
from agentrl.cli.doctor import _sandbox
from agentrl.workflow.settings import Settings
os.environ["PATH"] = "/nowhere"
rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "landlock_create_ruleset")
rules.load()
check = _sandbox(Settings())
print(check.state, check.found, check.todo, sep="|")
"""


def test_doctor_names_sandbox_and_what_a_better_one_lacks(landlock_sandbox: Boxed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    check = doctor._sandbox(SETTINGS)
    assert check.state == "ok"
    assert re.match(r"landlock runs /usr/\S*python3 3\.\d+\.\d+.*; bwrap: .*bubblewrap is not installed", check.found)


def test_doctor_without_sandbox_says_what_to_install() -> None:
    ended = subprocess.run([sys.executable, "-c", DOCTOR_WITHOUT], cwd=ROOT, capture_output=True, text=True, check=True)
    state, found, todo = ended.stdout.split("|")
    assert state == "warn"
    assert "code tools are refused, everything else works. bwrap: " in found
    assert "landlock: The landlock sandbox needs" in found
    assert "apt-get install bubblewrap" in todo


@pytest.mark.parametrize(("kind", "state"), [("bwrap", "fail"), ("docker", "fail"), ("none-unsafe", "warn")])
def test_doctor_fails_if_chosen_sandbox_is_missing(kind: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    check = doctor._sandbox(SETTINGS.model_copy(update={"sandbox": kind, "sandbox_image": ""}))
    assert (check.state, bool(check.todo)) == (state, True)


# What is known not to be contained.


def test_landlock_does_not_hide_that_a_path_exists_nor_its_size(landlocked: Sandbox) -> None:
    assert landlocked.run("import os; print(os.stat('/etc/passwd').st_size)").output == f"{os.stat('/etc/passwd').st_size}\n"


def test_landlock_does_not_hide_the_machines_name(landlocked: Sandbox) -> None:
    assert landlocked.run("import os; print(os.uname().nodename)").output == f"{os.uname().nodename}\n"


def test_landlock_has_no_own_tmp_and_refuses_paths_in_tmp(landlocked: Sandbox) -> None:
    assert "PermissionError" in landlocked.run("open('/tmp/x', 'w')").output


def test_landlock_has_no_shared_memory_and_refuses_locks(landlocked: Sandbox) -> None:
    assert landlocked.run("import multiprocessing\nmultiprocessing.Lock()").status == "error"


def test_landlock_refuses_modes_in_own_folder_without_root(ordinary_sandbox: Ordinary) -> None:
    assert "PermissionError" in ordinary_sandbox.run("import os\nopen('a', 'w')\nos.chmod('a', 0o700)").output


# Where they are found.


def test_landlock_option_finds_it(landlock_sandbox: Boxed) -> None:
    found = find_sandbox(SETTINGS.model_copy(update={"sandbox": "landlock"}))
    assert found.kind == found.run("print(1)").kind == "landlock"


def test_landlock_is_default_without_bubblewrap(landlock_sandbox: Boxed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_sandbox(SETTINGS).kind == "landlock"


def test_landlock_missing_from_kernel_is_reported(landlock_sandbox: Boxed) -> None:
    code = """
import errno, pyseccomp
from agentrl.workflow.errors import SandboxUnavailable
from agentrl.workflow.sandbox import landlock
rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "landlock_create_ruleset")
rules.load()
try: landlock.check()
except SandboxUnavailable as error: print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(r"needs Landlock's ABI 6 .*this kernel has 0.*install bubblewrap", said)


def test_docker_needs_image_and_command(docker_sandbox: Docker) -> None:
    with pytest.raises(ConfigError, match="AGENTRL_SANDBOX_IMAGE names no image"):
        find_sandbox(Settings(sandbox="docker", sandbox_image=""))
    with pytest.raises(SandboxUnavailable, match="no docker command"):
        check("x", ("no-such-docker",))
    with pytest.raises(SandboxUnavailable, match="cannot use the image no-such-image"):
        check("no-such-image", docker_sandbox.command)


def test_docker_start_failure_is_system_failure(docker_sandbox: Docker) -> None:
    result = Docker("no-such-image", UIDS[-2], docker_sandbox.command).run("print(1)")
    assert result.status == "sandbox_fault"
    assert "no-such-image" in result.output


def test_docker_option_finds_it(docker_sandbox: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    if len(docker_sandbox.command) > 1:
        monkeypatch.setenv("DOCKER_HOST", docker_sandbox.command[-1])
    found = find_sandbox(SETTINGS.model_copy(update={"sandbox": "docker", "sandbox_image": docker_sandbox.image}))
    assert found.kind == "docker"


def test_landlock_supervisor_refuses_unscoped_signals() -> None:
    """It would otherwise end every process of the machine."""
    needs_landlock()
    code = f"{landlock.keeper_source().split('if __name__')[0]}\nenter_domain = lambda *args: None\nscope_signals()"
    found = subprocess.run(
        [shutil.which("python3") or sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (1, "signals are not scoped\n")
    assert keeper.ENTRIES > 0
