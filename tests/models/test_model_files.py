"""Whether a model can be loaded is known before it is: a dry run says what the worker that loads it would."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.cli.main import main
from agentrl.workers.requests.submit import prepare
from agentrl.workflow.config import ModelConfig, build
from agentrl.workflow.errors import ModelError
from agentrl.workflow.models import loading
from agentrl.workflow.models.lookup import base_hash
from agentrl.workflow.models.policy import Policy
from tests.support.small_models import tiny_random


def configured(**values: object) -> Callable[[Path], object]:
    """Says so in config.json."""

    def write(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return write


def without(*names: str) -> Callable[[Path], object]:
    """These files are gone."""

    def remove(folder: Path) -> None:
        for name in names:
            for file in folder.glob(name):
                file.unlink()

    return remove


def cut(folder: Path) -> None:
    """As an interrupted copy leaves it."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def index(folder: Path) -> None:
    """In two files, of which the second was not copied."""
    weights = load_file(folder / "model.safetensors")
    first, *others = sorted(weights)
    save_file({first: weights[first]}, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    (folder / "model.safetensors").unlink()
    names = {first: "model-00001-of-00002.safetensors"} | dict.fromkeys(others, "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def untold(folder: Path) -> None:
    """A tokenizer that knows of no chat."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "chat_template"}))


def piped(name: str) -> Callable[[Path], object]:
    """A pipe to which nobody writes is in the file's place."""

    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def linked(name: str) -> Callable[[Path], object]:
    """A link to itself is in the file's place."""

    def make(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(name)

    return make


BROKEN: dict[str, Callable[[Path], object]] = {
    "an unknown architecture": configured(model_type="nowhere"),
    "no config": lambda folder: (folder / "config.json").write_text("{"),
    "another width": configured(hidden_size=64),
    "another vocabulary": configured(vocab_size=7),
    "a file cut short": cut,
    "no header": lambda folder: (folder / "model.safetensors").write_bytes(b"not weights"),
    "a part that is missing": index,
    "no tokenizer": without("tokenizer*", "vocab*", "merges*", "special*"),
    "no chat template": untold,
    "a width of 0": configured(hidden_size=0),
    "a negative width": configured(hidden_size=-1),
    "a width beyond memory": configured(hidden_size=10**12),
    "a width beyond 64 bits": configured(hidden_size=10**30),
    "no heads": configured(num_attention_heads=0),
    "more layers than weights": lambda folder: configured(num_hidden_layers=10**9, layer_types=None)(folder),
    "a type that is a list": configured(model_type=[1]),
    "an unknown precision": configured(dtype="float7"),
    "a part that is a number": configured(text_config=5),
    "a config that is nested deep": configured(a=json.loads("[" * 900 + "]" * 900)),
    "a config of 17 MB": configured(a="a" * 17_000_000),
    "a package that is missing": configured(attn_implementation="flash_attention_2"),
    "a tokenizer's config that is a list": lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
    "a tokenizer's length that is a text": lambda folder: (folder / "tokenizer_config.json").write_text(
        json.dumps(json.loads((folder / "tokenizer_config.json").read_text()) | {"model_max_length": "x"})
    ),
    "an adapter beside the model": lambda folder: (folder / "adapter_config.json").write_text("{}"),
    "a pipe for weights": piped("model.safetensors"),
    "a pipe for a config": piped("generation_config.json"),
    "a link to itself": linked("model.safetensors"),
    "a tokenizer that links to itself": linked("tokenizer.json"),
}


@pytest.mark.parametrize("breaking", BROKEN)
def test_check_model_refuses_what_worker_cannot_load(tmp_path: Path, breaking: str) -> None:
    folder = tiny_random(tmp_path / "model")
    config = ModelConfig.model_validate({"path": str(folder)})
    loading.check(config, folder)
    BROKEN[breaking](folder)
    with pytest.raises(ModelError) as checked:
        loading.check(config, folder)
    with pytest.raises(ModelError):
        Policy.load(config, str(folder), "cpu")
    assert "\n" not in str(checked.value)
    assert len(str(checked.value)) < 600
    with suppress(ModelError):  # what the hash does not read does not stop it
        base_hash(folder)


def test_model_larger_than_memory_is_refused_from_headers(tmp_path: Path, home: Path) -> None:
    folder = tiny_random(tmp_path / "model")
    header = json.dumps({"huge": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    with (folder / "model-2.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 42))
    with pytest.raises(ModelError, match=r"needs 4,096\.0 GiB for its weights; cpu has"):
        loading.load(ModelConfig.model_validate({"path": str(folder)}), folder, torch.device("cpu"), "full")
    with pytest.raises(ModelError, match=r"needs 2,048\.0 GiB for its weights; the largest memory here has"):
        prepare(None, build({"model.path": str(folder), "dataset.name": "arithmetic"}))


def test_check_model_needs_some_weights_of_the_model(tmp_path: Path) -> None:
    folder = tiny_random(tmp_path / "model")
    save_file({"elsewhere": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="None of the weights"):
        loading.check(ModelConfig.model_validate({"path": str(folder)}), folder)
    loading.check(ModelConfig.model_validate({"path": str(folder), "lora_r": 4}), tiny_random(tmp_path / "other"))


@pytest.mark.parametrize("breaking", ["an unknown architecture", "a file cut short"])
@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_dry_run_refuses_model_that_cannot_be_loaded(
    home: Path, tmp_path: Path, breaking: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_random(tmp_path / "model")
    words = ["submit", "--dataset", "arithmetic", "--max-tasks", "2", "--model", str(folder), "--dry-run"]
    assert main(words) == 0
    BROKEN[breaking](folder)
    capsys.readouterr()
    assert main(words) == 8
    said = capsys.readouterr()
    assert not said.out
    assert str(folder) in said.err
    assert not home.exists()
