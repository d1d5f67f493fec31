"""A real vLLM: its logprobs beside the trainer's, runs that learn, kill -9. `make vllm-test` installs it and runs this file."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import text

from agentrl.workflow.config import ModelConfig
from agentrl.workflow.engines import GenerateRequest
from agentrl.workflow.engines import vllm as environment
from agentrl.workflow.errors import ModelError, ServiceError
from agentrl.workflow.inference import openai_engine, vllm_engine
from agentrl.workflow.inference.remote_engine import ServedEngine
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import Settings
from agentrl.workflow.store.reads import run_rows
from agentrl.workflow.trajectory import PolicyRef
from tests.inference.test_remote_engines import expected, trained
from tests.support.real_stack import Stack, children_of
from tests.support.small_models import tiny_random

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

INSTALLED = Settings(home=Path(os.environ.get("AGENTRL_VLLM_HOME", "build/vllm")))
REQUEST = GenerateRequest(tuple(range(10, 24)), PolicyRef("small", ""), key=1, position=0, max_new_tokens=12)
KEY = "a key of the tests"
WIDTH = 128
"""The width of the models. vLLM's attention on a CPU needs heads of 32 numbers."""


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    """No test installs a program of three gigabytes."""
    if not environment.installed_version(INSTALLED):
        pytest.skip(f"vLLM is not installed in {INSTALLED.root}: make vllm-test")


def with_vllm(home: Path, **more: object) -> Settings:
    """Settings of a data folder whose vLLM is the installed one."""
    (home / "engines").mkdir(parents=True, exist_ok=True)
    (home / "engines" / "vllm").symlink_to(environment.python_of(INSTALLED).parents[1])
    return Settings(home=home, slots=16, **more)  # type: ignore[arg-type]


def policy_of(model: Path, weights: bool = False) -> Policy:
    return Policy.load(ModelConfig(path=str(model), lora_r=4), str(model), "cpu", 1, weights=weights)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("model") / "small", width=WIDTH)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    with closing(vllm_engine.start(policy_of(model), with_vllm(tmp_path_factory.mktemp("home")))) as made:
        yield made


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_real_vllm_returns_logprobs_of_trainer(engine: ServedEngine, model: Path, tmp_path: Path, temperature: float) -> None:
    trainer = policy_of(model, weights=True)
    for ref in (REQUEST.policy, trained(trainer, tmp_path / "v1", 0.2)):
        asked = replace(REQUEST, policy=ref, temperature=temperature, top_logprobs=3)
        turns = [engine.submit(replace(asked, key=key, stop=("e",))) for key in range(8)]
        for done in (turn.result(900) for turn in turns):
            logprobs = torch.tensor(done.logprobs)
            own = expected(trainer, replace(asked, policy=ref).policy, done, temperature)
            assert torch.allclose(own, logprobs, atol=1e-4), (own - logprobs).abs().max()
            assert all(len(place) == 3 for place in done.top)
            written = [trainer.chat.decode((token,)) for token in done.token_ids]
            assert not any("e" in piece for piece in written[:-1])


def test_real_vllm_killed_in_mid_turn_is_started_again(engine: ServedEngine) -> None:
    engine.submit(REQUEST).result(900)
    pid = next(pid for pid in children_of(os.getpid()) if b"vllm" in Path(f"/proc/{pid}/cmdline").read_bytes())
    turn = engine.submit(replace(REQUEST, max_new_tokens=400))
    time.sleep(0.3)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ServiceError, match="It is started again"):
        turn.result(60)
    assert engine.submit(REQUEST).result(900).token_ids


@pytest.mark.parametrize("staleness", [0, 1], ids=["in turn", "overlapping"])
def test_real_vllm_run_learns(short_folder: Path, staleness: int) -> None:
    with closing(Stack(short_folder / "home", AGENTRL_IDLE_STOP_SECONDS="600")) as stack:
        with_vllm(stack.home)
        stack.agentrl("sft", "--dataset", "arithmetic", "--model", "tiny", "--steps", "250")
        model = stack.home / "models" / "tiny-arithmetic"
        words = ("--dataset", "arithmetic", "--model", str(model), "--engine", "vllm", "--lora-r", "8", "--iterations", "25")
        more = ("-s", "update.learning_rate=0.001", "--max-staleness", str(staleness))
        run = stack.agentrl("submit", *words, *more).strip()
        stack.wait(lambda: status_of(stack, run) == "done", f"the end of {run}", 1500)
        rewards = [row[0] for row in rows(stack, "SELECT mean_reward FROM iterations ORDER BY number")]
        assert sum(rewards[:2]) / 2 < 0.65
        assert sum(rewards[-3:]) / 3 >= 0.85
        assert rows(stack, "SELECT count(*) FROM tool_calls")[0][0] >= 25 * 64
        differences = dict(rows(stack, "SELECT staleness, max(sampler_difference_max) FROM v_iterations GROUP BY staleness"))
        assert differences[0] < 1e-3
        assert max(differences) == staleness  # then the trainer's policy is another one than the sampler's


def rows(stack: Stack, query: str) -> list[tuple[Any, ...]]:
    with stack.database.read() as tx:
        return [tuple(row) for row in tx.execute(text(query))]


def status_of(stack: Stack, run: str) -> str:
    return str(run_rows.describe_run(stack.database, run)["status"])


def test_run_survives_one_of_two_real_servers(model: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine.secrets, "token_urlsafe", lambda size: KEY)
    settings = with_vllm(short_folder / "servers")
    with ExitStack() as opened:
        servers = [opened.enter_context(closing(vllm_engine.OwnServer(policy_of(model), settings))) for _ in range(2)]
        for server in servers:
            server.greet()
        urls = ",".join(server.url for server in servers)
        environ = {"AGENTRL_ENGINE_URL": urls, "AGENTRL_ENGINE_KEY": KEY, "AGENTRL_IDLE_STOP_SECONDS": "600"}
        stack = opened.enter_context(closing(Stack(short_folder / "home", **environ)))
        words = ("--dataset", "arithmetic", "--model", str(model), "--engine", "openai", "-s", "model.lora_r=4")
        run = stack.agentrl("submit", *words, "--iterations", "4").strip()
        stack.wait(lambda: rows(stack, "SELECT count(*) FROM steps")[0][0] > 200, "the first steps")
        servers[0].close()
        stack.wait(lambda: status_of(stack, run) == "done", f"the end of {run}", 900)
        assert rows(stack, "SELECT DISTINCT status FROM episodes") == [("done",)]
        assert rows(stack, "SELECT max(losses) FROM groups") == [(0,)]


def test_real_server_that_returns_with_another_model_is_refused(
    model: Path, tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine.secrets, "token_urlsafe", lambda size: KEY)
    settings = with_vllm(short_folder / "servers")
    other = vllm_engine.OwnServer(policy_of(tiny_random(tmp_path / "another", width=WIDTH)), settings)
    with closing(vllm_engine.OwnServer(policy_of(model), settings)) as first, closing(other):
        first.greet()
        where = settings.model_copy(update={"engine_url": first.url, "engine_key": KEY})
        with closing(openai_engine.start(policy_of(model), where)) as engine:
            engine.submit(REQUEST).result(120)
            first.close()
            with pytest.raises(ServiceError):
                engine.submit(REQUEST).result(120)
            other.start(int(first.url.rpartition(":")[2]))
            with pytest.raises(ModelError, match="serves another, and not"):
                engine.submit(REQUEST).result(120)
