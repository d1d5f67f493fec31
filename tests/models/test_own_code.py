"""A model with code of its own runs where a person says so: it samples, trains, and loads again; else it is refused."""

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.cli import submit as submitting
from agentrl.cli.eval_run import eval_run_of
from agentrl.workers.requests import submit as submission
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.errors import ModelError
from agentrl.workflow.models.lookup import base_hash, code_files, code_hash
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import settings
from agentrl.workflow.store import planning, run_names
from agentrl.workflow.store.connect import Database
from agentrl.workflow.trajectory import PolicyRef
from tests.faults.test_mending import a_worker, do_jobs, restart
from tests.support.played_runs import value, values
from tests.support.small_models import tiny_random
from tests.support.typed import agentrl

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

CODE = """
from pathlib import Path

from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

Path(__file__).parent.joinpath("ran").touch()


class OwnConfig(Qwen2Config):
    model_type = "own"

    def __init__(self, loudness=1.0, **rest):
        super().__init__(**rest)
        self.loudness = loudness


class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * self.config.loudness
        return out
"""
SMALL = (
    *("--dataset", "arithmetic", "--epochs", "1", "--max-tasks", "2", "--tasks-per-iteration", "2", "--group-size", "8"),
    *("--max-new-tokens", "4", "--max-steps", "1", "-s", "hooks=[tests.support.parity_hook:Lucky]"),
)
IDS = torch.arange(10, 40).view(2, 15)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A random model whose class stands in a file beside its weights."""
    folder = tiny_random(tmp_path / "own")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "loudness": 3.0}
    config["auto_map"] = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text(CODE)
    return folder


@pytest.fixture
def worker(home: Path, migrated_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """The database of this process, which does the jobs of what is submitted in it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    with a_worker(home, migrated_file) as database:
        monkeypatch.setattr(submitting, "send_run", lambda prepared, *_: submission.submit(database, prepared))
        yield database


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS).logits
    return found


def test_own_code_model_samples_trains_and_loads_again(
    worker: Database, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agentrl(capsys, "submit", *SMALL, "--model", str(own), "--name", "first", "--trust-remote-code")
    do_jobs()
    row = run_names.find_run(worker, "first")
    assert (row["status"], row["reason"]) == ("done", "")
    assert row["config"]["model"]["trust_remote_code"] is True
    assert row["manifest"]["trust_remote_code"] is True
    assert row["manifest"]["code"] == code_hash(own)
    assert all(values(worker, "SELECT sampled_tokens > 0 FROM episodes"))
    assert value(worker, "SELECT grad_norm > 0 FROM updates")
    assert value(worker, "SELECT sampler_difference_max < 1e-4 FROM updates"), "the engine computes what the trainer does"

    made = run_names.find_policy(worker, "first", 1)
    restart()
    policy = Policy.load(ModelConfig.model_validate(row["config"]["model"]), str(own), "cpu")
    policy.publish(PolicyRef(str(own), policy.base_hash, made["path"], made["sha256"], 1))
    elsewhere = AutoModelForCausalLM.from_pretrained(made["path"], trust_remote_code=True)
    assert type(elsewhere).__name__ == "OwnForCausalLM"
    assert AutoTokenizer.from_pretrained(made["path"], trust_remote_code=True).chat_template
    with policy.sampling() as model:
        assert (logits(model) - logits(elsewhere)).abs().max() < 1e-6
    agentrl(capsys, "merge", "first@1", "--out", str(tmp_path / "plain"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", trust_remote_code=True)
    assert (logits(merged) - logits(elsewhere)).abs().max() < 1e-6
    assert code_files(tmp_path / "plain")


def test_own_code_without_flag_is_refused_before_it_runs(
    worker: Database, own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("hello\n\n"))
    for words in (
        ["submit", *SMALL, "--model", str(own)],
        ["submit", *SMALL, "--model", str(own), "--dry-run"],
        ["eval", "--policy", str(own), "--dataset", "arithmetic", "-n", "2"],
        ["chat", "--policy", str(own)],
        ["sft", "--model", str(own), "--steps", "1"],
    ):
        said = agentrl(capsys, *words, code=8)[1]
        assert f"agentrl: The model in '{own}' needs its own code (modeling_own.py)." in said, words
        assert "--trust-remote-code" in said
    assert value(worker, "SELECT count(*) FROM runs") == 0
    assert not settings().models_dir.exists() or not list(settings().models_dir.iterdir())
    assert not list(own.parent.rglob("ran")), "its code ran"


def test_own_code_with_flag_works_in_sft_and_chat(
    worker: Database, own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--model", str(own), "--steps", "1", "--batch-size", "2", "--name", "made", "--trust-remote-code")
    agentrl(capsys, "sft", "--dataset", "arithmetic", *words)
    made = settings().models_dir / "made"
    assert code_files(made)
    monkeypatch.setattr("sys.stdin", StringIO("hello\n\n"))
    out, _ = agentrl(capsys, "chat", "--policy", "made", "--trust-remote-code", "--max-new-tokens", "4")
    assert out
    assert "needs its own code" in agentrl(capsys, "chat", "--policy", "made", code=8)[1]
    measured, _ = eval_run_of(str(own), "arithmetic", "test", 2, {}, trust=True)
    assert submission.prepare(worker, measured, kind="eval").submission.manifest["trust_remote_code"] is True


def test_own_code_changed_stops_run(worker: Database, own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agentrl(capsys, "submit", *SMALL, "--model", str(own), "--name", "first", "--trust-remote-code", "--epochs", "2")
    do_jobs(until=lambda: value(worker, "SELECT max(version) FROM policies") == 1)
    planning.stop(worker, "first", "paused")
    restart()
    before = base_hash(own)
    (own / "modeling_own.py").write_text(CODE + "\n# more\n")
    assert base_hash(own) == before
    planning.resume(worker, "first")
    do_jobs()
    row = run_names.find_run(worker, "first")
    assert row["status"] == "failed"
    assert "was submitted with code" in row["reason"]


@pytest.mark.parametrize(
    "said",
    [
        "[]",
        '{"auto_map": 1}',
        '{"auto_map": {"AutoConfig": 3}}',
        "{",
        '{"auto_map": {"AutoConfig": "modeling_other.X"}}',
        "[" * 10**5,
    ],
)
def test_own_code_without_config_entry_is_none(tmp_path: Path, said: str) -> None:
    (tmp_path / "config.json").write_text(said)
    (tmp_path / "modeling_own.py").write_text(CODE)
    assert code_files(tmp_path) == ()


def test_own_code_of_tokenizer_counts(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["modeling_own.Slow", null]}}')
    (tmp_path / "modeling_own.py").write_text(CODE)
    assert [file.name for file in code_files(tmp_path)] == ["modeling_own.py"]


def test_own_code_missing_is_reported(own: Path) -> None:
    (own / "modeling_own.py").unlink()
    with pytest.raises(ModelError, match="needs its own code"):
        Policy.load(ModelConfig.model_validate({"path": str(own)}), str(own), "cpu")
