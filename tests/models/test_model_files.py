"""Whether a model can be loaded is known before it is: a dry run says what the worker that loads it would."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.cli.main import main
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.errors import ModelError
from agentrl.workflow.models import loading
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
