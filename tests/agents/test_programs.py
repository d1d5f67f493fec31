"""Programs that are agents, in their sandbox: what they see of this host, what they reach, and that they do their work."""

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentrl.workers.agents import agent_programs, processes
from agentrl.workers.agents.guardian import AgentReport
from agentrl.workers.agents.processes import servers
from agentrl.workflow.agents import LLM, AgentTask
from agentrl.workflow.agents.agent_limits import check_held
from agentrl.workflow.config import AgentConfig
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.settings import settings
from tests.conftest import missing

CONFIG = {"dataset": {"name": "arithmetic"}}
ASKS = """
import json, os, urllib.request
task = json.load(open(os.environ["AGENTRL_TASK"]))
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/models")
asked.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
said = urllib.request.urlopen(asked, timeout=20).read().decode()
told = {"text": task["messages"][0]["content"] + " " + said, "rewards": {"own": 0.5}}
json.dump(told, open(os.environ["AGENTRL_ANSWER"], "w"))
"""


class Endpoint(BaseHTTPRequestHandler):
    """Says who asked."""

    def do_GET(self) -> None:
        body = f"{self.path} {self.headers['Authorization']}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.fixture(autouse=True, scope="module")
def _end_servers() -> Iterator[None]:
    try:
        check_held(AgentConfig(name="cmd:python3"))
    except ConfigError:
        missing("bubblewrap")
    yield
    servers.close()


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def ran(endpoint: str, asked: AgentConfig, config: Any = CONFIG) -> AgentReport:
    task = AgentTask("t/1", [{"role": "user", "content": "Hi"}], {"n": 1})
    with agent_programs.placed(asked, task, LLM(endpoint, "secret-key", "m"), config) as place:
        report = processes.run(place.order(asked, task), place.spec(asked), lambda: False)
    assert report is not None
    return report


def script(folder: Path, source: str, **changes: Any) -> AgentConfig:
    folder.chmod(0o755)
    (folder / "agent.py").write_text(source)
    (folder / "agent.py").chmod(0o644)
    return AgentConfig(**{"name": "cmd:/usr/bin/python3 agent.py", "timeout_seconds": 60, **changes})


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may read."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="agent-test-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(params=["bwrap", "landlock"])
def box(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Each kind of an agent's sandbox; Landlock as in a container of ours, in which bubblewrap does not start."""
    if request.param == "landlock":
        (tmp_path / "bwrap").write_text("#!/bin/sh\necho no >&2\nexit 1\n")
        (tmp_path / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("AGENTRL_IMAGE", "1")
        settings.cache_clear()
    yield request.param
    monkeypatch.undo()
    settings.cache_clear()


@pytest.mark.parametrize("changes", [{}, {"unsafe": True}, {"network": "all"}], ids=["sandbox", "unsafe", "network"])
def test_program_reads_task_calls_model_and_answers(open_folder: Path, endpoint: str, changes: dict[str, Any]) -> None:
    with inside(open_folder):
        report = ran(endpoint, script(open_folder, ASKS, **changes))
    assert report.error_class == "", report
    assert (report.answer, report.rewards) == ("Hi /v1/models Bearer secret-key", {"own": 0.5})


def test_function_agent_may_be_sandboxed(endpoint: str) -> None:
    asked = AgentConfig(name="tests.agents.hostile_agents:answers", sandbox=True)
    if os.geteuid() == 0 and Path(sys.executable).resolve().is_relative_to("/root"):
        with pytest.raises(ConfigError, match="cannot read '/root"):
            ran(endpoint, asked)
    else:
        report = ran(endpoint, asked)
        assert (report.answer, report.rewards) == ("Hi m", {"close": 0.5}), report


@pytest.mark.usefixtures("box")
def test_program_in_each_sandbox_does_its_work(open_folder: Path, endpoint: str) -> None:
    source = ASKS + "open('own', 'w').write('x'); os.rename('own', 'mine'); os.chmod('mine', 0o600); os.utime('mine')\n"
    source += "import subprocess; subprocess.run(['sh', '-c', 'test -r mine && touch $HOME/a $TMPDIR/b'], check=True)\n"
    with inside(open_folder):
        report = ran(endpoint, script(open_folder, source))
    assert (report.error_class, report.rewards) == ("", {"own": 0.5}), report


@pytest.mark.usefixtures("box")
def test_program_reaches_only_endpoint(open_folder: Path, endpoint: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        source = f"""
import socket
for address in (("127.0.0.1", {port}), ("1.1.1.1", 53), ("127.0.0.1", 5432), ("127.0.0.1", 6379)):
    try:
        socket.create_connection(address, timeout=3)
        print("reached", address)
    except OSError as error:
        print("no")
"""
        with inside(open_folder):
            assert ran(endpoint, script(open_folder, source)).output == "no\n" * 4


ATTACKS = """
import ctypes, os, resource, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
PORT, PARENT = OTHER_PORT, os.getppid()


def call(number, *args):
    if libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, args)) < 0:
        raise OSError(ctypes.get_errno(), "")


def fast_open():
    with socket.socket() as link:
        link.sendto(b"x", 0x20000000, ("127.0.0.1", PORT))


def later_fast_open():
    with socket.socket() as link:
        link.setsockopt(6, 30, 1)
        link.connect(("127.0.0.1", PORT))
        link.send(b"x")


attacks = {
    "datagrams": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "raw": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1),
    "mptcp": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262),
    "mptcp 6": lambda: socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 262),
    "sctp": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132),
    "packets": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "vsock": lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM),
    "more bits of a family": lambda: call(41, 1 << 32 | 2, 2, 0),
    "more bits of a protocol": lambda: call(41, 2, 1, 1 << 32 | 262),
    "fast open": fast_open,
    "later fast open": later_fast_open,
    "listens": lambda: socket.create_server(("127.0.0.1", 0)),
    "kills": lambda: os.kill(PARENT, signal.SIGCONT),
    "limits": lambda: resource.prlimit(PARENT, resource.RLIMIT_CPU, (1, 1)),
    "affinity": lambda: os.sched_setaffinity(PARENT, {0}),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, PARENT, 19),
    "shared memory": lambda: call(29, 77, 4096, 0o1666),
    "user namespace": lambda: call(272, 0x10000000),
    "another folder": lambda: open("/tmp/agent-test-written", "w"),
    "list": lambda: os.listdir("/tmp"),
    "environment": lambda: open(f"/proc/{PARENT}/environ").read(),
    "own process": lambda: open("/proc/self/mem").read(1),
    "device": lambda: os.mknod("device", 0o20600, os.makedev(1, 1)),
}
for name, attack in attacks.items():
    try:
        attack()
        print("done:", name)
    except OSError:
        pass
"""


@pytest.mark.parametrize("box", ["landlock"], indirect=True)
@pytest.mark.usefixtures("box")
def test_program_that_landlock_confines_attacks_in_vain(open_folder: Path, endpoint: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, inside(open_folder):
        source = ATTACKS.replace("OTHER_PORT", str(other.getsockname()[1]))
        report = ran(endpoint, script(open_folder, source))
        other.settimeout(0.2)
        with pytest.raises(TimeoutError):
            other.accept()
    assert (report.exit_code, report.output) == (0, "")


def test_program_sees_no_rows_dataset_or_outside_processes(
    open_folder: Path, endpoint: str, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = open_folder / ".agentrl"
    home.mkdir()
    (home / "agentrl.db").write_text("rows")
    (open_folder / "tasks.jsonl").write_text("references")
    (open_folder / ".env").write_text("secrets")
    monkeypatch.setenv("AGENTRL_HOME", str(home))
    monkeypatch.setenv("AGENTRL_DATABASE_URL", "postgresql://hidden")
    settings.cache_clear()
    source = """
import os, glob
seen = []
for path in (".agentrl/agentrl.db", "tasks.jsonl", ".env", "/etc/shadow", "/root/.bashrc"):
    try:
        seen.append(open(os.path.join(FOLDER, path)).read())
    except OSError:
        pass
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        seen.append(open(path).read())
    except OSError:
        pass
try:
    open(os.path.join(FOLDER, "agent.py"), "a").write("x")
    seen.append("written")
except OSError:
    pass
print("".join(seen).replace("\\0", "\\n"))
""".replace("FOLDER", repr(str(open_folder)))
    try:
        with inside(open_folder):
            said = ran(endpoint, script(open_folder, source), {"dataset": {"name": "qa=0.5,tasks.jsonl=0.5"}}).output
    finally:
        monkeypatch.undo()
        settings.cache_clear()
    for secret in ("rows", "references", "secrets", "hidden", "written", "root:"):
        assert secret not in said
    assert "OPENAI_API_KEY=secret-key" in said or box == "landlock", "of its own process"


@pytest.mark.usefixtures("box")
def test_program_key_is_on_no_command_line(open_folder: Path, endpoint: str) -> None:
    with inside(open_folder):
        asked = script(open_folder, "import time; time.sleep(600)")
        ended = threading.Event()
        task = AgentTask("t/1", [], {})
        with agent_programs.placed(asked, task, LLM(endpoint, "a-very-secret-key", "m"), CONFIG) as place:
            worker = threading.Thread(target=processes.run, args=(place.order(asked, task), "", ended.is_set))
            worker.start()
            found = ""
            for _ in range(100):
                lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
                found = b"".join(lines).decode(errors="replace")
                if "agent.py" in found:
                    break
                ended.wait(0.05)
            ended.set()
            worker.join()
    assert "agent.py" in found
    assert "a-very-secret-key" not in found


@pytest.mark.usefixtures("box")
def test_program_writing_too_much_is_ended(open_folder: Path, endpoint: str) -> None:
    source = "f = open('big', 'wb')\nwhile True: f.write(b'x' * (1 << 20))"
    with inside(open_folder):
        report = ran(endpoint, script(open_folder, source))
    assert report.error_class in ("exit", "files")


@pytest.mark.usefixtures("box")
def test_program_children_end_with_it(open_folder: Path, endpoint: str) -> None:
    started = "['/usr/bin/python3', '-c', 'import time; time.sleep(777)']"
    source = f"import subprocess; subprocess.Popen({started}, start_new_session=True)"
    with inside(open_folder):
        assert ran(endpoint, script(open_folder, source)).error_class == ""
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert b"time.sleep(777)" not in b"".join(lines)


def test_program_needs_working_bubblewrap_before_episodes(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = open_folder / "bwrap"
    refusing.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{open_folder}:{os.environ['PATH']}")
    with pytest.raises(
        ConfigError, match="cannot start a sandbox here: bwrap: No permissions to create new namespace"
    ) as refused:
        check_held(AgentConfig(name="cmd:python3 agent.py"))
    assert "--agent-unsafe" in refused.value.hint
    check_held(AgentConfig(name="cmd:/usr/bin/python3 -c pass", unsafe=True))


def test_program_without_bubblewrap_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="bubblewrap"):
        check_held(AgentConfig(name="cmd:python3 agent.py"))
    check_held(AgentConfig(name="cmd:/usr/bin/python3 -c pass", unsafe=True))


def test_program_not_found_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="no-such-program"):
        ran(endpoint, AgentConfig(name="cmd:no-such-program"))


def test_program_task_file_holds_only_allowed_fields(open_folder: Path, endpoint: str) -> None:
    with inside(open_folder):
        said = ran(endpoint, script(open_folder, "import os; print(open(os.environ['AGENTRL_TASK']).read())")).output
    assert json.loads(said) == {
        "key": "t/1", "messages": [{"role": "user", "content": "Hi"}], "metadata": {"n": 1}, "reference": None,
        "training": True, "resources": {},
    }  # fmt: skip


def test_agent_variables_name_model_of_both_apis() -> None:
    variables = LLM("http://here:1/v1", "key", "run-1").variables
    assert {variables[f"{api}_API_KEY"] for api in ("OPENAI", "ANTHROPIC")} == {"key"}
    assert (variables["OPENAI_BASE_URL"], variables["ANTHROPIC_BASE_URL"]) == ("http://here:1/v1", "http://here:1")


@pytest.mark.parametrize("box", ["landlock"], indirect=True)
@pytest.mark.usefixtures("box")
def test_program_in_container_reaches_endpoint_or_is_refused() -> None:
    check_held(AgentConfig(name="cmd:/usr/bin/python3 -c pass"))
    with pytest.raises(ConfigError, match="can reach only the endpoint"):
        check_held(AgentConfig(name="cmd:/usr/bin/python3 -c pass", network="all"))
