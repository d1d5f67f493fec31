"""Tools over HTTP: real server processes, on loopback and at a Unix socket, and callers of every kind."""

import asyncio
import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import pytest

from agentrl.cli.main import main
from agentrl.workers.jobs.tool_call import run_cell
from agentrl.workers.requests.tool_selection import select_tools
from agentrl.workers.serving.caller_sessions import ServedSessions
from agentrl.workflow.errors import ConfigError, InfraError, NotFoundError, StateError
from agentrl.workflow.tools import Tool
from agentrl.workflow.tools.python import LEFT_RUNNING_TEXT, Notebook
from agentrl.workflow.tools.python_session import python_session
from agentrl.workflow.trajectory import ToolResult
from tests.conftest import missing, put_away
from tests.support import sandbox_fixtures

pytestmark = pytest.mark.usefixtures("forked_programs_of_module")
PARTY = 20
SECONDS = 120.0
_barrier = threading.Barrier(PARTY)


def meet() -> str:
    """Waits until everybody is there."""
    _barrier.wait(SECONDS)
    return "all are there"


def linger() -> str:
    """Takes longer than it may."""
    time.sleep(SECONDS)
    return "at last"


def await_file(folder: str) -> str:
    """Says that it has begun, and ends when it is told to."""
    (Path(folder) / "begun").touch()
    wait(lambda: (Path(folder) / "go").exists())
    return "gone"


def fail() -> str:
    """Cannot run, for no fault of the model's."""
    raise InfraError("The disk is away.")


def stutter() -> str:
    """Says what is no text."""
    return "a\ud800b"


meet_tool = Tool(meet, timeout_seconds=SECONDS)
linger_tool = Tool(linger, timeout_seconds=0.1)
await_file_tool = Tool(await_file, effects="once", timeout_seconds=SECONDS)
fail_tool = Tool(fail)
stutter_tool = Tool(stutter)
OWN = ",".join(f"tests.tools.test_tool_server:{name}_tool" for name in ("meet", "linger", "await_file", "fail", "stutter"))


def wait(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@dataclass
class Server:
    """A server process, where it is, and what to send it."""

    process: "subprocess.Popen[str]"
    address: str
    token: str
    log: Path

    def client(self, authorization: str | None = None) -> httpx2.Client:
        """Who sends the right token, unless another header is given."""
        headers = {"Authorization": (authorization or f"Bearer {self.token}").encode()}
        where = self.address.removeprefix("unix:")
        transport = httpx2.HTTPTransport(verify=False, uds=where if where != self.address else None)
        base = "http://tools" if where != self.address else where
        return httpx2.Client(transport=transport, base_url=base, headers=headers, timeout=SECONDS, trust_env=False)

    def call(self, tool: str, **arguments: Any) -> httpx2.Response:
        with self.client() as client:
            return client.post(f"/tools/{tool}/call", json={"arguments": arguments})


@contextmanager
def serving(folder: Path, *options: str, token: str = "") -> Iterator[Server]:
    """A server; it ends by SIGTERM, with 0, and has logged no traceback."""
    if find_spec("fastapi") is None:
        missing("FastAPI")
    environment = {**os.environ, "AGENTRL_HOME": str(folder), "AGENTRL_TOOLS_TOKEN": token}
    command = [sys.executable, "-m", "agentrl.cli", "tools", "serve", *options]
    log = folder / "server.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip().rpartition(" ")[2]
            assert address, log.read_text()
            yield Server(process, address, token or process.stdout.readline().removeprefix("token ").strip(), log)
            process.terminate()
            assert process.wait(SECONDS) == 0, log.read_text()
            assert process.stdout.read() == ""
        finally:
            process.kill()
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("loopback"), "--tools", f"calculator, echo,{OWN}", "--port", "0") as made:
        yield made


@pytest.mark.slow
def test_tool_server_lists_describes_and_calls_tools(loopback: Server) -> None:
    with loopback.client() as client:
        names = [tool["name"] for tool in client.get("/tools").json()]
        told = client.get("/tools/calculator").json()
        answer = client.post("/tools/calculator/call", json={"arguments": {"expression": "6 * 7"}}).json()
    assert names == ["calculator", "echo", "meet", "linger", "await_file", "fail", "stutter"]
    assert told["parameters"]["properties"] == {"expression": {"type": "string"}}
    assert (told["effects"], told["timeout_seconds"], told["max_characters"], told["memory_mb"]) == ("none", 10, 65536, None)
    assert told["description"].startswith("Computes an arithmetic expression")
    assert (answer["result"], answer["error_class"]) == ("42", None)
    assert 0 < answer["seconds"] < SECONDS


def test_tool_server_describes_its_routes(loopback: Server) -> None:
    described = httpx2.get(f"{loopback.address}/openapi.json", trust_env=False).json()
    in_session = "/sessions/{session}/tools/{name}/call"
    paths = {"/tools", "/tools/{name}", "/tools/{name}/call", "/sessions", "/sessions/{session}", in_session}
    assert set(described["paths"]) == paths
    assert set(described["paths"]["/sessions"]["post"]["responses"]) == {"201", "401", "429"}
    assert set(described["paths"]["/sessions/{session}"]["delete"]["responses"]) >= {"204", "401", "404"}
    call = described["paths"]["/tools/{name}/call"]["post"]
    assert call["security"] == [{"HTTPBearer": []}]
    assert call["requestBody"]["content"]["application/json"]["schema"]["required"] == ["arguments"]
    assert described["paths"][in_session]["post"]["requestBody"] == call["requestBody"]
    assert {"200", "401", "404", "413", "422", "503"} <= set(call["responses"])
    assert "calculator" not in str(described)


@pytest.mark.parametrize(
    ("tool", "arguments", "error_class", "said"),
    [
        ("calculator", {"expression": "1 / 0"}, "tool_error", "division by zero"),
        ("calculator", {"expression": "9**9**9"}, "tool_error", "too large"),
        ("calculator", {}, "tool_error", "expression: Field required"),
        ("calculator", {"expression": [1]}, "tool_error", "should be a valid string"),
        ("echo", {"text": "x" * 100_000}, "bad_arguments", "longer than 65536 characters"),
        ("linger", {}, "timeout", "longer than 0.1 s"),
        ("echo", {"text": "a\0b"}, None, "a\ufffdb"),
        ("stutter", {}, None, "a?b"),
    ],
)
def test_tool_server_answers_what_model_would_read(
    loopback: Server, tool: str, arguments: dict[str, Any], error_class: str | None, said: str
) -> None:
    answer = loopback.call(tool, **arguments)
    assert answer.status_code == 200
    assert answer.json()["error_class"] == error_class
    assert said in answer.json()["result"]


def test_tool_server_answers_503_for_system_failure(loopback: Server) -> None:
    failed = loopback.call("fail")
    assert failed.status_code == 503
    assert failed.json()["detail"] == "fail cannot run now; the reason is in the server's log."
    assert "The disk is away." in loopback.log.read_text()


@pytest.mark.parametrize("authorization", [None, "Bearer", "Bearer wrong", "Bearer wr\xf6ng", "Basic eDp5", "{token}"])
def test_tool_server_refuses_everything_without_token(loopback: Server, authorization: str | None) -> None:
    with loopback.client((authorization or "x").replace("{token}", loopback.token)) as client:
        if authorization is None:
            del client.headers["Authorization"]
        answers = [
            client.get("/tools"),
            client.get("/tools/calculator"),
            client.get("/tools/unknown"),
            client.post("/tools/calculator/call", json={"arguments": {"expression": "1"}}),
            client.post("/sessions"),
            client.post("/sessions/any/tools/calculator/call", json={"arguments": {"expression": "1"}}),
            client.delete("/sessions/any"),
        ]
    assert [answer.status_code for answer in answers] == [401] * 7
    assert {answer.headers["WWW-Authenticate"] for answer in answers} == {"Bearer"}
    assert not any("calculator" in answer.text for answer in answers)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("calculato", b'{"arguments": {}}', 404, "Did you mean 'calculator'?"),
        ("%2e%2e%2fetc", b'{"arguments": {}}', 404, "No tool is called"),
        ("echo", b"", 422, "body: Invalid JSON"),
        ("echo", b'{"arguments": {"text"', 422, "body: Invalid JSON"),
        ("echo", b"[]", 422, "should be an object"),
        ("echo", b"{}", 422, "arguments: Field required"),
        ("echo", b'{"arguments": "text"}', 422, "arguments: Input should be an object"),
        ("echo", b'{"arguments": {"text": ""}, "session": 1}', 422, "session: Extra inputs"),
        ("echo", b'{"arguments": {"text": "\xff"}}', 422, "body: Invalid JSON"),
        ("echo", b'{"arguments": {"text": "\\ud800"}}', 422, "body: Invalid JSON"),
        ("echo", b'{"arguments": ' + b'{"a": ' * 50_000 + b"1" + b"}" * 50_001, 422, "recursion limit"),
        ("echo", b'{"arguments": {"text": "' + b"x" * 1_000_000 + b'"}}', 413, "more than 1000000 bytes"),
    ],
)
def test_tool_server_refuses_bad_request_in_a_sentence(
    loopback: Server, path: str, body: bytes, status: int, said: str
) -> None:
    with loopback.client() as client:
        refused = client.post(f"/tools/{path}/call", content=body)
    assert refused.status_code == status
    assert said in refused.json()["detail"]
    assert len(refused.text) < 600


def test_tool_server_limits_chunked_body(loopback: Server) -> None:
    with loopback.client() as client:
        refused = client.post("/tools/echo/call", content=(b"x" * 100_000 for _ in range(30)))
    assert refused.status_code == 413
    assert "more than 1000000 bytes" in refused.json()["detail"]


def test_tool_server_survives_disconnect_within_request(loopback: Server) -> None:
    host, _, port = loopback.address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as caller:
        head = (
            f"POST /tools/echo/call HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {loopback.token}\r\nContent-Length: 99\r\n\r\n"
        )
        caller.sendall(head.encode() + b'{"arguments"')
    assert loopback.call("echo", text="still here").json()["result"] == "still here"


def test_tool_server_runs_twenty_calls_at_once(loopback: Server) -> None:
    with ThreadPoolExecutor(PARTY) as callers:
        answers = list(callers.map(lambda _: loopback.call("meet").json()["result"], range(PARTY)))
    assert answers == ["all are there"] * PARTY


def test_tool_server_socket_is_private_and_removed(short_folder: Path) -> None:
    path = short_folder / "tools.sock"
    with serving(short_folder, "--env", "search_qa", "--socket", str(path)) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert server.address == f"unix:{path}"
        found = server.call("search", query="capital", k=1).json()
        assert found["error_class"] is None
        assert found["result"]
        with server.client("Bearer wrong") as stranger:
            assert stranger.get("/tools").status_code == 401
    assert not path.exists()


def test_tool_server_takes_socket_of_killed_server_only(short_folder: Path) -> None:
    path = short_folder / "tools.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with serving(short_folder, "--tools", "echo", "--socket", str(path)) as server:
        assert main(["tools", "serve", "--tools", "echo", "--socket", str(path)]) == 4
        assert server.call("echo", text="mine").json()["result"] == "mine"
    path.write_text("a file of somebody's")
    assert main(["tools", "serve", "--tools", "echo", "--socket", str(path)]) == 4
    assert path.read_text() == "a file of somebody's"


def test_tool_server_finishes_started_call_on_sigterm(short_folder: Path) -> None:
    options = ("--tools", "tests.tools.test_tool_server:await_file_tool", "--port", "0")
    with serving(short_folder, *options, token="of-my-own") as server, ThreadPoolExecutor(1) as caller:
        answer = caller.submit(server.call, "await_file", folder=str(short_folder))
        wait((short_folder / "begun").exists)
        server.process.send_signal(signal.SIGTERM)
        wait(lambda: refuses(server))
        (short_folder / "go").touch()
        assert answer.result().json()["result"] == "gone"
        assert server.process.wait(SECONDS) == 0


# sessions


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose `python` keeps its names; when it has ended nothing of it may be alive."""
    sandbox_fixtures.machine()
    with serving(tmp_path_factory.mktemp("coder"), "--tools", "calculator,python_session", "--port", "0") as made:
        yield made
    assert sandbox_fixtures.alive() == []


def opened(client: httpx2.Client) -> str:
    answer = client.post("/sessions")
    assert answer.status_code == 201
    name: str = answer.json()["session"]
    return name


def cell(client: httpx2.Client, session: str, code: str) -> tuple[str, str | None]:
    """What the cell came to, and its error class."""
    answer = client.post(f"/sessions/{session}/tools/python/call", json={"arguments": {"code": code}})
    assert answer.status_code == 200, answer.text
    return answer.json()["result"], answer.json()["error_class"]


def test_tool_session_keeps_its_own_names(coder: Server) -> None:
    with coder.client() as client:
        told = client.post("/sessions").json()
        assert (told["tools"], told["idle_seconds"]) == (["python"], 600)
        one, other = told["session"], opened(client)
        assert cell(client, one, "x = 6") == ("(no output)", None)
        assert cell(client, other, "x = 7") == ("(no output)", None)
        assert cell(client, one, "1 / 0")[1] == "code_error"
        assert [cell(client, session, "x")[0] for session in (one, other)] == ["6", "7"]
        arithmetic = client.post(f"/sessions/{one}/tools/calculator/call", json={"arguments": {"expression": "6 * 7"}})
        wrong = client.post(f"/sessions/{one}/tools/python/call", json={"arguments": {"program": "x"}})
        assert [client.delete(f"/sessions/{session}").status_code for session in (one, other)] == [204, 204]
    assert arithmetic.json()["result"] == "42"
    assert wrong.json()["error_class"] == "tool_error"
    assert sandbox_fixtures.alive() == []


def test_tool_session_is_required_by_tool_with_state(coder: Server) -> None:
    with coder.client() as client:
        assert [(tool["name"], tool["keeps_session"]) for tool in client.get("/tools").json()] == [
            ("calculator", False),
            ("python", True),
        ]
        refused = client.post("/tools/python/call", json={"arguments": {"code": "1"}})
    assert refused.status_code == 409
    assert "POST /sessions opens one" in refused.json()["detail"]


def test_tool_session_unknown_or_over_is_not_found(coder: Server) -> None:
    with coder.client() as client:
        closed = opened(client)
        assert client.delete(f"/sessions/{closed}").status_code == 204
        for session in (closed, "never", "x" * 5000):
            call = client.post(f"/sessions/{session}/tools/python/call", json={"arguments": {"code": "1"}})
            for answer in (call, client.delete(f"/sessions/{session}")):
                assert answer.status_code == 404
                assert answer.json()["detail"].startswith(f"No session {session[:100]!r} is open: it was closed, ")
                assert len(answer.text) < 400


def test_tool_session_ends_with_its_interpreter_alone(coder: Server) -> None:
    with coder.client() as client:
        lost, other = opened(client), opened(client)
        cell(client, other, "x = 1")
        assert cell(client, lost, "import os, signal; os.kill(os.getppid(), signal.SIGKILL); os._exit(0)")[1] == "killed"
        again = client.post(f"/sessions/{lost}/tools/python/call", json={"arguments": {"code": "1"}})
        assert again.status_code == 404
        assert "lost its interpreter" in again.json()["detail"]
        assert cell(client, other, "x") == ("1", None)
        assert client.delete(f"/sessions/{other}").status_code == 204


@pytest.mark.slow
def test_tool_server_ends_sessions_on_sigterm_after_running_cell(short_folder: Path) -> None:
    sandbox_fixtures.machine()
    left = "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(999)'])"
    with serving(short_folder, "--tools", "python_session", "--port", "0") as server, server.client() as client:
        running, idle = opened(client), opened(client)
        assert [cell(client, session, left) for session in (running, idle)] == [(f"(no output)\n{LEFT_RUNNING_TEXT}", None)] * 2
        resting = len(sandbox_fixtures.alive())
        assert resting >= 4
        with ThreadPoolExecutor(1) as caller, server.client() as other:
            answer = caller.submit(cell, other, running, "import time; time.sleep(1); 'done'")
            wait(lambda: len(sandbox_fixtures.alive()) > resting or answer.done())
            server.process.send_signal(signal.SIGTERM)
            assert answer.result() == ("'done'", None)
        assert server.process.wait(SECONDS) == 0
    assert sandbox_fixtures.alive() == []


def kept(code: str, notebook: Notebook) -> ToolResult:
    """A call of a session: a cell."""
    return run_cell(python_session, notebook, {"code": code})


@pytest.fixture
def box() -> Iterator[None]:
    """This process's sandbox, closed at the end, when nothing of it may be alive."""
    sandbox_fixtures.machine()
    yield
    put_away()


async def gone(sessions: ServedSessions) -> None:
    """Waits until none is left."""
    async with asyncio.timeout(SECONDS):
        while sessions._sessions:
            await asyncio.sleep(0.001)


def test_tool_session_runs_cells_in_order(box: None) -> None:
    async def said() -> list[str]:
        sessions = ServedSessions()
        name = sessions.open()
        cells = ["import time; time.sleep(0.3); seen = []", *(f"seen.append({n}); seen" for n in range(6))]
        told = await asyncio.gather(*(sessions.run(name, partial(kept, code)) for code in cells))
        await sessions.close(name)
        return [result.content for result in told[1:]]

    assert asyncio.run(said()) == [str(list(range(n + 1))) for n in range(6)]
    assert sandbox_fixtures.alive() == []


def test_tool_session_closed_finishes_its_cell_only(box: None) -> None:
    ran: list[str] = []

    def call(code: str, notebook: Notebook) -> str:
        ran.append(code)
        return kept(code, notebook).content

    async def closed() -> list[object]:
        sessions = ServedSessions()
        name = sessions.open()
        cells = [sessions.run(name, partial(call, code)) for code in ("40 + 2", "1")]
        return await asyncio.gather(*cells, sessions.close(name), sessions.close(name), return_exceptions=True)

    answered, waited, closing, again = asyncio.run(closed())
    assert (answered, closing, ran) == ("42", None, ["40 + 2"])
    assert isinstance(waited, NotFoundError)
    assert isinstance(again, NotFoundError)
    assert sandbox_fixtures.alive() == []


def test_tool_session_idle_is_closed_but_not_while_busy(box: None) -> None:
    async def idled() -> None:
        sessions = ServedSessions(idle_seconds=0.0)
        name = sessions.open()
        cells = ("import time; time.sleep(0.2); x = 'awake'", "x")
        told = await asyncio.gather(*(sessions.run(name, partial(kept, code)) for code in cells))
        assert told[1].content == "'awake'"
        sessions.open()
        await gone(sessions)
        with pytest.raises(NotFoundError, match="was idle for 0 s"):
            await sessions.run(name, partial(kept, "1"))

    asyncio.run(idled())
    assert sandbox_fixtures.alive() == []


def test_tool_sessions_are_limited() -> None:
    async def filled() -> None:
        sessions = ServedSessions(max_sessions=2)
        first, _ = sessions.open(), sessions.open()
        with pytest.raises(StateError, match="2 sessions are open"):
            sessions.open()
        await sessions.close(first)
        assert sessions.open() != first

    asyncio.run(filled())


def test_tool_sessions_beyond_limit_are_refused(loopback: Server) -> None:
    with loopback.client() as client:
        names = [opened(client) for _ in range(64)]
        refused = client.post("/sessions")
        assert refused.status_code == 429
        assert refused.json()["detail"].startswith("64 sessions are open, which is the limit.")
        assert {client.delete(f"/sessions/{name}").status_code for name in names} == {204}
        assert client.delete(f"/sessions/{opened(client)}").status_code == 204


def refuses(server: Server) -> bool:
    host, _, port = server.address.removeprefix("http://").partition(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionError:
        return True
    return False


@pytest.mark.parametrize(
    ("options", "token", "code", "said"),
    [
        ([], "", 2, "No tools to serve."),
        (["--env", "qa"], "", 2, "The env 'qa' has no tool."),
        (["--tools", "calculato"], "", 2, "Did you mean 'calculator'?"),
        (["--tools", "fetch"], "", 2, "The tool fetch is off"),
        (["--tools", "echo", "--host", "0.0.0.0"], "", 2, "Set AGENTRL_TOOLS_TOKEN."),
        (["--tools", "echo", "--host", "::"], "", 2, "Set AGENTRL_TOOLS_TOKEN."),
        (["--tools", "echo"], "two words", 2, "AGENTRL_TOOLS_TOKEN has characters"),
        (["--tools", "echo", "--socket", "x", "--port", "1"], "", 2, "--socket excludes --host and --port"),
        (["--tools", "echo", "--socket", "x" * 200], "", 4, "annot serve tools at"),
        (["--tools", "echo", "--host", "no.such.host.invalid"], "", 4, "annot serve tools at"),
    ],
)
def test_tool_server_refuses_before_listening(
    options: list[str],
    token: str,
    code: int,
    said: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if find_spec("fastapi") is None:
        missing("FastAPI")
    monkeypatch.setenv("AGENTRL_TOOLS_TOKEN", token)
    assert main(["tools", "serve", *options]) == code
    printed = capsys.readouterr()
    assert said in printed.err
    assert not printed.out


def test_tool_server_reports_port_in_use(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec("fastapi") is None:
        missing("FastAPI")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["tools", "serve", "--tools", "echo", "--port", str(port)]) == 4
    assert f"127.0.0.1 port {port}" in capsys.readouterr().err


def test_tool_server_for_other_hosts_needs_own_token(short_folder: Path) -> None:
    with serving(short_folder, "--tools", "echo", "--host", "0.0.0.0", "--port", "0", token="of-my-own") as server:
        server.address = server.address.replace("0.0.0.0", "127.0.0.1")
        assert server.call("echo", text="far").json()["result"] == "far"


def test_tool_server_offers_tools_of_env_and_mcp() -> None:
    if find_spec("mcp") is None:
        missing("the mcp SDK")
    server = "mcp:" + shlex.join([sys.executable, str(Path(__file__).parents[1] / "support" / "mcp_server.py"), "/nowhere"])
    tools = select_tools("math", ["calculator", "echo", server, "echo", server])
    assert {"calculator", "echo", "add"} <= set(tools)
    assert tools["add"].effects == "none"
    with pytest.raises(ConfigError, match="Two tools have the same name 'search'"):
        select_tools("search_qa", ["search"])


def test_tools_command_lists_tools_and_missing_parts(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("AGENTRL_FETCH_HOSTS", raising=False)
    assert main(["tools"]) == 0
    printed = capsys.readouterr()
    assert "calculator  expression: string" in printed.out
    assert "fetch: The tool fetch is off" in printed.err
    assert main(["tools", "--json"]) == 0
    listed = {tool["name"]: tool for tool in json.loads(capsys.readouterr().out)}
    assert listed["calculator"]["parameters"]["required"] == ["expression"]
    assert listed["calculator"]["lacks"] is None
    assert "AGENTRL_FETCH_HOSTS" in listed["fetch"]["lacks"]
    assert [listed[name]["works_in"] for name in ("search", "sql", "fetch")] == [["search_qa"], ["text_to_sql"], []]
    assert main(["tools"]) == 0
    told = capsys.readouterr()
    (row,) = (line for line in told.out.splitlines() if line.startswith("search"))
    assert row.endswith("in search_qa")
    assert "Not needed in the env search_qa, which has its own." in told.err
    assert main(["tools", "--json", "serve", "--tools", "echo"]) == 2
