"""What trains, said before anything is loaded: the numbers that PEFT gives; which optimizers and layers are refused."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from peft import get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from agentrl.workflow.checkpoints.sealed_folder import RECORD
from agentrl.workflow.config import ModelConfig, build
from agentrl.workflow.errors import ConfigError, ModelError
from agentrl.workflow.models.loading import find_lora_layers, lora_config
from agentrl.workflow.models.lookup import base_hash
from agentrl.workflow.models.parameters import count_in_files, count_parameters
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training.optimizer import check_optimizer
from tests.support.small_models import quantised, tiny_random, tokenizer
from tests.training.test_tune import agentrl

SHAPE = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(folder: Path, tied: bool) -> Path:
    """A small Llama in several files."""
    config = LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=tied)  # type: ignore[arg-type]
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="30KB")
    tokenizer().save_pretrained(folder)
    return folder


def by_peft(config: ModelConfig, folder: Path, rank: int) -> tuple[int, int]:
    base = AutoModelForCausalLM.from_pretrained(folder)
    made = get_peft_model(base, lora_config(config, rank, find_lora_layers(config, base)))
    trainable, whole = made.get_nb_trainable_parameters()
    return trainable, whole


@pytest.mark.parametrize("kind", ["Qwen2", "tied", "untied"])
@pytest.mark.parametrize("targets", [{}, {"lora_targets": ["q_proj", "v_proj"]}], ids=["all", "two"])
def test_parameter_count_from_files_equals_peft(kind: str, targets: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_random(tmp_path / "base") if kind == "Qwen2" else llama(tmp_path / "base", kind == "tied")
    config = ModelConfig.model_validate({"path": str(folder), "lora_r": 4, **targets})
    found = count_in_files(config, folder)
    assert found is not None
    assert (found.trainable, found.all) == by_peft(config, folder, 4)
    with Policy.load(config, str(folder), device="cpu").training() as module:
        assert count_parameters(module) == found
    whole = count_in_files(ModelConfig(path=str(folder), lora_r=0), folder)
    assert whole is not None
    assert whole.trainable == whole.all == found.all - found.trainable


@quantised
def test_parameter_count_of_quantised_model_is_of_files(tmp_path: Path) -> None:
    folder = tiny_random(tmp_path / "base")
    config = ModelConfig.model_validate({"path": str(folder), "lora_r": 4, "load_in_4bit": True, "dtype": "float32"})
    with Policy.load(config, str(folder), device="cpu").training() as module:
        assert count_parameters(module) == count_in_files(config, folder)


def test_parameter_count_unknown_from_files_is_left_to_loader(tmp_path: Path) -> None:
    folder = tiny_random(tmp_path / "base")
    config = ModelConfig(path=str(folder), lora_r=4)
    told = json.loads((folder / "config.json").read_text())
    for text in (json.dumps(told | {"quantization_config": {}}), "[]", "{", "[" * 100_000):
        (folder / "config.json").write_text(text)
        assert count_in_files(config, folder) is None
    (folder / "config.json").write_text(json.dumps(told))
    (folder / "model.safetensors").write_bytes(b"no header")
    assert count_in_files(config, folder) is None
    assert count_in_files(config, tmp_path) is None


@pytest.mark.usefixtures("home")
@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_submit_shows_trained_parameters_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_random(tmp_path / "base")
    asked = ("-s", "model.lora_targets=[q_proj,v_proj]", "-s", "model.lora_alpha=8", "-s", "update.optimizer=adamw_8bit")
    options = ("--dataset", "arithmetic", "--model", str(folder), "--lora-r", "4", *asked, "--dry-run", "--json")
    out, said = agentrl(capsys, "submit", *options)
    config = json.loads(out)["config"]
    assert said.splitlines()[0] == str(count_in_files(ModelConfig.model_validate(config["model"]), folder))
    assert (config["model"]["lora_targets"], config["update"]["optimizer"]) == (["q_proj", "v_proj"], "adamw_8bit")


def test_stored_run_keeps_former_optimizer_and_layers() -> None:
    config = build({})
    stored = config.model_dump(mode="json")
    del stored["update"]["optimizer"], stored["model"]["lora_targets"]
    assert type(config).model_validate(stored) == config


# what is asked for and is not there


def test_lora_targets_unknown_are_named_with_existing_ones(tmp_path: Path) -> None:
    folder = tiny_random(tmp_path / "base")
    for wrong in ("query", "lm_head", "embed_tokens", "norm"):
        config = ModelConfig.model_validate({"path": str(folder), "lora_r": 4, "lora_targets": ["q_proj", wrong]})
        with pytest.raises(ModelError, match=f"LoRA is to train {wrong}, which are not linear layers .* it has down_proj, "):
            Policy.load(config, str(folder), device="cpu")
    with pytest.raises(ConfigError, match=r"model\.lora_targets"):
        build({"model.lora_targets": []})


def test_optimizer_unavailable_is_refused_before_start(monkeypatch: pytest.MonkeyPatch) -> None:
    check_optimizer("adamw", "cpu")
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim.adamw", None)
    with pytest.raises(ConfigError, match=r"adamw_8bit does not work here on cpu: .*bitsandbytes.* Take adamw"):
        check_optimizer("adamw_8bit", "cpu")
    with pytest.raises(ConfigError, match=r"update\.optimizer: Input should be 'adamw' or 'adamw_8bit'"):
        build({"update.optimizer": "sgd"})


@quantised
@pytest.mark.usefixtures("home")
def test_sft_uses_lora_targets_and_optimizer_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, made = tiny_random(tmp_path / "base"), tmp_path / "made"
    lora = ("--lora-r", "4", "--lora-targets", "q_proj,v_proj", "--lora_alpha", "8", "--lora-dropout", "0.1")
    common = ("sft", "--dataset", "arithmetic", "--model", str(folder), "--steps", "3", "--batch-size", "4")
    said = agentrl(capsys, *common, *lora, "--optimizer", "adamw_8bit", "--output-dir", str(made))[1]
    file = tmp_path / "sft.yaml"
    file.write_text("{lora_r: 4, lora-targets: [q_proj, v_proj], lora_alpha: 8, lora_dropout: 0.1, optimizer: adamw_8bit}")
    agentrl(capsys, *common, "--config", str(file), "--output-dir", str(tmp_path / "by file"))
    assert base_hash(tmp_path / "by file") == base_hash(made)
    config = ModelConfig.model_validate({"path": str(folder), "lora_r": 4, "lora_targets": ["q_proj", "v_proj"]})
    assert str(count_in_files(config, folder)) in said
    assert json.loads((made / RECORD).read_text())["recipe"]["optimizer"] == "adamw_8bit"
    refused = agentrl(capsys, *common, "--lora-alpha", "8", "--output-dir", str(tmp_path / "none"), code=2)[1]
    assert "--lora-alpha: without effect if all weights train.\n  Pass --lora-r 8, too." in refused
    assert "update.optimizer" in agentrl(capsys, *common, "--optimizer", "sgd", code=2)[1]
    assert "lora_dropout" in agentrl(capsys, *common, "--lora-r", "4", "--lora-dropout", "1", code=2)[1]
