"""The strategy "threads": the workers are threads of this process, over the same rows and queues."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.api.notebook_source import path_here
from agentrl.workers.agents import called_agents
from agentrl.workflow.config import AgentConfig
from agentrl.workflow.errors import ConfigError, StateError
from agentrl.workflow.plugins import find
from agentrl.workflow.settings import settings
from agentrl.workflow.store import leases
from agentrl.workflow.store.migrate import open_database
from tests.api.test_trainer import in_folder, own_environment
from tests.support.small_models import tiny_calling

OURS = ("endpoint", "control", "tools", "rollout-train", "agents", "agent", "heartbeat", "machine", "ThreadPoolExecutor")
ROWS = [{"question": f"What is {a} plus 1?", "answer": str(a + 1)} for a in range(2, 6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_calling(tmp_path_factory.mktemp("model") / "calling"))


@pytest.fixture(autouse=True)
def nothing_left(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither a variable stays, nor a thread of ours; the settings and the sockets' default are those of before."""
    monkeypatch.setenv("AGENTRL_TICK_SECONDS", "0.2")  # leases, and what waits for them, are as short
    before, threads = dict(os.environ), set(threading.enumerate())
    assert socket.getdefaulttimeout() is None
    yield
    assert socket.getdefaulttimeout() is None
    assert {name for name in {*os.environ, *before} if before.get(name) != os.environ.get(name)} <= {"PYTEST_CURRENT_TEST"}
    left = [each for each in threading.enumerate() if each not in threads and each.name.partition(" ")[0] in OURS]
    for thread in left:
        thread.join(10)
    assert not [thread.name for thread in left if thread.is_alive()]
    assert settings().root == home
    settings.cache_clear()


def ask(llm: Any, messages: Any) -> str:
    body = json.dumps({"model": llm.model, "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {llm.api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{llm.base_url}/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def low(episode: agentrl.Episode) -> float:
    """The share of its sampled ids that are below 100."""
    ids = [token for step in episode.steps for token in step.sampled_ids]
    return sum(token < 100 for token in ids) / max(1, len(ids))


def trainer(model: str, **more: Any) -> agentrl.Trainer:
    given = {"group_size": 4, "tasks_per_iteration": 4, "max_new_tokens": 8, "learning_rate": 0.003, **more}
    return agentrl.Trainer(model=model, strategy="threads", **given)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_threads_call_closure_agent_and_policy_learns(model: str, tmp_path: Path) -> None:
    called: list[tuple[int, str]] = []

    def solve(task: agentrl.AgentTask, llm: agentrl.LLM) -> str:
        called.append((os.getpid(), threading.current_thread().name))
        agentrl.emit_message("asked")
        return ask(llm, task.messages)

    made = trainer(model, store=tmp_path / "runs", env="qa", rewards=[low], n_runners=4)
    run = made.fit(agent=solve, train_dataset=ROWS, epochs=6)
    assert (run.status, len(run.curve()), len(called)) == ("done", 6, 96)
    assert {pid for pid, _ in called} == {os.getpid()}
    means = run.curve().rewards
    assert sum(means[-2:]) > sum(means[:2]) + 0.1
    assert run.last.version == 6
    with run.last.open() as opened:
        turn = opened.generate([agentrl.Message("user", "What is 2 plus 1?")]).message
    assert run.last.generate("What is 2 plus 1?") == turn  # without the env's system prompt, which agents do not get
    run.last.close()
    episode = run.episode(run.episodes(status="done").head(1)[0].id)
    assert [said.kind for said in episode.annotations] == ["message"]


class Notes(agentrl.Hook):
    """A hook that cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.heard: list[str] = []

    def on_rollout_end(self, episode: agentrl.Episode) -> dict[str, float]:
        """Adds a part."""
        with self.lock:
            self.heard.append(episode.final_answer)
        return {"noted": 0.25}

    def on_update_end(self, run: str, iteration: int, metrics: Any) -> None:
        """Notes it."""
        self.heard.append(f"update {iteration}")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_threads_run_lambdas_and_hooks_with_locks_in_turn(model: str, tmp_path: Path) -> None:
    notes, lock, seen = Notes(), threading.Lock(), []

    def short(episode: agentrl.Episode) -> float:
        with lock:
            seen.append(episode.task.reference)
        return -float(len(episode.final_answer))

    made = trainer(
        model, store=tmp_path / "runs", rewards=[short], hooks=[notes], agent=lambda task, llm: ask(llm, task.messages)
    )
    first = made.fit(ROWS, epochs=1)
    second = trainer(model, store=agentrl.InMemoryStore(), rewards=[short], agent=Broken()).fit(ROWS, epochs=1)
    assert (first.status, second.status) == ("done", "done")
    assert len(notes.heard) == 17
    assert notes.heard[-1] == "update 1"
    assert set(seen) == {row["answer"] for row in ROWS}
    parts = first.episode(first.episodes(status="done").head(1)[0].id).rewards["default"]
    assert sorted(name.partition(":")[0] for name in parts) == ["agentrl_here", "noted"]
    failed = [second.episode(row.id) for row in second.episodes(status="failed")]
    assert sorted(each.value.task.reference for each in failed) == ["4"] * 4 + ["6"] * 4
    with pytest.raises(ConfigError, match="fit waits"):
        made.fit(ROWS, wait=False)


class Broken(agentrl.Agent):
    """Raises at every second task."""

    async def rollout(self, task: agentrl.AgentTask, llm: agentrl.LLM) -> str:  # type: ignore[override]
        """Raises, or asks."""
        if int(task.input.split()[2]) % 2:
            raise KeyError("odd")
        return ask(llm, task.messages)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_threads_run_builtin_loop_with_closure_tools(model: str, tmp_path: Path) -> None:
    called: list[str] = []

    def calculator(expression: str) -> str:
        """Computes an expression."""
        called.append(expression)
        return "5"

    env = agentrl.Env(tools=(agentrl.Tool(calculator),), system_prompt="Add.", rewards={"numeric_answer": 1.0})
    made = trainer(model, store=tmp_path / "runs", max_new_tokens=24, max_steps=2, numerics="exact")
    run = made.fit(agent=env, train_dataset=ROWS, val_dataset=ROWS[:2], epochs=2, eval_every=1)
    assert called
    assert [run.status, len(list(run.groups())), len(list(run.episodes(status="done"))), len(run.curve())] == ["done", 8, 32, 2]
    system, question = agentrl.Message("system", "Add."), agentrl.Message("user", "What is 2 plus 1?")
    with run.best.open() as opened:
        like_episode = opened.generate([system, question], env.tools).message
        others = [opened.generate([system, question]).message, opened.generate([question], env.tools).message]
    assert run.best.generate(question.content) == like_episode not in others
    run.best.close()
    again = trainer(model, store=tmp_path / "again", max_new_tokens=24, max_steps=2, numerics="exact")
    other = again.fit(agent=env, train_dataset=ROWS, epochs=2)
    tokens = [
        [[step.sampled_ids for step in each.episode(row.id).value.steps] for row in each.episodes()] for each in (run, other)
    ]
    assert tokens[0] == tokens[1]
    assert run.last.ref.sha256 == other.last.ref.sha256


def test_threads_refuse_what_needs_processes(model: str, tmp_path: Path) -> None:
    made = trainer(model, store=tmp_path / "runs")

    def solve(task: agentrl.AgentTask, llm: agentrl.LLM) -> None:
        with pytest.raises(StateError, match="is training in threads of this process"):
            trainer(model, store=tmp_path / "other").fit("arithmetic", ROWS)
        ask(llm, task.messages)

    with pytest.raises(ConfigError, match="one worker process does both"):
        made.fit(ROWS, max_staleness=1)
    run = made.fit(solve, ROWS[:1], rewards={"format": 1.0}, epochs=1, tasks_per_iteration=1)
    assert [row.status for row in run.episodes()] == ["done"] * 4
    with pytest.raises(ConfigError, match=r"'solve' \(agents\) was defined in a process that has ended"):
        find("agents", "agentrl_here:solve")


def test_threads_refuse_store_used_by_other_workers(model: str, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    over = threading.Event()
    with closing(open_database(f"sqlite:///{tmp_path}/runs/agentrl.db")) as database:

        def keep() -> None:
            while not over.wait(0.5):
                leases.take_service_lease(database, "control", "elsewhere:1", 8.0)

        assert leases.take_service_lease(database, "control", "elsewhere:1", 8.0)
        keeping = threading.Thread(target=keep)
        keeping.start()
        with pytest.raises(StateError, match=r"Workers of another process .* \(agentrl down\)"):
            trainer(model, store=tmp_path / "runs").fit("arithmetic", ROWS)
        over.set()
        keeping.join()
        assert leases.take_service_lease(database, "control", "elsewhere:1", 0.0)
        run = trainer(model, store=tmp_path / "runs").fit("arithmetic", ROWS, epochs=1)
        assert run.status == "done"
        assert leases.take_service_lease(database, "control", "elsewhere:1", 1.0), "it was given back"


def test_threads_abandon_agent_that_does_not_return() -> None:
    over = threading.Event()

    async def waits(task: agentrl.AgentTask, llm: agentrl.LLM) -> None:
        await asyncio.to_thread(over.wait, 30)

    asked = AgentConfig(name=path_here(waits, "waits", settings()), timeout_seconds=0.2)
    given = (agentrl.AgentTask("t", []), agentrl.LLM("http://127.0.0.1:1/v1", "k", "m"), "e")
    report = called_agents.run(asked, *given, lambda: False)
    assert report is not None
    assert (report.error_class, report.error) == ("timeout", "it ran for more than 0.2 s (agent.timeout_seconds)")
    assert called_agents.run(asked, *given, lambda: True) is None
    over.set()
    wrong = AgentConfig(name=path_here(lambda task, llm: {"a": float("nan")}, "wrong", settings()))
    report = called_agents.run(wrong, *given, lambda: False)
    assert report is not None
    assert (report.error_class, report.error) == ("ValueError", "ValueError: a reward must be a finite number")


DEBUGGED = """
import json
import sys
import urllib.request

import agentrl

def solve(task, llm):
    body = json.dumps({"model": llm.model, "messages": task.messages}).encode()
    headers = {"Authorization": "Bearer " + llm.api_key, "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(llm.base_url + "/chat/completions", body, headers)).read()
    number = int(task.input.split()[2])
    breakpoint()
    return number + 0.5

ROWS = [{"question": "What is 7 plus 1?"}]

if __name__ == "__main__":
    options = {"group_size": 2, "tasks_per_iteration": 1, "n_runners": 1, "env": "plain"}
    run = agentrl.Trainer(model=sys.argv[1], strategy="threads", **options).fit(solve, ROWS, epochs=1)
    print([run.episode(row.id).reward for row in run.episodes()])
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_threads_stop_at_breakpoint_of_agent(model: str, short_folder: Path) -> None:
    (short_folder / "script.py").write_text(DEBUGGED)
    done = subprocess.run(
        [sys.executable, "script.py", model], cwd=short_folder, env=own_environment(short_folder), text=True, timeout=120,
        input="p 'it is %d' % number\nc\nnumber = 9\nc\n", capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "(Pdb) 'it is 7'" in done.stdout
    assert done.stdout.splitlines()[-1] in ("[7.5, 9.5]", "[9.5, 7.5]")


SAME = """
import json
import sys

import agentrl

rows = [{"question": f"What is {a} plus {b}?", "answer": str(a + b)} for a in range(4) for b in range(2)]
trainer = agentrl.Trainer(model=sys.argv[1], env="arithmetic", rewards={"format": 1.0}, strategy=sys.argv[2], store=sys.argv[2],
                          group_size=4, tasks_per_iteration=4, max_new_tokens=8, numerics="exact", learning_rate=0.001)
run = trainer.fit(rows, epochs=2)
tokens = [[step.sampled_ids for step in run.episode(row.id).value.steps] for row in run.episodes()]
print(json.dumps([run.status, run.last.version, run.last.ref.sha256, tokens]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_threads_make_same_weights_as_processes(model: str, short_folder: Path) -> None:
    (short_folder / "script.py").write_text(SAME)
    said = {how: in_folder(short_folder, "script.py", model, how).stdout.splitlines()[-1] for how in ("threads", "processes")}
    assert said["threads"] == said["processes"]
    assert json.loads(said["threads"])[:2] == ["done", 4]


ON = """
import sys

import agentrl

def solve(task, llm):
    import openai
    client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key)
    return client.chat.completions.create(model=llm.model, messages=task.messages).choices[0].message.content or ""

def long(episode):
    return float(len(episode.final_answer))

if __name__ == "__main__":
    rows = [{"question": f"What is {a} plus {b}?", "answer": str(a + b)} for a in range(4) for b in range(2)]
    if sys.argv[2:]:
        run = agentrl.Trainer.attach(sys.argv[2], strategy=sys.argv[3]).fit()
        print(run.status, len(run.curve()))
    else:
        trainer = agentrl.Trainer(model=sys.argv[1], strategy="threads", rewards=[long], group_size=2, tasks_per_iteration=4)
        trainer.fit(solve, rows, max_new_tokens=8, iterations=12, name="long")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("strategy", ["threads", "processes"])
def test_threads_pause_on_ctrl_c_and_others_continue(model: str, short_folder: Path, strategy: str) -> None:
    (short_folder / "script.py").write_text(ON)
    command = [sys.executable, "-u", "script.py", model]
    environment = own_environment(short_folder)
    with subprocess.Popen(command, cwd=short_folder, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True) as script:
        assert script.stdout is not None
        while not (line := script.stdout.readline()).startswith("iteration 2/12"):
            assert line, "it ended before"
        script.send_signal(signal.SIGINT)
        said = script.stdout.read()
    assert script.returncode
    assert "long is paused, and nothing is lost. Continue: Trainer.attach('long', strategy='threads').fit()" in said
    assert agentrl.open(short_folder / "home").run("long").status == "paused"
    assert in_folder(short_folder, "script.py", model, "long", strategy).stdout.splitlines()[-1] == "done 12"
    in_folder(short_folder, "-P", "-m", "agentrl.cli", "down")
