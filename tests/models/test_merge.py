"""`agentrl merge`: a stored policy becomes a plain model, whole or not at all."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.store import run_names
from agentrl.workflow.store.connect import Database
from agentrl.workflow.trajectory import PolicyRef
from bench.faults.cluster import small_disk
from tests.support.published import published
from tests.support.small_models import quantised, tiny_random
from tests.support.typed import agentrl

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.arange(10, 40).view(2, 15)
KINDS: dict[str, dict[str, Any]] = {"all weights": {"lora_r": 0}, "lora": {"lora_r": 4}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model."""
    return tiny_random(tmp_path_factory.mktemp("base") / "tiny")


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS).logits.float()
    return found


def sampled(db: Database, base: Path, version: int, **model: Any) -> torch.Tensor:
    """The logits of a stored policy as it samples."""
    row = run_names.find_policy(db, "first", version)
    policy = Policy.load(ModelConfig.model_validate({"path": str(base), **model}), str(base), "cpu")
    policy.publish(PolicyRef(str(base), policy.base_hash, row["path"], row["sha256"], version))
    with policy.sampling() as module:
        return logits(module)


def made_older(folder: Path) -> None:
    """As a checkpoint was before it was a model."""
    manifest = json.loads((folder / sealed_folder.MANIFEST).read_text())
    files = manifest["files"]
    for name in [name for name in files if files[name].get("shared")]:
        (folder / name).unlink()
        del files[name]
    weights = sealed_folder.weights_of(folder)
    files[sealed_folder.WEIGHTS] = files.pop(weights.name)
    weights.rename(folder / sealed_folder.WEIGHTS)
    (folder / sealed_folder.MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("age", ["new", "older"])
@pytest.mark.slow
def test_merge_makes_model_with_same_logprobs(
    own_database: Database, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, age: str
) -> None:
    made = published(own_database, base, tmp_path / "out", KINDS[kind], versions=2, epochs=2)
    if age == "older":
        made_older(made[0])
    out, err = agentrl(capsys, "merge", "first@1", "--out", str(tmp_path / "models" / "plain"), "--json")
    assert json.loads(out).items() >= {"model": str(tmp_path / "models" / "plain"), "run": "first", "version": 1}.items()
    assert "dequantised" not in err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "plain")
    difference = (logits(model) - sampled(own_database, base, 1, **KINDS[kind])).abs().max()
    assert difference == 0 if kind == "all weights" else difference < 1e-5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "models" / "plain")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(base).chat_template
    record = json.loads((tmp_path / "models" / "plain" / "training.json").read_text())
    assert (record["path"], record["version"], record["base"]) == (str(made[0]), 1, str(base))
    assert [entry.name for entry in (tmp_path / "models").iterdir()] == ["plain"]
    agentrl(capsys, "submit", "--dataset", "arithmetic", "--model", str(tmp_path / "models" / "plain"), "--dry-run")


@quantised
@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_merge_dequantises_base_and_says_so(
    own_database: Database, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], bits: str
) -> None:
    published(own_database, base, tmp_path / "out", {bits: True, "dtype": "float32", "lora_r": 4})
    _, err = agentrl(capsys, "merge", "first", "--out", str(tmp_path / "plain"))
    assert "The base was dequantised" in err
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    ours = sampled(own_database, base, 1, **{bits: True, "dtype": "float32", "lora_r": 4})
    whole = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))
    assert (whole - ours).abs().max() < (0.01 if bits == "load_in_4bit" else 0.1)  # 8 bits round what they multiply too


def test_merge_replaces_only_own_output_if_forced(
    own_database: Database, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(own_database, base, tmp_path / "out", KINDS["all weights"], versions=2, epochs=2)
    words = ["merge", "first@1", "--out", str(tmp_path / "plain")]
    agentrl(capsys, *words)
    before = (tmp_path / "plain" / "model.safetensors").read_bytes()
    words[1] = "first@2"
    assert "already" in agentrl(capsys, *words, code=3)[1]
    assert (tmp_path / "plain" / "model.safetensors").read_bytes() == before
    agentrl(capsys, *words, "--force")
    assert (tmp_path / "plain" / "model.safetensors").read_bytes() != before
    (tmp_path / "thesis").mkdir()
    assert "not made by agentrl" in agentrl(capsys, *words[:-1], str(tmp_path / "thesis"), "--force", code=3)[1]


def test_merge_refusal_is_one_sentence_and_writes_nothing(
    own_database: Database, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tiny_random(tmp_path / "elsewhere")
    (made,) = published(own_database, elsewhere, tmp_path / "out", KINDS["lora"])
    plain = str(tmp_path / "plain")
    refused = [
        (["first@9"], 5, "no policy version 9"),
        (["nobody@1"], 5, "There is no run 'nobody'"),
        ([str(base)], 2, "not a run's policy"),
    ]
    for words, code, said in refused:
        assert said in agentrl(capsys, "merge", *words, "--out", plain, code=code)[1], words
    assert "Cannot create the folder" in agentrl(capsys, "merge", "first@1", "--out", "/proc/nope/plain", code=2)[1]
    whole = sealed_folder.weights_of(made).read_bytes()
    sealed_folder.weights_of(made).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "the file was altered" in agentrl(capsys, "merge", "first@1", "--out", plain, code=9)[1]
    sealed_folder.weights_of(made).write_bytes(whole)
    shutil.rmtree(elsewhere)
    tiny_random(elsewhere, seed=1)
    assert "was submitted with base" in agentrl(capsys, "merge", "first@1", "--out", plain, code=8)[1]
    assert not Path(plain).exists()


def test_merge_without_disk_space_writes_nothing(
    own_database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = tiny_random(tmp_path / "wide", width=256)
    published(own_database, wide, tmp_path / "out", KINDS["lora"])
    with small_disk(tmp_path / "disk", "1m") as disk:
        said = agentrl(capsys, "merge", "first", "--out", str(disk / "plain"), code=8)[1]
        assert "nothing was written" in said
        assert list(disk.iterdir()) == []
