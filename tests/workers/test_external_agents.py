"""Agents that run elsewhere: they ask the endpoint for tasks under a lease, and end them or lose them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from agentrl.workers.agents import processes
from agentrl.workers.agents.poller import Poller, TaskClient, TaskOver
from agentrl.workers.jobs import inbox, rollout
from agentrl.workers.jobs.sampling_server import sampling_server
from agentrl.workers.requests.agent_request import resolve_agent
from agentrl.workers.serving.external_tasks import ExternalTasks, find_tasks_key
from agentrl.workflow.config import build
from agentrl.workflow.errors import ConfigError, ServiceError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.settings import Settings, settings
from agentrl.workflow.store import agent_attempts
from agentrl.workflow.store.connect import Database
from tests.support.agents_stage import Stage, group_of, now_ms, staged, wait_for, write
from tests.support.played_runs import task, value, values
from tests.support.served_endpoint import endpoint_over
from tests.workers.test_agent_rollout import ANSWER, CHAT
from tests.workers.test_agent_rollout import Policy as Script
from tests.workers.test_workers import in_memory as in_memory

pytestmark = pytest.mark.usefixtures("in_memory", "quick_looks")
KEY, REWARDS = "operators-key", "rewards-key"
EXTERNAL = {"name": "external"}
AGENT = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
assert "reference" not in task or task["reference"] is None
assert not [name for name in os.environ if name in ("AGENTRL_TASKS_KEY", "AGENTRL_REWARDS_KEY", "AGENTRL_EMIT_KEY")]
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": task["messages"]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("it said", said, "to", os.environ["OPENAI_API_KEY"])
json.dump({"text": "6*7 is 42", "rewards": {"own": 0.5}}, open(os.environ["AGENTRL_ANSWER"], "w"))
"""


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout reads the rows of its agents ten times more often."""
    for module in (inbox, rollout):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.2)


@pytest.fixture
def rare_looks(quick_looks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout learns late that an attempt has ended."""
    for module in (inbox, rollout):
        monkeypatch.setattr(module, "POLL_SECONDS", 2.0)


@dataclass
class Elsewhere:
    """A staged group of external agents, and the endpoint that hands them out."""

    stage: Stage
    url: str

    @property
    def db(self) -> Database:
        return self.stage.db

    def post(self, path: str, body: Any = None, key: str = KEY, **headers: str) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        return httpx2.post(
            f"{self.url}/v1/tasks/{path}", content=content, headers={"Authorization": f"Bearer {key}", **headers}, timeout=60
        )

    def next(self, **body: Any) -> dict[str, Any]:
        response = self.post("next", {"wait_seconds": 10, **body})
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def call(self, task: Mapping[str, Any], more: str = "") -> httpx2.Response:
        extra = [{"role": "user", "content": more}] if more else []
        body = {"model": "m", "messages": [*task["task"]["messages"], *extra]}
        headers = {"Authorization": f"Bearer {task['api_key']}"}
        return httpx2.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


@contextmanager
def elsewhere(db: Database, size: int = 1, lease: float = 60.0, agent: Mapping[str, Any] = EXTERNAL) -> Iterator[Elsewhere]:
    sampling_server.forget()
    tasks = partial(ExternalTasks, db, tasks_key=KEY, rewards_key=REWARDS, lease_seconds=lease)
    stage = Stage(db, group_of(db, size, agent), Script(ANSWER).engine, CHAT)
    with endpoint_over(db, tasks=lambda url: tasks(url)) as served, staged(stage):
        write(db, "UPDATE groups SET lease_until = :until", until=now_ms() + 3_600_000)  # the stage's own claim is over
        yield Elsewhere(stage, served.url)
    sampling_server.forget()
    processes.servers.close()


def test_poller_runs_program_for_each_task(own_database: Database, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    with elsewhere(own_database, size=2) as there:
        lines: list[str] = []
        command = [sys.executable, str(tmp_path / "agent.py")]
        with TaskClient(there.url, KEY) as client:
            Poller(client, command, "", 2, max_tasks=2, report=lines.append).poll()
        there.stage.over()
    assert lines == ["first train/0: ended"] * 2
    assert values(own_database, "SELECT status || ' ' || stop_reason FROM episodes") == ["done answered"] * 2
    assert values(own_database, "SELECT answer FROM agent_attempts") == ["6*7 is 42"] * 2
    assert set(values(own_database, "SELECT output FROM agent_attempts")) == {"it said #### 42 to [the attempt's key]\n"}
    assert values(own_database, "SELECT rewards FROM agent_attempts") == [None, None]  # without the key for rewards


def test_routes_refuse_wrong_keys_and_bodies(own_database: Database) -> None:
    with elsewhere(own_database) as there:
        task = there.next()
        attempt = task["api_key"]
        refused = {
            "no key": httpx2.post(f"{there.url}/v1/tasks/next"),
            "attempt's key": there.post("next", key=attempt),
            "attempt's key ends": there.post(f"{task['id']}/end", key=attempt),
            "rewards key": there.post("next", key=REWARDS),
            "wrong rewards key": there.post("next", **{"X-Agentrl-Rewards-Key": attempt}),
            "bytes": httpx2.post(f"{there.url}/v1/tasks/next", headers=[(b"authorization", b"Bearer \xe9\xff")]),
        }
        assert {name: answer.status_code for name, answer in refused.items()} == dict.fromkeys(refused, 401)
        in_path = httpx2.post(f"{there.url}/attempt/{KEY}/v1/tasks/next")
        assert in_path.status_code == 401
        assert httpx2.get(f"{there.url}/v1/tasks/next").status_code == 405
        bad = [
            b"[]",
            b"{",
            b'{"x": 1}',
            b'{"wait_seconds": 1e9}',
            b'{"run": 1}',
            b"[" * 100_000,
            b"\xff",
            b'{"wait_seconds": NaN}',
            b'{"run": "a\\u0000b"}',
        ]
        assert [there.post("next", body).status_code for body in bad] == [400] * len(bad)
        ends: list[Any] = [{"answer": 1}, {"error": None}, {"exit_code": 1 << 70}, {"rewards": {"a": "1"}}]
        assert [there.post(f"{task['id']}/end", end).status_code for end in ends] == [400] * len(ends)
        assert there.post("next", b" " * (1 << 20) + b"{}").status_code == 413
        others = [f"{task['id'][:-1]}!", "1/end", "../next", f"{'9' * 18}-{'a' * 22}"]
        assert [there.post(f"{other}/end").status_code for other in others] == [404, 404, 404, 409]
        assert value(there.db, "SELECT status FROM agent_attempts") == "running"


def test_rewards_need_their_own_key(own_database: Database) -> None:
    with elsewhere(own_database) as there:
        task = there.next()
        assert task["emit_key"] == ""
        assert not [name for name in task["variables"] if "EMIT" in name]
        assert there.call(task).status_code == 200
        end = {"answer": "42", "rewards": {"own": 1.0}}
        assert there.post(f"{task['id']}/end", end).json()["error"]["code"] == "rewards_refused"
        paid = {"X-Agentrl-Rewards-Key": REWARDS}
        for rewards in (1e31, {str(n): 1.0 for n in range(65)}, {"x" * 65: 1.0}):
            assert there.post(f"{task['id']}/end", {"rewards": rewards}, **paid).status_code == 400
        assert there.post(f"{task['id']}/end", end, **paid).status_code == 200
        there.stage.over()
    assert json.loads(str(value(own_database, "SELECT rewards FROM agent_attempts"))) == {"own": 1.0}


def test_client_with_rewards_key_gets_emit_key(own_database: Database) -> None:
    with elsewhere(own_database) as there:
        task = there.post("next", **{"X-Agentrl-Rewards-Key": REWARDS}).json()
        assert task["variables"]["AGENTRL_EMIT_KEY"] == task["emit_key"] != ""


def test_lost_poller_loses_its_task(own_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    with elsewhere(own_database, lease=4.0) as there:
        first = there.next()
        assert there.call(first).status_code == 200
        second = there.next()  # once the lease is over
        assert (first["attempt"], second["attempt"]) == (0, 1)
        assert there.call(first).json()["error"]["code"] == "episode_over"
        for action in ("renew", "end", "release"):
            assert there.post(f"{first['id']}/{action}").json()["error"]["code"] == "task_over"
        assert there.call(second).status_code == 200
        assert there.post(f"{second['id']}/end", {"answer": "42"}).status_code == 200
        there.stage.over()
    assert values(own_database, "SELECT status FROM agent_attempts ORDER BY id") == ["lost", "ended"]
    assert value(own_database, "SELECT stop_reason FROM episodes") == "answered"


def test_poller_that_never_returns_ends_episode(own_database: Database) -> None:
    with elsewhere(own_database, lease=0.05) as there:
        for _ in range(5):
            there.next(wait_seconds=30)
        there.stage.over()
    assert value(own_database, "SELECT status FROM episodes") == "infra_error"


def test_renewed_task_ends_at_its_time_limit(own_database: Database) -> None:
    with elsewhere(own_database, agent={**EXTERNAL, "timeout_seconds": 2.0}) as there:
        task = there.next()
        assert there.call(task).status_code == 200
        assert there.post(f"{task['id']}/renew").status_code == 200
        wait_for(lambda: there.post(f"{task['id']}/renew").status_code == 409)
        there.stage.over()
    assert value(own_database, "SELECT stop_reason FROM episodes") == "timeout"


def test_poll_says_why_its_program_was_ended(own_database: Database) -> None:
    with elsewhere(own_database, lease=3.0) as there, TaskClient(there.url, KEY) as client:
        lines: list[str] = []
        poller = Poller(client, ["sleep", "60"], "", 1, max_tasks=1, report=lines.append)
        polling = threading.Thread(target=poller.poll)
        polling.start()
        wait_for(lambda: value(there.db, "SELECT status FROM agent_attempts") == "running")
        write(there.db, "UPDATE agent_attempts SET status = 'lost', error_class = 'lost' WHERE status = 'running'")
        polling.join(60)
    assert lines == ["first train/0: the attempt reached its time limit, or was taken over after its lease expired"]


def test_released_task_is_given_out_again(own_database: Database) -> None:
    with elsewhere(own_database) as there:
        for body in ({}, {"error": "it was killed"}):
            assert there.post(f"{there.next()['id']}/release", body).status_code == 200
        assert there.next()["attempt"] == 2
    assert values(own_database, "SELECT error_class FROM agent_attempts ORDER BY id") == ["stopped", "lost", ""]


@pytest.mark.parametrize("body", [{"release": {"error": "it was killed"}}, {"end": {"answer": "42"}}], ids=["release", "end"])
@pytest.mark.usefixtures("rare_looks")
def test_key_samples_no_more_after_its_attempt_ends(own_database: Database, body: dict[str, Any]) -> None:
    with elsewhere(own_database) as there:
        task = there.next()
        assert there.call(task).status_code == 200
        ((action, content),) = body.items()
        assert there.post(f"{task['id']}/{action}", content).status_code == 200
        after = [there.call(task, f"{n}") for n in range(3)]
        assert [(answer.status_code, answer.json()["error"]["code"]) for answer in after] == [(409, "episode_over")] * 3
        if action == "release":
            again = there.next()
            assert there.call(again).status_code == 200
            assert there.post(f"{again['id']}/end", {"answer": "42"}).status_code == 200
        there.stage.over()
    assert values(own_database, "SELECT count(*) FROM steps GROUP BY attempt") == [1] * (2 if action == "release" else 1)
    assert not values(own_database, "SELECT detail FROM events WHERE kind = 'replay_mismatch'")


@pytest.mark.usefixtures("rare_looks")
def test_turn_sampled_while_its_attempt_ends_is_refused(own_database: Database) -> None:
    """The endpoint and the rollout still serve the attempt: another process has ended it."""
    with elsewhere(own_database) as there:
        task = there.next()
        assert there.call(task).status_code == 200
        agent, worker = int(task["id"].partition("-")[0]), f"external:{task['id'].partition('-')[2]}"
        assert agent_attempts.give_up_agent(there.db, agent, worker, "it was killed", "lost")
        answers = [there.call(task, f"{n}") for n in range(2)]
        assert [answer.json()["error"]["code"] for answer in answers] == ["episode_over"] * 2
        again = there.next()
        assert there.call(again).status_code == 200
        assert there.post(f"{again['id']}/end", {"answer": "42"}).status_code == 200
        there.stage.over()
    assert values(own_database, "SELECT count(*) FROM steps GROUP BY attempt") == [1, 1]
    assert values(own_database, "SELECT status FROM agent_attempts ORDER BY id") == ["lost", "ended"]


def test_next_waits_for_a_task_of_its_run(own_database: Database) -> None:
    with elsewhere(own_database) as there:
        assert there.post("next", {"run": "another", "wait_seconds": 0.2}).status_code == 204
        task = there.next(run="first")
        threading.Timer(0.5, lambda: there.post(f"{task['id']}/release")).start()
        assert there.next(run="first")["attempt"] == 1


def test_client_that_hangs_up_claims_nothing(own_database: Database) -> None:
    with elsewhere(own_database) as there:
        task = there.next()
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(
                f"{there.url}/v1/tasks/next",
                json={"wait_seconds": 60},
                headers={"Authorization": f"Bearer {KEY}"},
                timeout=0.3,
            )
        there.post(f"{task['id']}/release")
        time.sleep(1.0)
        assert there.next()["attempt"] == 1


def test_keys_do_not_reach_the_rows(own_database: Database) -> None:
    with elsewhere(own_database) as there:
        task = there.next()
        assert there.call(task).status_code == 200
        end = dict.fromkeys(("answer", "error", "output"), f"x {task['api_key']} y")
        assert there.post(f"{task['id']}/end", end).status_code == 200
        there.stage.over()
    rows = values(own_database, "SELECT answer || error || output FROM agent_attempts")
    assert task["api_key"] not in rows[0]
    assert rows[0].count("[the attempt's key]") == 3


def test_two_endpoints_claim_each_task_once(database: Database) -> None:
    """The claim on both databases, by eight threads at once."""
    from agentrl.workflow.store import agent_attempts, agent_holds
    from tests.support.played_runs import claim

    group = group_of(database, 6, EXTERNAL)
    work = claim(database, group)
    agent_holds.open_attempts(database, work.fence, [episode.id for episode in work.episodes])
    claims: list[int] = []

    def ask(name: str) -> None:
        while task := agent_attempts.claim_external(database, "", f"{name}-{len(claims)}", os.urandom(16).hex(), 60.0):
            claims.append(task.episode)

    threads = [threading.Thread(target=ask, args=(f"w{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claims) == sorted(episode.id for episode in work.episodes)
    assert not agent_attempts.some_external_waits(database, "")


def test_interrupted_poll_gives_its_task_back(own_database: Database, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, time\nopen(os.environ['MARK'], 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    mark = tmp_path / "mark"
    with elsewhere(own_database) as there:
        program = ["env", f"MARK={mark}", sys.executable, str(tmp_path / "slow.py")]
        command = [sys.executable, "-m", "agentrl.cli", "agent", "poll", "--url", there.url, "--", *program]
        environment = {**os.environ, "AGENTRL_TASKS_KEY": KEY, "AGENTRL_HOME": str(tmp_path / "home")}
        poll = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        pid = int(wait_for(lambda: mark.exists() and mark.read_text()))
        poll.send_signal(signal.SIGINT)
        out, err = poll.communicate(timeout=60)
        assert poll.returncode == 0, err
        assert "given back" in out
        assert not Path(f"/proc/{pid}").exists()
        assert there.next()["attempt"] == 1
    assert values(own_database, "SELECT error_class FROM agent_attempts ORDER BY id") == ["stopped", ""]


class Liar(BaseHTTPRequestHandler):
    """A server that is no endpoint: what it says is the server's `lie`."""

    def do_POST(self) -> None:
        status, body, headers = self.server.lie  # type: ignore[attr-defined]
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(status)
        for name, content in headers.items():
            self.send_header(name, content)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


LIES = [
    (200, b"<html>a portal</html>", {}),
    (200, b'{"id": "1"}', {}),
    (404, b"<html>no such page</html>", {}),
    (302, b"", {"Location": "http://127.0.0.1:1/"}),
    (409, b"<html>", {}),
    (401, b'{"error": {"message": "Wrong key."}}', {}),
    (200, b"x" * (9 << 20), {}),
]
TASK = {
    "id": f"1-{'a' * 22}",
    "run": "first",
    "lease_seconds": 30.0,
    "limits": {"timeout_seconds": 5.0, "memory_mb": 512, "processes": 64, "output_bytes": 1000},
    "task": {"key": "k", "messages": [], "metadata": {}, "training": True, "resources": {}},
    "api_key": "key",
    "emit_key": "",
}
FALSE_TASKS: list[dict[str, Any]] = [
    *({"lease_seconds": seconds} for seconds in (0, -5, float("nan"), 1e300)),
    *(
        {"limits": {**TASK["limits"], **wrong}}
        for wrong in ({"memory_mb": -1}, {"timeout_seconds": 1e300}, {"processes": 10**30})
    ),  # type: ignore[dict-item]
    {"id": "../../next?"},
]


def test_poll_refuses_servers_that_are_no_endpoint() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with TaskClient(f"http://127.0.0.1:{server.server_port}", KEY) as client:
        server.lie = (200, json.dumps(TASK).encode(), {})  # type: ignore[attr-defined]
        assert client.next_task("", 0)
        for lie in (*LIES, *((200, json.dumps({**TASK, **false}).encode(), {}) for false in FALSE_TASKS)):
            server.lie = lie  # type: ignore[attr-defined]
            with pytest.raises(ConfigError):
                client.next_task("", 0)
        server.lie = (503, b"<html>busy</html>", {})  # type: ignore[attr-defined]
        with pytest.raises(ServiceError):
            client.next_task("", 0)
        server.lie = (409, b'{"error": {"message": "over"}}', {})  # type: ignore[attr-defined]
        with pytest.raises(TaskOver):
            client.send("1-x", "renew", {})
        server.shutdown()
        server.server_close()
        with pytest.raises(ServiceError, match="does not answer"):
            client.next_task("", 0)


def test_missing_program_is_refused_before_a_task_is_claimed() -> None:
    with TaskClient("http://127.0.0.1:1", KEY) as client, pytest.raises(ConfigError, match="no-such-program"):
        Poller(client, ["no-such-program"], "", 1).poll()


def test_tasks_key_is_kept_in_the_data_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="AGENTRL_TASKS_KEY"):
        find_tasks_key(Settings(home=tmp_path), create=False)
    key = find_tasks_key(Settings(home=tmp_path), create=True)
    assert find_tasks_key(Settings(home=tmp_path), create=True) == key
    assert find_tasks_key(Settings(home=tmp_path), create=False) == key
    (file,) = (tmp_path / "stack").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert find_tasks_key(Settings(home=tmp_path, tasks_key="own"), create=True) == "own"
    for name in ("tasks_key", "rewards_key"):
        with pytest.raises(ConfigError, match="printable ASCII"):
            find_tasks_key(Settings(home=tmp_path, **{name: "clé"}), create=True)


def test_external_agents_take_no_sandbox_and_no_reference() -> None:
    for option in ({"sandbox": True}, {"network": "all"}, {"unsafe": True}, {"show_reference": True}):
        with pytest.raises(ConfigError, match="external agents"):
            build({"agent.name": "external", **{f"agent.{name}": given for name, given in option.items()}})


def test_waiting_run_says_what_it_waits_for(own_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.workers.jobs.pending_agents.RESEND_SECONDS", 0.1)
    with elsewhere(own_database) as there:
        wait_for(lambda: "agentrl agent poll" in str(value(there.db, "SELECT max(detail) FROM events WHERE kind = 'waiting'")))
        write(there.db, "DELETE FROM events WHERE kind = 'waiting'")


def test_run_without_rewards_needs_the_rewards_key(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build({"agent.name": "external"}).model_dump(mode="json")
    with pytest.raises(ConfigError, match="AGENTRL_REWARDS_KEY"):
        resolve_agent(Experiment.load(config), [task(1)])
    monkeypatch.setenv("AGENTRL_REWARDS_KEY", REWARDS)
    settings.cache_clear()
    agent = resolve_agent(Experiment.load(config), [task(1)]).agent
    assert agent is not None
    assert agent.own_rewards
    settings.cache_clear()
