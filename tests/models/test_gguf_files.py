"""`--model FILE.gguf`: a model folder with the dequantised weights, made once; what is no model leaves nothing."""

import struct
from pathlib import Path

import gguf
import pytest
import torch

from agentrl.workflow.config import ModelConfig
from agentrl.workflow.errors import ModelError
from agentrl.workflow.inference.model_rows import open_rows
from agentrl.workflow.models import gguf_files, loading
from agentrl.workflow.models.dequantise import dequantise
from agentrl.workflow.models.lookup import resolve_model
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import settings
from tests.support.gguf_file import write_gguf

pytestmark = pytest.mark.usefixtures("home", "forked_programs")


def test_gguf_file_is_dequantised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "small.gguf"
    write_gguf(file)
    folder = Path(resolve_model(str(file), "arithmetic"))
    assert folder.is_relative_to(settings().cache_dir)
    monkeypatch.setattr(gguf_files, "_convert", None)
    assert resolve_model(str(file), "arithmetic") == str(folder)
    config = ModelConfig.model_validate({"lora_r": 4, "dtype": "float32"})
    facts = loading.check(config, folder)
    assert facts.remarks == ("The weights are those of small.gguf, dequantised to bfloat16.",)
    policy = Policy.load(config, str(folder), "cpu")
    assert open_rows(policy).resumes
    stored = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "blk.0.ffn_up.weight")
    expected = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type)).to(torch.bfloat16).float()
    with policy.sampling() as model:
        assert torch.equal(model.get_submodule("base_model.model.model.layers.0.mlp.up_proj.base_layer").weight, expected)


def test_gguf_file_that_is_no_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", "nosuch")
    write_gguf(tmp_path / "whole.gguf")
    (tmp_path / "half.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes()[:20_000])
    (tmp_path / "text.gguf").write_text("no model")
    for name, reason in {"other": "architecture nosuch is not supported", "half": "", "text": ""}.items():
        file = tmp_path / f"{name}.gguf"
        with pytest.raises(ModelError, match=rf"'{file}' cannot be loaded: .*{reason}") as caught:
            resolve_model(str(file), "arithmetic")
        assert "\n" not in caught.value.message
        assert "--engine llamacpp" in caught.value.hint
    with pytest.raises(ModelError, match="There is no file"):
        resolve_model(str(tmp_path / "absent.gguf"), "arithmetic")
    assert not list((settings().cache_dir / "gguf").iterdir())


def test_gguf_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "endless.gguf"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    file.write_bytes(header + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 4, 1 << 60))  # a list of 2**60 numbers
    with pytest.raises(ValueError, match="the file ends early"):
        dequantise(file, tmp_path / "model")
    assert not (tmp_path / "model").exists()
