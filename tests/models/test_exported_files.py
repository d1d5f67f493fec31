"""A checkpoint is a model: PEFT and transformers load what agentrl loads, and what its run shares lies there once."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.workflow import checkpoints
from agentrl.workflow.checkpoints import checkpoint_gc, object_store, sealed_folder
from agentrl.workflow.config import RunConfig, build
from agentrl.workflow.errors import BrokenCheckpoint
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training.trainer import Trainer
from agentrl.workflow.trajectory import PolicyRef
from tests.support.small_models import tiny_random

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.arange(10, 40).view(2, 15)
KINDS: dict[str, dict[str, Any]] = {"all weights": {"model.lora_r": 0}, "lora": {"model.lora_r": 4, "model.lora_alpha": 32}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model."""
    return tiny_random(tmp_path_factory.mktemp("base") / "tiny")


def trainer_of(base: Path, kind: str) -> tuple[Trainer, Policy]:
    config: RunConfig = build({"model.path": str(base), "model.dtype": "float32", **KINDS[kind]})
    policy = Policy.load(config.model, str(base), device="cpu")
    return Trainer(policy, config), policy


@torch.no_grad()
def disturb(policy: Policy) -> None:
    for parameter in policy.trainable().values():
        parameter.add_(0.02 * torch.randn_like(parameter))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS).logits
    return found


def loaded_elsewhere(base: Path, folder: Path, kind: str) -> Any:
    if kind == "lora":
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="float32"), folder)
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_loads_in_peft_and_transformers(tmp_path: Path, base: Path, kind: str) -> None:
    trainer, policy = trainer_of(base, kind)
    disturb(policy)
    folder = tmp_path / "v1"
    sha256 = checkpoints.write(str(folder), trainer.save)
    _, again = trainer_of(base, kind)
    again.publish(PolicyRef(str(base), again.base_hash, str(folder), sha256, 1))
    with again.sampling() as model:
        ours = logits(model)
    with again.reference() as model:
        unlearned = logits(model)
    theirs = logits(loaded_elsewhere(base, folder, kind).eval())
    assert (theirs - ours).abs().max() < 1e-6
    assert (theirs - unlearned).abs().max() > 1e-3, "the checkpoint's weights, not the base's"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is 15 minus 8?"}]
    rendered = [one.apply_chat_template(messages, tokenize=False) for one in (tokenizer, policy.tokenizer)]
    assert rendered[0] == rendered[1]
    assert tokenizer(rendered[0])["input_ids"] == policy.tokenizer(rendered[1])["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_shared_files_are_stored_once_and_survive(tmp_path: Path, base: Path, kind: str) -> None:
    trainer, policy = trainer_of(base, kind)
    folders = [tmp_path / f"v{number}" for number in range(3)]
    for folder in folders:
        sealed_folder.write(folder, trainer.save)
        disturb(policy)
    shared = {name for name, record in sealed_folder.verify(folders[2]).items() if record.shared}
    config = "adapter_config.json" if kind == "lora" else "config.json"
    assert {"tokenizer.json", "chat_template.jinja", config} <= shared
    for name in sealed_folder.verify(folders[2]):
        alike = len({(folder / name).stat().st_ino for folder in folders}) == 1
        assert alike == (name in shared), name
    sizes = {
        folder.name: files for folder, files in ((each, checkpoint_gc._disk_sizes(tmp_path)[each.name]) for each in folders)
    }
    assert all(sizes["v0"][name] == 0 for name in shared), "its removal frees nothing of these"
    sealed_folder.remove_rivals(tmp_path / "v0.t1.key")
    for file in folders[0].iterdir():
        file.unlink()
    assert sealed_folder.verify(folders[2])
    assert loaded_elsewhere(base, folders[2], kind)


def test_checkpoint_without_hard_links_has_copies(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no links here")

    trainer, _ = trainer_of(base, "lora")
    sealed_folder.write(tmp_path / "v1", trainer.save)
    monkeypatch.setattr(os, "link", refuse)
    sealed_folder.write(tmp_path / "v2", trainer.save)
    assert sealed_folder.verify(tmp_path / "v1").keys() == sealed_folder.verify(tmp_path / "v2").keys()
    assert (tmp_path / "v2" / "tokenizer.json").stat().st_nlink == 1


def test_checkpoint_shared_file_altered_is_named_and_not_reused(tmp_path: Path, base: Path) -> None:
    trainer, _ = trainer_of(base, "lora")
    sealed_folder.write(tmp_path / "v1", trainer.save)
    (tmp_path / "v1" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(BrokenCheckpoint, match=r"tokenizer_config\.json has 2 bytes"):
        sealed_folder.verify(tmp_path / "v1")
    trainer.load(tmp_path / "v1")
    sealed_folder.write(tmp_path / "v2", trainer.save)
    assert sealed_folder.verify(tmp_path / "v2")


def test_checkpoint_shared_file_link_is_not_followed(tmp_path: Path, base: Path) -> None:
    trainer, _ = trainer_of(base, "lora")
    sealed_folder.write(tmp_path / "v1", trainer.save)
    file = tmp_path / "v1" / "tokenizer.json"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    sealed_folder.write(tmp_path / "v2", trainer.save)
    assert not (tmp_path / "v2" / "tokenizer.json").is_symlink()
    assert (tmp_path / "elsewhere").stat().st_nlink == 1


def older(trainer: Trainer, policy: Policy) -> Callable[[Path], None]:
    """Writes what a checkpoint was before it was a model."""

    def fill(folder: Path) -> None:
        shared = trainer.save(folder)
        for name in shared:
            (folder / name).unlink()
        (folder / policy.weights_name).rename(folder / sealed_folder.WEIGHTS)

    return fill


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["folder", "memory://agentrl-plain/run"])
def test_checkpoint_of_older_layout_still_samples_and_trains(
    home: Path, tmp_path: Path, base: Path, kind: str, place: str
) -> None:
    trainer, policy = trainer_of(base, kind)
    disturb(policy)
    path = f"{place}/{kind[:4]}-v1" if place != "folder" else str(tmp_path / "v1")
    sha256 = checkpoints.write(path, older(trainer, policy))
    assert checkpoints.find_fault(path, sha256, "all") == ""
    learned = {name: tensor.detach().clone() for name, tensor in policy.trainable().items()}
    trainer.load(None)
    checkpoints.read(path, sha256, "all", trainer.load)
    assert all(tensor.equal(learned[name]) for name, tensor in policy.trainable().items())
    assert policy.publish(PolicyRef(str(base), policy.base_hash, path, sha256, 1))


def test_checkpoint_behind_url_is_model_fetched_in_parts(home: Path, tmp_path: Path, base: Path) -> None:
    trainer, _ = trainer_of(base, "lora")
    path = "memory://agentrl-plain/other/v1"
    sha256 = checkpoints.write(path, trainer.save)
    there = object_store.sizes("memory://agentrl-plain/other")["v1"]
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= there.keys()
    copy = object_store.copy_of(path)
    for file in copy.iterdir():
        file.unlink()
    copy.rmdir()
    object_store._verified_copies.clear()
    checkpoints.local_part(path, sha256, "all")
    assert {file.name for file in copy.iterdir()} == {
        *("adapter_model.safetensors", sealed_folder.OPTIMIZER, sealed_folder.STATE, sealed_folder.MANIFEST)
    }


def test_checkpoint_manifest_names_shared_files(tmp_path: Path, base: Path) -> None:
    trainer, _ = trainer_of(base, "lora")
    sealed_folder.write(tmp_path / "v1", trainer.save)
    files = json.loads((tmp_path / "v1" / sealed_folder.MANIFEST).read_text())["files"]
    assert files["tokenizer.json"]["shared"] is True
    assert "shared" not in files["adapter_model.safetensors"]
