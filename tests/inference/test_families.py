"""Each family that the documents name: sampler and trainer compute the same, turn after turn, before and after an update."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.config import ModelConfig, RunConfig, build
from agentrl.workflow.engines import Completion, GenerateRequest
from agentrl.workflow.inference import sampler
from agentrl.workflow.inference.cache_rows import CacheRows, TokenRows
from agentrl.workflow.inference.model_rows import ModelRows
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.inference.sampling import distribution, draw_distance, uniforms
from agentrl.workflow.models import loading
from agentrl.workflow.models.logprobs import token_logprobs
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training.merging import merge_weights
from agentrl.workflow.training.trainer import Trainer
from agentrl.workflow.trajectory import Episode, Group, Message, PolicyRef, Step, Task
from tests.project.documents import DOCS, rows, section
from tests.support.families import FAMILIES, save_random

NEAR = 1e-5
LENGTHS = (1, 2, 5, 5, 9, 14, 21, 21)


def load(folder: Path, family: str, lora_r: int) -> tuple[Policy, RunConfig]:
    """A policy of the family, somewhat away from its base, and a config to train it."""
    run = build({"model.lora_r": lora_r, "model.dtype": "float32", "update.learning_rate": 1e-2})
    policy = Policy.load(run.model, str(save_random(folder / "base", FAMILIES[family]())), "cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return policy, run


def publish(policy: Policy, folder: Path, version: int) -> PolicyRef:
    sha256 = sealed_folder.write(folder, lambda beside: policy.save_weights(beside / policy.weights_name))
    return PolicyRef(str(policy.folder), policy.base_hash, str(folder), sha256, version)


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(3 + (7 * number + length) % 50 for number in range(length))


@torch.no_grad()
def check_row(policy: Policy, request: GenerateRequest, completion: Completion) -> None:
    """The trainer gives the sampled tokens the sampler's logprobs, and the draws choose them from the plain forward pass."""
    ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
    first = len(request.prompt_ids)
    with policy.sampling() as model:
        logprobs, _ = token_logprobs(model, ids, torch.ones_like(ids))
        _, cumulative = distribution(model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1], 1.0)
    assert np.allclose(logprobs[0, first - 1 :], completion.logprobs, rtol=0, atol=NEAR)
    positions = np.arange(request.position, request.position + ids.shape[1] - first, dtype=np.uint64)
    draws = torch.from_numpy(uniforms(np.full(len(positions), request.key, dtype=np.uint64), positions))
    assert float(draw_distance(cumulative, draws, ids[0, first:]).max()) < NEAR


@pytest.mark.parametrize("family", FAMILIES)
def test_family_samples_like_trainer(family: str, tmp_path: Path) -> None:
    check_sampling(family, 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_family_with_full_weights_samples_like_trainer(family: str, tmp_path: Path) -> None:
    check_sampling(family, 0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", [CacheRows, TokenRows])
def test_family_samples_alike_on_the_general_path(
    family: str, way: Callable[[Policy], ModelRows], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "open_rows", way)
    check_sampling(family, 4, tmp_path)


def check_sampling(family: str, lora_r: int, tmp_path: Path) -> None:
    """Rows of unequal lengths, alone and eight at once, three turns each, and a turn that is cut and resumed."""
    policy, _ = load(tmp_path, family, lora_r)
    ref = publish(policy, tmp_path / "v1", 1)
    engine = RollingEngine(policy, slots=8)
    requests = [
        GenerateRequest(prompt_of(length), ref, 40 + row, 0, 6 + row, session=row) for row, length in enumerate(LENGTHS)
    ]
    for turn in range(3):
        completions = [future.result(60) for future in [engine.submit(request) for request in requests]]
        for request, completion in zip(requests, completions, strict=True):
            check_row(policy, request, completion)
        requests = [
            replace(r, prompt_ids=r.prompt_ids + c.token_ids + prompt_of(1 + (row + turn) % 4), key=r.key + 100)
            for row, (r, c) in enumerate(zip(requests, completions, strict=True))
        ]
    alone = replace(requests[3], max_new_tokens=12, session=None)
    whole = engine.submit(alone).result(60)
    check_row(policy, alone, whole)
    cut = len(whole.token_ids) // 2
    rest = replace(alone, prompt_ids=alone.prompt_ids + whole.token_ids[:cut], position=cut, max_new_tokens=12 - cut)
    assert engine.submit(rest).result(60).token_ids == whole.token_ids[cut:]
    engine.close()


def sampled_group(engine: RollingEngine, ref: PolicyRef, number: int) -> Group:
    """A group of four episodes of one prompt, whose reward is the share of even tokens."""
    prompt = prompt_of(4 + number)
    futures = [engine.submit(GenerateRequest(prompt, ref, 10 * number + sample, 0, 6)) for sample in range(4)]
    task = Task(f"train/{number}", (), "")
    episodes = []
    for sample, future in enumerate(futures):
        said = future.result(60)
        step = Step(0, (), prompt, said.token_ids, said.logprobs, said.finish_reason, Message("assistant", ""), ref.version)
        reward = sum(token % 2 == 0 for token in said.token_ids) / len(said.token_ids)
        episodes.append(Episode(task, steps=(step,), status="done", reward=reward, id=10 * number + sample))
    return Group(task, tuple(episodes))


@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_and_merges(family: str, tmp_path: Path) -> None:
    check_training(family, 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_all_weights(family: str, tmp_path: Path) -> None:
    check_training(family, 0, tmp_path)


def check_training(family: str, lora_r: int, tmp_path: Path) -> None:
    """An update on sampled rows changes the weights; the new ones are sampled, and as one merged model they say the same."""
    policy, run = load(tmp_path, family, lora_r)
    trainer = Trainer(policy, run)
    ref = publish(policy, tmp_path / "v1", 1)
    engine = RollingEngine(policy, slots=8)
    update = trainer.update([sampled_group(engine, ref, number) for number in range(3)], 0)
    assert not update.skipped
    assert not update.dropped
    assert update.metrics["sampler_difference_max"] < NEAR
    assert update.metrics["grad_norm"] > 0
    newer = publish(policy, tmp_path / "v2", 2)
    assert newer.sha256 != ref.sha256
    request = GenerateRequest(prompt_of(7), newer, 5, 0, 10)
    check_row(policy, request, engine.submit(request).result(60))
    engine.close()
    ids = torch.tensor([prompt_of(12)])
    with policy.sampling() as model, torch.no_grad():
        expected = model(input_ids=ids).logits
    merged = merge_weights(policy).eval()
    with torch.no_grad():
        assert torch.allclose(merged(input_ids=ids).logits, expected, rtol=0, atol=1e-4)


def test_models_document_shows_how_each_family_runs(tmp_path: Path) -> None:
    table = {family: cells for family, *cells in rows(section(DOCS / "models.md", "## Families"))}
    assert table.keys() == FAMILIES.keys()
    for family, (model_type, way, layers) in table.items():
        folder = save_random(tmp_path / family, FAMILIES[family]())
        facts = loading.check(ModelConfig.model_validate({"lora_r": 4}), folder)
        assert facts.sampler.startswith(way)
        experts = "; no experts" if facts.remarks else ""
        assert layers == ", ".join(f"`{name}`" for name in facts.lora_layers) + experts
        assert f"`{json.loads((folder / 'config.json').read_text())['model_type']}`" == model_type
