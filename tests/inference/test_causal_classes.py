"""Every other class of causal language models in transformers, as a tiny random model: sampled as the trainer computes it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from agentrl.workflow.config import build
from agentrl.workflow.engines import GenerateRequest
from agentrl.workflow.errors import ModelError
from agentrl.workflow.inference.model_rows import open_rows
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.models.logprobs import token_logprobs
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.trajectory import PolicyRef
from tests.support.causal_classes import CLASSES, REFUSED, tiny_config
from tests.support.families import save_random
from tests.support.small_models import tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.models]
NEAR = 1e-5


def load(folder: Path, model_type: str) -> Policy:
    save_random(folder, tiny_config(model_type, len(tokenizer())))
    return Policy.load(build({"model.lora_r": 2, "model.dtype": "float32"}).model, str(folder), "cpu")


@pytest.mark.parametrize("model_type", [name for name in CLASSES if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES])
def test_causal_class_is_sampled_like_trainer(model_type: str, tmp_path: Path) -> None:
    """Three rows of unequal lengths, two turns each."""
    policy = load(tmp_path, model_type)
    base = PolicyRef(str(tmp_path), policy.base_hash)
    engine = RollingEngine(policy, slots=4)
    requests = [GenerateRequest(tuple(range(5, 5 + length)), base, length, 0, 6, session=length) for length in (1, 5, 9)]
    for _ in range(2):
        completions = [future.result(60) for future in [engine.submit(request) for request in requests]]
        for request, completion in zip(requests, completions, strict=True):
            ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
            with policy.sampling() as model, torch.no_grad():
                logprobs, _ = token_logprobs(model, ids, torch.ones_like(ids))
            assert np.allclose(logprobs[0, len(request.prompt_ids) - 1 :], completion.logprobs, rtol=0, atol=NEAR)
        requests = [
            replace(request, prompt_ids=(*request.prompt_ids, *completion.token_ids, 7, 8), key=request.key + 50)
            for request, completion in zip(requests, completions, strict=True)
        ]
    engine.close()


@pytest.mark.parametrize("model_type", [name for name in REFUSED if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES])
def test_causal_class_that_cannot_be_trained_is_refused(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=REFUSED[model_type]) as caught:
        open_rows(load(tmp_path, model_type))
    assert "--engine openai" in caught.value.hint
