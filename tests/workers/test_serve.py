"""`agentrl serve` as a process, with a real model: any client calls it, what was said is in the rows, and nothing runs on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from openai import OpenAI
from sqlalchemy import text

from agentrl.workers.requests.eval_config import in_one_iteration
from agentrl.workflow.config import build
from agentrl.workflow.store.migrate import open_database
from tests.support.dialect_clients import CALCULATOR, CLIENTS, COMPLETIONS, MESSAGES, DialectClient
from tests.support.model_server import kept_port
from tests.support.model_server import served as served_model
from tests.workers.test_constraints import SUM, required, schema_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs_of_module")]

QUESTION: Any = [{"role": "user", "content": "What is 15 minus 8?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}]


class Served:
    """A served policy: its URL, its process, and its rows."""

    def __init__(self, process: "subprocess.Popen[str]", first: str, home: Path) -> None:
        self.process, self.first, self.home = process, first, home
        self.url = next(word for word in first.replace(",", " ").split() if word.startswith("http")).removesuffix("/v1")

    def post(self, path: str = "/v1/chat/completions", body: Any = None, **headers: str) -> httpx2.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        asked = {"messages": QUESTION} if body is None else body
        return httpx2.post(f"{self.url}{path}", content=json.dumps(asked), headers=named, timeout=60)

    def ask(self, **sampling: Any) -> str:
        """What is said, with the tokens."""
        made = self.post(body={"messages": QUESTION, "return_token_ids": True, "max_tokens": 12, **sampling}).json()
        return str(made["choices"][0]["token_ids"])

    def rows(self, query: str) -> Sequence[Any]:
        with closing(open_database(f"sqlite:///{self.home}/agentrl.db")) as database, database.read() as tx:
            return [tuple(row) for row in tx.execute(text(query))]

    def end(self, number: int = signal.SIGTERM) -> str:
        """Ends it; returns the rest of what it said."""
        self.process.send_signal(number)
        return self.process.communicate(timeout=60)[0]


@contextmanager
def serving(model: Path, home: Path, *words: str, **environment: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "agentrl.cli", "serve", "--policy", str(model), "--port", "0", *words]
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("AGENTRL_DATABASE_URL", "AGENTRL_BROKER_URL")
    }
    environment = {**inherited, "AGENTRL_HOME": str(home), "AGENTRL_THREADS": "1", **environment}
    log = home.parent / f"{home.name}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert process.stdout is not None
        first = process.stdout.readline()
        try:
            assert first, log.read_text()
            yield Served(process, first, home)
        finally:
            process.kill()
            process.wait(20)
            process.stdout.close()


@pytest.fixture(scope="module")
def served(world_model: Path, module_folder: Path) -> Iterator[Served]:
    """One that all tests of this file may call."""
    with serving(world_model, module_folder / "shared") as made:
        yield made


def agentrl(served: Served, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "AGENTRL_HOME": str(served.home)}
    command = [sys.executable, "-m", "agentrl.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)


def until(true: Any) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_serve_needs_no_key_model_or_content_type(served: Served) -> None:
    said = subprocess.run(
        ["curl", "-sS", f"{served.url}/v1/chat/completions", "-d", json.dumps({"messages": QUESTION})],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(said.stdout)
    assert found["choices"][0]["message"]["role"] == "assistant"
    assert found["model"].startswith("serve-")


def test_serve_streams_and_calls_tools_of_openai_client(served: Served) -> None:
    with OpenAI(base_url=f"{served.url}/v1", api_key="sk-x", default_headers={"X-Agentrl-Episode": "sdk"}) as client:
        assert [model.id for model in client.models.list()] == ["serve-1"]
        asked: Any = {"model": "any", "messages": QUESTION, "tools": TOOLS, "seed": 1, "max_tokens": 20}
        whole = client.chat.completions.create(**asked)
        with client.chat.completions.create(**asked, stream=True) as stream:
            pieces = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    assert "".join(piece.content or "" for piece in pieces) == (whole.choices[0].message.content or "")
    query = "SELECT e.steps, t.key FROM episodes e JOIN tasks t ON t.id = e.task_id WHERE t.key = 'sdk'"
    assert served.rows(query) == [(2, "sdk")]


def test_serve_client_sampling_choice_is_verified(served: Served) -> None:
    assert served.ask(temperature=2.0, seed=7) == served.ask(temperature=2.0, seed=7)
    assert len({served.ask(temperature=2.0) for _ in range(6)}) > 1
    assert len({served.ask(temperature=cold) for cold in (0, 0, 1e-320, 1e-45, 1e-4)}) == 1
    episode = served.post("/v1/episode/end", {"rewards": {"liked": 0.5}}).json()["episode"]
    assert served.rows(f"SELECT status, stop_reason, reward FROM episodes WHERE id = {episode}")[0][0] == "done"
    verified = agentrl(served, "replay", str(episode), "--verify", "all", "--json")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    report = json.loads(verified.stdout)["tokens"]
    assert (report["same"], sum(step["mismatches"] + step["ties"] for step in report["steps"])) == (True, 0)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.path[4:])
def test_serve_verifies_draws_within_grammars(served: Served, client: DialectClient) -> None:
    key = f"constrained-{client.path}"
    client.ask(served.url, key, [client.user("a")], max_tokens=24, **schema_of(client))
    client.ask(served.url, key, [client.user("b")], tools=[SUM, CALCULATOR], max_tokens=24, **required(client))
    client.ask(served.url, key, [client.user("c")], max_tokens=6, **({} if client is MESSAGES else {"top_p": 0.7}))
    episode = served.post("/v1/episode/end", {}, authorization=f"Bearer {key}").json()["episode"]
    verified = agentrl(served, "replay", str(episode), "--verify", "tokens", "--json")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    report = json.loads(verified.stdout)["tokens"]
    assert (report["same"], report["unverified"]) == (True, [])
    assert [step["mismatches"] + step["ties"] for step in report["steps"]] == [0, 0, 0]
    assert report["limited"] == sum(step["same"] for step in report["steps"][:2]) > 0


@pytest.mark.parametrize("client", [*CLIENTS, COMPLETIONS], ids=lambda client: client.path[4:])
def test_serve_verifies_episode_of_each_dialect(served: Served, client: DialectClient) -> None:
    key, history = f"sk-{client.path}", [client.user("What is 15 minus 8?")]
    for question in ("and 6 minus 2?", "and 3 plus 4?"):
        turn = client.ask(served.url, key, history, tools=[CALCULATOR], max_tokens=12)
        results = client.results(turn.calls, ["7"] * len(turn.calls)) if turn.calls else [client.user(question)]
        history += [*turn.items, *results]
        client.ask(served.url, key, history, True, tools=[CALCULATOR], max_tokens=12)
    episode = served.post("/v1/episode/end", {}, authorization=f"Bearer {key}").json()["episode"]
    assert served.rows(f"SELECT status, steps FROM episodes WHERE id = {episode}") == [("done", 4)]
    verified = agentrl(served, "replay", str(episode), "--verify", "all", "--json")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    report = json.loads(verified.stdout)["tokens"]
    assert (report["same"], report["prompts"], report["prompt"]) == (True, 4, None)
    assert agentrl(served, "replay", str(episode)).returncode == 0


def test_serve_refuses_in_openai_shape(served: Served) -> None:
    refused = {
        json.dumps({"messages": QUESTION, "temperature": 3}): (400, "temperature"),
        json.dumps({"messages": []}): (400, "messages"),
        json.dumps({"messages": [{"role": "user", "content": "x " * 100_000}]}): (400, "messages"),
        "{": (400, None),
    }
    for body, (status, param) in refused.items():
        answer = httpx2.post(f"{served.url}/v1/chat/completions", content=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert served.post("/v1/nothing").status_code == 404
    assert httpx2.get(f"{served.url}/v1/models", headers={"Origin": "http://attacker.example.org"}).status_code == 403


def test_prompts_of_clients_become_tasks_of_a_run(world_model: Path, tmp_path: Path) -> None:
    with serving(world_model, tmp_path / "home") as made:
        system = {"role": "system", "content": "Be brief."}
        talk = [system, {"role": "user", "content": "What is 2 plus 3?"}]
        told = made.post(body={"messages": talk, "max_tokens": 8}).json()["choices"][0]["message"]
        assert (
            made.post(body={"messages": [*talk, told, *QUESTION], "max_tokens": 8}).status_code == 200
        )  # goes on, is no prompt
        for _ in range(2):
            made.post(body={"messages": [system, *QUESTION], "max_tokens": 8}, X_Agentrl_Episode="another")
        history = [*QUESTION, {"role": "assistant", "content": "7"}, {"role": "user", "content": "Sure?"}]
        made.post(body={"messages": history, "max_tokens": 8}, X_Agentrl_Episode="history")
        made.end()
        words = ["submit", "--from-episodes", "serve-1", "--group-size", "2", "--epochs", "1", "--tasks-per-iteration", "2"]
        no_reward = agentrl(made, *words)
        assert (no_reward.returncode, "have no reference answers" in no_reward.stderr) == (2, True)
        done = agentrl(made, *words, "-s", "hooks=[tests.support.parity_hook:Lucky]", "--name", "again", "--detach")
        assert done.returncode == 0, done.stderr
        tasks = made.rows("SELECT t.messages FROM tasks t JOIN run_tasks r ON r.task_id = t.id ORDER BY t.id")
        asked = [[(message["role"], message["content"]) for message in json.loads(task[0])] for task in tasks]
        assert asked == [
            [("system", "Be brief."), ("user", "What is 2 plus 3?")],
            [("system", "Be brief."), ("user", QUESTION[0]["content"])],
        ]
        assert "step 0: it does not begin with messages" in done.stdout + done.stderr
        with closing(open_database(f"sqlite:///{made.home}/agentrl.db")) as database:
            measured = in_one_iteration(database, build({"dataset.name": "episodes:serve-1"}))
        assert measured.rollout.tasks_per_iteration == 2
        refused = agentrl(made, *words, "--dataset", "gsm8k")
        assert (refused.returncode, "exclude each other" in refused.stderr) == (2, True)
        assert agentrl(made, "submit", "--dataset", "episodes:nothing").returncode == 5


def test_serve_upstream_records_tokens_and_no_secret(world_model: Path, tmp_path: Path) -> None:
    key = "upstream-secret-0123456789"
    with kept_port() as port, served_model(world_model, port) as (routes, _):
        routes.key, url = key, f"http://127.0.0.1:{port}"
        with serving(world_model, tmp_path / "home", "--upstream", url, AGENTRL_ENGINE_KEY=key) as made:
            headers = {"authorization": "Bearer the-clients-own", "x-secret": "the-clients-own"}
            said = made.post(body={"messages": QUESTION, "max_tokens": 6, "return_token_ids": True}, **headers).json()
            sampled = routes.sampled[-1]
            assert tuple(said["choices"][0]["token_ids"]) == sampled.ids
            assert made.rows("SELECT sampled_tokens, delivered FROM steps") == [(len(sampled.ids), 1)]
            turn = {"model": routes.name, "choices": [{"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}}]}
            lies: list[Any] = [(200, "<html>a portal</html>"), (302, "http://127.0.0.1:1/"), (500, f"bad key {key}")]
            lies += [(200, [key]), (200, {**turn, "model": key}), (200, {**turn, "model": "x" * 100_000})]
            lies += [
                (200, {**turn, "choices": [{**turn["choices"][0], "finish_reason": reason}]}) for reason in (key, "x" * 100_000)
            ]
            for number, lie in enumerate(lies):
                routes.instead["/v1/completions"] = lie
                answer = made.post(X_Agentrl_Episode=f"lie-{number}")
                assert answer.status_code == 502
                assert key not in answer.text
            del routes.instead["/v1/completions"]
            assert made.post(X_Agentrl_Episode="truth").status_code == 200
            assert made.rows("SELECT count(*) FROM episodes WHERE finished_at IS NOT NULL OR error <> ''") == [(0,)]
            made.end()
        stored = (tmp_path / "home" / "agentrl.db").read_bytes() + (tmp_path / "home.log").read_bytes()
        assert b"[the key]" in stored
        assert key.encode() not in stored
        assert b"the-clients-own" not in stored + json.dumps(routes.bodies).encode()


NAN = float("nan")
BAD_STATUSES: dict[str, tuple[tuple[int, Any], str]] = {
    "page": ((200, "<html>a portal</html>" * 100), "not an object"),
    "error": ((500, "<html>out of order</html>" * 100), "failed: 500"),
    "key": ((401, "who are you?"), "refuses the API key (401)"),
    "redirect": ((302, "elsewhere"), "refused /v1/completions: 302"),
}
BAD_RESPONSES: dict[str, tuple[tuple[int, Any], str]] = {
    **BAD_STATUSES,
    "no_choice": ((200, {"model": "MODEL", "choices": []}), "cannot read: choices"),
    "model": ((200, {"model": "another", "choices": [{"token_ids": [7]}]}), "'another' answered"),
    "token": (
        (200, {"model": "MODEL", "choices": [{"token_ids": [999999], "finish_reason": "stop"}]}),
        "the token 999999, but",
    ),
    "no_token": ((200, {"model": "MODEL", "choices": [{"finish_reason": "stop"}]}), "does not return token ids"),
    "positive": (
        (
            200,
            {"model": "MODEL", "choices": [{"token_ids": [7], "logprobs": {"token_logprobs": [1.5]}, "finish_reason": "stop"}]},
        ),
        "the logprob 1.5",
    ),
    "nan": (
        (
            200,
            {"model": "MODEL", "choices": [{"token_ids": [7], "logprobs": {"token_logprobs": [NAN]}, "finish_reason": "stop"}]},
        ),
        "not finite",
    ),
}


@pytest.fixture(scope="module")
def upstream(world_model: Path, module_folder: Path) -> Iterator[tuple[Any, Served, str]]:
    """The upstream's routes, a server that serves with this upstream, and the upstream's URL."""
    with served_model(world_model) as (routes, url), serving(world_model, module_folder / "up", "--upstream", url) as made:
        yield routes, made, url


@pytest.mark.parametrize(
    ("path", "kind"),
    [*(("/v1/completions", kind) for kind in BAD_RESPONSES), *(("/v1/models", kind) for kind in [*BAD_STATUSES, "model"])],
)
def test_serve_client_gets_error_of_bad_upstream(upstream: tuple[Any, Served, str], path: str, kind: str) -> None:
    routes, made, _ = upstream
    (status, response), reason = BAD_RESPONSES[kind]
    model = routes.name
    bad = (
        {**response, "model": model if response["model"] == "MODEL" else "another"} if isinstance(response, dict) else response
    )
    if path == "/v1/models":
        if isinstance(bad, dict):
            bad, reason = {"data": [{"id": "another"}]}, ""
        routes.instead["/v1/completions"] = (503, "")  # the upstream is greeted again after it was not ready
        reason = reason.replace("/v1/completions", path)
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(f"{made.url}/v1/chat/completions", content=json.dumps({"messages": QUESTION}), timeout=0.5)
        del routes.instead["/v1/completions"]
    routes.instead[path] = (status, bad)
    log = made.home.parent / f"{made.home.name}.log"
    try:
        answer = made.post()
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], reason in error["message"]) == (502, "upstream_failed", True), error
        assert len(error["message"]) <= 500
        assert "http://" not in error["message"]
        for client in CLIENTS:
            body = {"messages": QUESTION, "input": "Hello", "stream": True, "model": "any", "max_tokens": 8}
            body = {name: value for name, value in body.items() if name in client_fields(client)}
            stream = made.post(client.path, body)  # httpx2 raises if the stream is cut off
            assert (stream.status_code, reason in stream.text, "error" in stream.text) == (200, True, True), stream.text
    finally:
        del routes.instead[path]
    assert made.post().status_code == 200
    assert made.rows("SELECT count(*) FROM episodes WHERE finished_at IS NOT NULL OR error <> ''") == [(0,)]
    assert "Traceback" not in log.read_text()


def test_serve_client_gets_400_of_upstream(upstream: tuple[Any, Served, str]) -> None:
    routes, made, url = upstream
    reason = "The prompt is too long for {}. Use fewer than https://example.com/limits says."
    routes.instead["/v1/completions"] = (400, {"error": {"message": reason.format(urlsplit(url).netloc)}})
    try:
        answer = made.post()
    finally:
        del routes.instead["/v1/completions"]
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "upstream_refused")
    assert error["message"].startswith("The server refused /v1/completions: 400 ")
    assert reason.format("[the server]") in error["message"]
    assert made.post().status_code == 200


def client_fields(client: DialectClient) -> set[str]:
    names = {"stream", "model", "input"} if client.path == "/v1/responses" else {"stream", "model", "messages"}
    return names | ({"max_tokens"} if client is MESSAGES else set())


@pytest.mark.parametrize("kind", ["gone", "page"])
def test_serve_says_that_upstream_does_not_answer(world_model: Path, tmp_path: Path, kind: str) -> None:
    with kept_port() as port, served_model(world_model, port if kind == "page" else 0) as (routes, _):
        routes.instead["/v1/models"] = (502, "<html>Bad gateway</html>" * 100)
        wait = {"AGENTRL_ENDPOINT_WAIT_SECONDS": "3"}
        with serving(world_model, tmp_path / "home", "--upstream", f"http://127.0.0.1:{port}", **wait) as made:
            answer = made.post()
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "no_holder")
            reason = "This episode could not be served for 3 s; the reason is in the server's log. Send the call again."
            assert error["message"] == reason
            made.end()
    log = (tmp_path / "home.log").read_text()
    lines = [line for line in log.splitlines() if "engine's server" in line]
    assert 1 <= len(lines) <= 3, log
    assert all(("is not ready: 502" if kind == "page" else "does not answer") in line for line in lines)
    assert log.count("Bad gateway") <= 10 * len(lines)
    assert "AGENTRL_ENGINE_URL" not in log
    assert ("correct --upstream" in log) == (kind == "gone")


def test_serve_records_upstream_that_returns_only_text(world_model: Path, tmp_path: Path) -> None:
    with kept_port() as port, served_model(world_model, port) as (routes, _):
        said = {"choices": [{"text": "It is 7.", "finish_reason": "stop", "index": 0}], "model": "any", "usage": {}}
        routes.instead["/v1/completions"] = (200, said)
        words = ("--upstream", f"http://127.0.0.1:{port}", "--engine", "openai_text")
        with serving(world_model, tmp_path / "home", *words) as made:
            for number in (1, 2):
                answer = made.post(body={"messages": QUESTION})
                assert answer.headers["x-agentrl-recorded"] == "text"
                assert answer.json()["choices"][0]["message"]["content"] == "It is 7."
                assert answer.json()["usage"]["completion_tokens"] > 1
                assert made.rows("SELECT count(*) FROM steps") == [(number,)]
            for field in ("logprobs", "return_token_ids"):
                refused = made.post(body={"messages": QUESTION, field: True})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
            for lie in (said | {"choices": []}, {"choices": [{"text": 7}]}, {"choices": [{"text": "x", "finish_reason": "y"}]}):
                routes.instead["/v1/completions"] = (200, lie)
                assert made.post(X_Agentrl_Episode=str(lie)[:60]).status_code >= 400
            text = made.rows("SELECT text FROM steps LIMIT 1")[0][0]
            assert text.startswith("It is 7.")
            assert {json.loads(asked)["recorded"] for (asked,) in made.rows("SELECT asked FROM steps")} == {"text"}
            episode = made.post("/v1/episode/end", {}).json()["episode"]
            made.end()
        done = agentrl(made, "replay", str(episode))
        assert done.returncode == 0, done.stderr
        assert "It is 7." in done.stdout
        verified = agentrl(made, "replay", str(episode), "--verify", "tokens")
        assert verified.returncode != 0
        assert "another system sampled it" in verified.stderr


@pytest.mark.parametrize(
    "words", [["--upstream", "http://u:secret@h"], ["--upstream", "ftp://h"], ["--upstream", "http://h?key=secret"]]
)
def test_serve_refuses_upstream_with_secret_in_url(words: Sequence[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentrl.cli", "serve", "--policy", "tiny", *words]
    environment = {**os.environ, "AGENTRL_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 2
    assert "secret" not in done.stderr


def test_serve_ends_episode_by_silence_and_all_at_exit(world_model: Path, tmp_path: Path) -> None:
    with serving(world_model, tmp_path / "home", "--idle-seconds", "0.5") as made:
        made.post(x_agentrl_episode="quick")
        until(lambda: made.rows("SELECT status FROM episodes") == [("done",)])
        made.post(x_agentrl_episode="last")
        assert made.end().splitlines()[-1] == "serve-1: 2 episodes, 2 requests"
        assert made.process.returncode == 0
        assert made.rows("SELECT status FROM episodes ORDER BY id") == [("done",), ("done",)]
        assert made.rows("SELECT kind, status FROM runs") == [("serve", "done")]


def test_serve_without_record_keeps_nothing(world_model: Path, tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    before = set(shared.glob("agentrl-serve-*"))
    with serving(world_model, tmp_path / "home", "--no-record") as made:
        assert made.post().status_code == 200
        assert "nothing is recorded" in made.first
        made.end()
    assert set(shared.glob("agentrl-serve-*")) == before
    assert not (tmp_path / "home" / "agentrl.db").exists()


def test_serve_ends_run_of_killed_server_and_obeys_cancel(world_model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with serving(world_model, home, AGENTRL_LEASE_SECONDS="2") as made:
        made.post()
        made.end(signal.SIGKILL)
    with serving(world_model, home, AGENTRL_LEASE_SECONDS="2", AGENTRL_SERVE_KEY="sesame") as made:
        until(lambda: made.rows("SELECT status, steps FROM episodes") == [("infra_error", 1)])  # once its lease is over
        assert made.post().status_code == 401
        assert made.post(authorization="Bearer sesame").status_code == 200
        assert agentrl(made, "cancel", "serve-2").returncode == 0
        assert made.process.wait(30) == 0
        assert made.rows("SELECT name, status FROM runs ORDER BY id") == [("serve-1", "done"), ("serve-2", "cancelled")]


@pytest.mark.parametrize("key", ["sesame\n", "open sesame", "sésame"])
def test_serve_refuses_key_that_no_header_can_carry(key: str, tmp_path: Path) -> None:
    environment = {**os.environ, "AGENTRL_HOME": str(tmp_path), "AGENTRL_SERVE_KEY": key}
    command = [sys.executable, "-m", "agentrl.cli", "serve", "--policy", "tiny", "--port", "0"]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert found.returncode not in (0, 1)
    assert "AGENTRL_SERVE_KEY must be printable ASCII" in found.stderr
    assert key not in found.stderr


@pytest.mark.parametrize(
    ("origins", "key", "said"), [("https://a.org", "", "requires a key"), ("*", "sesame", "'*' is not an")]
)
def test_serve_refuses_origins_that_it_cannot_serve(origins: str, key: str, said: str, tmp_path: Path) -> None:
    environment = {**os.environ, "AGENTRL_HOME": str(tmp_path), "AGENTRL_SERVE_ORIGINS": origins, "AGENTRL_SERVE_KEY": key}
    command = [sys.executable, "-m", "agentrl.cli", "serve", "--policy", "tiny", "--port", "0"]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert found.returncode == 2
    assert said in found.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--policy", "tiny", "--port", "0"), "The tiny model for 'arithmetic' does not exist yet"),
        (("--policy", "nobody"), "There is no run or model folder 'nobody'"),
        (("--policy", "tiny", "--host", "0.0.0.0", "--port", "0"), "without a key"),
        (("--policy", "tiny", "--no-record", "--keep-days", "3"), "--no-record excludes"),
        (("--policy", "tiny", "--keep-days", "nan"), "36500"),
        (("--policy", "tiny", "--keep-days", "1e9"), "36500"),
        (("--policy", "tiny", "--host", "203.0.113.1", "--port", "0"), "annot listen"),
    ],
)
def test_serve_refuses_before_loading_model(words: Sequence[str], said: str, tmp_path: Path) -> None:
    environment = {**os.environ, "AGENTRL_HOME": str(tmp_path), "AGENTRL_DATABASE_URL": ""}
    command = [sys.executable, "-m", "agentrl.cli", "serve", *words]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert found.returncode not in (0, 1)
    assert said in found.stderr
    assert not (tmp_path / "agentrl.db").exists()
