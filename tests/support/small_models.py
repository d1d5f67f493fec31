"""Small random models in the hub's format, for tests that need real weights but no skill."""

import atexit
import shutil
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch import nn
from transformers import PreTrainedModel, Qwen2Tokenizer

from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.datasets.arithmetic import arithmetic
from agentrl.workflow.inference.kv_cache import SlotCache
from agentrl.workflow.models.cache_layout import CacheLayout
from agentrl.workflow.models.tiny import save_tiny, tiny_model, tiny_tokenizer
from agentrl.workflow.training.offline_training import Recipe
from agentrl.workflow.training.supervised import demonstrations, sft, texts_of

quantised = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is missing, as it may be beside a GPU")
"""Marks a test of a base in 4 or 8 bits."""


@cache
def tokenizer() -> Qwen2Tokenizer:
    """The tiny tokenizer, as a warm-up on 200 arithmetic demonstrations makes it."""
    return tiny_tokenizer(texts_of(demonstrations(arithmetic, 200, seed=0)))


def first_layer(model: nn.Module) -> nn.Module:
    """What every pass of the model begins with: it is given the ids, (B, T)."""
    assert isinstance(model, PreTrainedModel)
    return model.get_input_embeddings()


def chat() -> Chat:
    """The tiny tokenizer's chat."""
    return Chat(tokenizer())


def tiny_random(folder: Path, seed: int = 0, layers: int = 2, width: int = 32) -> Path:
    """A random Qwen2 of about 40,000 parameters with the tiny tokenizer, saved in `folder`."""
    save_tiny(folder, tiny_model(len(tokenizer()), seed, layers, width), tokenizer())
    return folder


def plain_slots(layers: int) -> SlotCache:
    """Slots for layers that attend to all earlier tokens."""
    return SlotCache(CacheLayout(tuple("keys" for _ in range(layers)), (1,) * layers, None, frozenset()))


def tiny_calling(folder: Path, layers: int = 2, width: int = 32) -> Path:
    """A model of that size, in `folder`, that has learned to call the calculator, and little else."""
    return Path(shutil.copytree(_calling_model(layers, width), folder / "calling"))


@cache
def _calling_model(layers: int, width: int) -> Path:
    """The model that `tiny_calling` copies, trained once in each process: that takes seconds."""
    folder = Path(tempfile.mkdtemp(prefix="arl-", dir="/tmp"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    base = tiny_random(folder / "random", layers=layers, width=width)
    config = ModelConfig.model_validate({"path": str(base), "lora_r": 0})
    return sft(arithmetic, str(base), folder / "calling", recipe=Recipe(60, 16, 1e-2), config=config, device="cpu").folder
