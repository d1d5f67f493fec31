"""A model in memory is saved once, by its hash, and trained from there."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import agentrl
from agentrl.api.algorithms import save_model
from agentrl.workflow.errors import ConfigError, ModelError
from agentrl.workflow.models.tiny import tiny_model
from agentrl.workflow.settings import settings
from tests.support.small_models import tokenizer

ROWS = [{"question": "What is 2 plus 1?", "answer": "3"}]


def model(seed: int = 0) -> Any:
    return tiny_model(len(tokenizer()), seed)


def test_model_in_memory_is_saved_once_by_hash(tmp_path: Path) -> None:
    made = model()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    first = agentrl.Trainer(agentrl.GRPO(made, tokenizer(), lora_r=0), store=tmp_path).config(train_dataset=ROWS)
    again = agentrl.Trainer(agentrl.GRPO(model(), tokenizer()), store=tmp_path, lora_r=4).config(train_dataset=ROWS)
    other = agentrl.Trainer(agentrl.PPO(model(1), tokenizer()), store=tmp_path).config(train_dataset=ROWS)
    assert (first["algorithm.name"], first["model.lora_r"], again["model.lora_r"]) == ("grpo", 0, 4)
    assert other["algorithm.name"] == "ppo"
    assert first["model.path"] == again["model.path"] != other["model.path"]
    assert {str(path) for path in (tmp_path / "models").iterdir()} == {first["model.path"], other["model.path"]}
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())


def test_grpo_opens_its_model_for_a_loop_by_hand(home: Path) -> None:
    """The options of the model hold in the open policy, and `GRPOTrainer` takes the others from the same value."""
    grpo = agentrl.GRPO(model(), tokenizer(), lora_r=4, learning_rate=0.01, max_new_tokens=4)
    rewards = {"ids": lambda episode: float(sum(episode.steps[0].sampled_ids) % 7)}
    with grpo.open(max_steps=1) as policy:
        assert (policy.policy.config.lora_r, policy.limits.max_new_tokens, policy.limits.max_steps) == (4, 4, 1)
        worker, trainer = agentrl.RolloutWorker(policy, "plain", rewards=rewards), agentrl.GRPOTrainer(policy, grpo)
        assert "loss" in trainer.update(worker.run_episodes(ROWS, group_size=8))
        assert policy.ref.version == 1
        with pytest.raises(
            ConfigError, match=r"lora_r cannot change: .* Set it when the model is opened: GRPO\(MODEL, lora_r="
        ):
            agentrl.GRPOTrainer(policy, agentrl.PPO(lora_r=8))
    assert Path(policy.ref.base).parent == settings().models_dir


def test_model_argument_may_be_name_or_folder(tmp_path: Path) -> None:
    keys = agentrl.Trainer(agentrl.GRPO("Qwen/Qwen2.5-0.5B-Instruct", clip_high=0.28), store=tmp_path).config()
    assert (keys["model.path"], keys["algorithm.clip_high"]) == ("Qwen/Qwen2.5-0.5B-Instruct", 0.28)
    assert not (tmp_path / "models").exists()


class Adapted:
    """A model with adapters."""

    config = None
    peft_config = {"default": 1}  # noqa: RUF012

    def save_pretrained(self, folder: Path) -> None:
        """Never called."""


class Quantised(Adapted):
    """A model of few bits."""

    peft_config: Any = None
    quantization_method = "bitsandbytes"


@pytest.mark.parametrize(
    ("make_arguments", "why"),
    [
        (lambda: (torch.nn.Linear(2, 2), tokenizer()), "is not a transformers model"),
        (lambda: (Adapted(), tokenizer()), "has adapters"),
        (lambda: (Quantised(), tokenizer()), "is quantised"),
        (lambda: (model(), None), "needs its tokenizer"),
        (lambda: (7, tokenizer()), "is not a transformers model"),
    ],
)
def test_model_in_memory_that_cannot_be_saved_is_refused(make_arguments: Callable[[], tuple[Any, Any]], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        agentrl.GRPO(*make_arguments())
    with pytest.raises(ConfigError, match="lora_r"):
        agentrl.GRPO(lora_rank_=8)


def test_model_in_memory_leaves_nothing_on_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()

    def refuse(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(made, "save_pretrained", refuse)
    with pytest.raises(ModelError, match="No space left on device"):
        save_model(made, tokenizer(), tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


SCRIPT = """
import sys, json
sys.path.insert(0, sys.argv[1])
import agentrl
from agentrl.workflow.models.tiny import tiny_model
from tests.support.small_models import tokenizer

def right(episode):
    return float(len(episode.final_answer))

rows = [{"question": f"What is {a} plus 1?", "answer": str(a + 1)} for a in range(2)]
algorithm = agentrl.GRPO(tiny_model(len(tokenizer()), 0), tokenizer(), group_size=2, tasks_per_iteration=2)
run = agentrl.Trainer(algorithm, rewards=[right], max_new_tokens=4).fit(train_dataset=rows)
print(json.dumps([run.status, run.last.ref.base]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_model_in_memory_is_trained(short_folder: Path) -> None:
    (short_folder / "script.py").write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "AGENTRL_HOME": str(short_folder / "home"), "AGENTRL_DATABASE_URL": ""}
    said = {"cwd": short_folder, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-P", "script.py", root], check=False, **said)  # type: ignore[call-overload]
    subprocess.run([sys.executable, "-P", "-m", "agentrl.cli", "down"], check=False, **said)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    status, base = json.loads(done.stdout.splitlines()[-1])
    assert status == "done"
    assert Path(base).parent == (short_folder / "home" / "models").resolve()
