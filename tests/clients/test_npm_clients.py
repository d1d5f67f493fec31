"""Clients of npm (`make clients`), unmodified, against the endpoint: they run commands and tools; every call is in the rows."""

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import text
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.workflow.store.connect import Database
from agentrl.workflow.trajectory import Message, ToolCall
from tests.clients.scripted import ids_of
from tests.project.documents import DOCS
from tests.support.agents_stage import Stage, episode_of, group_of, run_agent, staged, wait_for, write
from tests.support.played_runs import values
from tests.support.real_stack import embedded_stack
from tests.support.scripted_engine import ScriptedEngine
from tests.support.served_endpoint import endpoint_over
from tests.support.small_models import tiny_random
from tests.workers.test_agent_endpoint import held
from tests.workers.test_agent_rollout import CHAT, Gated, Policy
from tests.workers.test_agent_rollout import db as db
from tests.workers.test_workers import in_memory as in_memory

pytestmark = pytest.mark.slow
COMMAND = "echo 42 > result.txt; cat result.txt"
ROOM = 400_000
"""The window in tokens: the tiny tokenizer needs one for nearly every letter of their long instructions."""


def find_program(name: str) -> str:
    """The path of the client; without it, the test is skipped: no test installs a program of several hundred megabytes."""
    if (program := shutil.which(name)) is None:
        pytest.skip(f"{name} is not on the PATH: make clients")
    return program


def start_client(command: Sequence[str], folder: Path, **environment: str) -> "subprocess.Popen[str]":
    """The client, in a home, a folder and a process group of its own."""
    program = find_program(command[0])
    (folder / "work").mkdir(parents=True)
    clean = {"PATH": os.environ["PATH"], "HOME": str(folder), "CODEX_HOME": str(folder), "IS_SANDBOX": "1"}
    return subprocess.Popen(
        [program, *command[1:]],
        cwd=folder / "work",
        env=clean | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def turn_of(call: ToolCall) -> Sequence[int]:
    return CHAT.turn(Message("assistant", "I run it.", tool_calls=(call,)))


def script(call: ToolCall) -> Policy:
    return Policy(turn_of(call), CHAT.turn(Message("assistant", "It is done.")))


def check_rows(db: Database) -> None:
    """Two calls that are one chain, with the output of the command between them."""
    first, second = episode_of(db, 1).steps
    assert (first.delivered, second.delivered) == (True, True)
    assert (first.chain, second.chain, second.parent, second.shared, second.new_row) == (0, 0, 0, None, None)
    assert first.results is not None
    assert "42" in first.results[0].content
    assert second.message.content == "It is done."
    current = "JOIN episodes e ON e.id = c.episode_id AND e.attempt = c.attempt"
    assert values(db, f"SELECT c.status FROM tool_calls c {current}") == ["done"]


def run_coding_agent(name: str, url: str, key: str, folder: Path) -> str:
    """What the agent printed, which was told to run a command."""
    with start_coding_agent(name, url, key, folder) as process:
        printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed
    assert (folder / "work" / "result.txt").read_text() == "42\n"
    return printed


def start_coding_agent(name: str, url: str, key: str, folder: Path) -> "subprocess.Popen[str]":
    """The agent, which was told to run a command."""
    if name == "codex":
        provider = f'{{name="agentrl", base_url="{url}/v1", env_key="OPENAI_API_KEY", wire_api="responses"}}'
        options = ["-c", f"model_providers.agentrl={provider}", "-c", 'model_provider="agentrl"', "-m", "any"]
        words = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *options, "Run it."]
        return start_client(words, folder, OPENAI_API_KEY=key)
    if name == "opencode":
        options = {"baseURL": f"{url}/v1", "apiKey": key}
        provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"any": {}}}
        words = ["opencode", "run", "--auto", "--title", "any", "-m", "agentrl/any", "Run it."]
        return start_client(words, folder, OPENCODE_CONFIG_CONTENT=json.dumps({"provider": {"agentrl": provider}}))
    if name == "qwen":
        words = ["qwen", "--yolo", "--auth-type", "openai", "-m", "any", "Run it."]
        return start_client(words, folder, OPENAI_BASE_URL=f"{url}/v1", OPENAI_API_KEY=key)
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    words = ["claude", "-p", "Run it.", "--model", "any", "--allowedTools", "Bash"]
    return start_client(words, folder, ANTHROPIC_BASE_URL=url, ANTHROPIC_API_KEY=key, **quiet)


CALLS = {
    "codex": ToolCall("exec_command", {"cmd": COMMAND}),
    "claude": ToolCall("Bash", {"command": COMMAND, "description": "Writes a file"}),
    "opencode": ToolCall("bash", {"command": COMMAND, "description": "Writes a file"}),
    "qwen": ToolCall("run_shell_command", {"command": COMMAND, "is_background": False}),
}
coding_agents = pytest.mark.parametrize("name", CALLS)
trained_agents = pytest.mark.parametrize("name", ["codex", "claude", "opencode"])
"""Without qwen-code, which asks again and again if a turn of random weights is empty or cut."""


@coding_agents
def test_coding_agent_runs_command_and_continues_chain(db: Database, tmp_path: Path, name: str) -> None:
    with staged(Stage(db, group_of(db), script(CALLS[name]).engine, CHAT, ROOM)) as stage, endpoint_over(db) as served:
        held(stage)
        assert "It is done." in run_coding_agent(name, served.url, run_agent(db, 1), tmp_path)
        check_rows(db)


@coding_agents
def test_coding_agent_does_not_notice_lost_worker(db: Database, tmp_path: Path, name: str) -> None:
    find_program(name)
    group, gated = group_of(db), Gated(turn_of(CALLS[name]))
    stage = Stage(db, group, gated.engine, CHAT, ROOM).enter()
    held(stage)
    with endpoint_over(db) as served, ThreadPoolExecutor(1) as pool:
        said = pool.submit(run_coding_agent, name, served.url, run_agent(db, 1), tmp_path)
        assert gated.begun.acquire(timeout=120)
        gated.let.release(4)
        wait_for(lambda: len(stage.driver._conversations[1].open[0]._heard[0]) >= 4)
        write(db, "UPDATE groups SET lease_until = 0")
        stage.leave()
        gated.let.release(1000)
        with staged(Stage(db, group, script(CALLS[name]).engine, CHAT, ROOM)) as heir:
            held(heir)
            assert "It is done." in said.result(240)
            check_rows(db)


def test_vercel_sdk_calls_tools_in_each_api(db: Database) -> None:
    node, packages = find_program("node"), DOCS.parent / "build" / "clients"
    if not (packages / "node_modules" / "ai").exists():
        pytest.skip("the packages of npm are missing: make clients")
    file = shutil.copy(Path(__file__).with_name("vercel.mjs"), packages)
    engine = ScriptedEngine(lambda request: ids_of(CHAT, request))
    with staged(Stage(db, group_of(db), engine, CHAT, ROOM)) as stage, endpoint_over(db) as served:
        held(stage)
        words = [node, str(file), f"{served.url}/v1", run_agent(db, 1)]
        said = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()
        steps = episode_of(db, 1).steps
    each = ("2 漢字 🙂 It is 7.", "2 漢字 🙂 It is 7.", "7", "7")
    assert said == [f"{name} {value}" for name in ("responses", "chat", "messages", "compatible") for value in each]
    assert [step.chain for step in steps] == [first + more for first in range(0, 16, 4) for more in (0, 0, 1, 1, 2, 3)]


def varied(episode: Any) -> float:
    """A reward that differs between the episodes of a group, because their tokens do."""
    return hashlib.sha256(repr([step.sampled_ids for step in episode.steps]).encode()).digest()[0] / 256


def make_tiny(folder: Path) -> Path:
    file = tiny_random(folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": ROOM}))
    return folder


def make_two_layers(folder: Path) -> Path:
    """A random model of two layers with a window of 48k and the tokenizer of SmolLM2 in the folder SMOLLM."""
    if not (source := os.environ.get("SMOLLM")):
        pytest.skip("SMOLLM names no folder with SmolLM2-135M-Instruct")
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    window = {"num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 48 * 1024}
    config = AutoConfig.from_pretrained(source, **sizes, **window)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(source) / file, folder)
    return folder


@pytest.mark.parametrize("make", [make_tiny, make_two_layers], ids=["tiny", "smollm"])
@trained_agents
def test_coding_agent_trains_by_script_of_manual(tmp_path: Path, name: str, make: Callable[[Path], Path]) -> None:
    """One update of random weights with checkpointing, with the script that the manual shows."""
    find_program(name)
    (script,) = re.findall(rf"^```sh\n(# {name}\.sh\n.*?)^```", (DOCS / "agents.md").read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / f"{name}.sh").write_text(script)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"question": "Say seven.", "answer": "7"}) + "\n")
    model = make(tmp_path / "model")
    with embedded_stack(tmp_path, idle_seconds="3600") as stack:
        stack.environment["PYTHONPATH"] = str(DOCS.parent)
        words = ["submit", "--dataset", str(tmp_path / "tasks.jsonl"), "--model", str(model), "--name", name, "--wait"]
        words += ["--epochs", "1", "--group-size", "2", "--tasks-per-iteration", "1", "--max-new-tokens", "16"]
        words += ["--set", "update.gradient_checkpointing=true"]
        agent = ["--agent", f"cmd:sh {tmp_path}/{name}.sh", "--agent-unsafe", "--reward", f"{__name__}:varied"]
        stack.agentrl(*words, *agent)
        with stack.database.read() as tx:
            row = tx.execute(text("SELECT grad_norm, episodes, sampled_tokens FROM v_iterations")).one()
            episodes = tx.execute(text("SELECT id FROM episodes")).scalars().all()
        assert row.grad_norm > 0
        assert (row.episodes, len(episodes)) == (2, 2)
        assert row.sampled_tokens >= 32
        for episode in episodes:
            stack.agentrl("replay", str(episode), "--verify", "tokens")
