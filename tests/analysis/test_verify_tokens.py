"""Tokens scored and drawn again: rounding gives ties at most, other weights mismatches; forks, adapters, long rows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.workflow.analysis import verify_tokens
from agentrl.workflow.analysis.verify_tokens import check_tokens
from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.config import ModelConfig, RolloutConfig
from agentrl.workflow.datasets.arithmetic import arithmetic
from agentrl.workflow.engines import GenerateRequest
from agentrl.workflow.envs.arithmetic import arithmetic as env
from agentrl.workflow.errors import ModelError
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.inference.sampling import (
    cumulative_probabilities,
    distribution,
    draw_distance,
    lowest_logit,
    mask_below,
    uniforms,
)
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.trajectory import ROOT, Episode, Message, PolicyRef, SamplingKey, Step
from tests.support.reference_sampler import alone, draw
from tests.support.small_models import tiny_calling

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SCHEMAS = [tool.schema for tool in env.toolset().values()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that has learned to call the calculator, and little else."""
    return tiny_calling(tmp_path_factory.mktemp("model"))


def sampled(policy: Policy, ref: PolicyRef, count: int = 24, length: int = 40) -> list[tuple[Episode, SamplingKey]]:
    """Episodes of one step, sampled together."""
    engine = RollingEngine(policy)
    asked = []
    for task, sample in zip(arithmetic.load("train"), range(count), strict=False):
        prompt = policy.chat.opening(task.messages, SCHEMAS)
        key = SamplingKey(0, "train", 0, task.key, sample)
        asked.append((task, prompt, key, engine.submit(GenerateRequest(prompt, ref, key.of_turn(prompt, 0), 0, length))))
    made = []
    for task, prompt, key, future in asked:
        said = future.result()
        message = policy.chat.parse(said.token_ids)
        step = Step(0, task.messages, prompt, said.token_ids, said.logprobs, said.finish_reason, message, ref.version)
        made.append((Episode(task, key.sample, (step,)), key))
    engine.close()
    return made


def reports(policy: Policy, ref: PolicyRef, episodes: Sequence[tuple[Episode, SamplingKey]], **rollout: Any) -> list[Any]:
    how = RolloutConfig(**rollout)
    return [check_tokens(episode, {0: ref}, {}, policy, SCHEMAS, key, how) for episode, key in episodes]


def sampled_alone(policy: Policy, count: int = 6, length: int = 24, **how: Any) -> list[tuple[Episode, SamplingKey]]:
    """Episodes of one step, sampled in that way."""
    ref = PolicyRef(str(policy.folder), policy.base_hash)
    made = []
    for task, sample in zip(arithmetic.load("train"), range(count), strict=False):
        prompt = policy.chat.opening(task.messages, SCHEMAS)
        key = SamplingKey(0, "train", 0, task.key, sample)
        said = alone(policy, GenerateRequest(prompt, ref, key.of_turn(prompt, 0), 0, length, **how))
        message = policy.chat.parse(said.token_ids)
        step = Step(0, task.messages, prompt, said.token_ids, said.logprobs, said.finish_reason, message, 0)
        made.append((Episode(task, key.sample, (step,)), key))
    return made


def disturbed(policy: Policy, folder: Path, by: float) -> PolicyRef:
    """A checkpoint of the policy's weights with noise of that size on each of them."""
    folder.mkdir()
    policy.save_weights(folder / sealed_folder.WEIGHTS)
    noise = torch.Generator().manual_seed(0)
    weights = load_file(folder / sealed_folder.WEIGHTS)
    save_file(
        {name: w + by * torch.randn(w.shape, generator=noise) for name, w in weights.items()}, folder / sealed_folder.WEIGHTS
    )
    return PolicyRef("", policy.base_hash, str(folder), sealed_folder.sha256_file(folder / sealed_folder.WEIGHTS), 1)


@pytest.mark.slow
def test_check_tokens_gives_ties_for_rounding_else_mismatches(model: Path, tmp_path: Path) -> None:
    policy = Policy.load(ModelConfig(), str(model), "cpu", 1)
    episodes = sampled(policy, PolicyRef(str(model), policy.base_hash))
    nearly = reports(policy, disturbed(policy, tmp_path / "nearly", 1e-6), episodes)
    assert all(report.same for report in nearly)
    assert max(step.max_difference for report in nearly for step in report.steps) > 1e-7
    wholly = reports(policy, disturbed(policy, tmp_path / "wholly", 0.3), episodes)
    assert sum(report.draw is not None for report in wholly) > len(episodes) / 2
    assert all(report.logprob is not None for report in wholly)


@pytest.mark.parametrize(("numerics", "ties"), [("fast", 1), ("exact", 0)])
def test_check_tokens_boundary_draw_is_tie_unless_exact(model: Path, numerics: str, ties: int) -> None:
    policy = Policy.load(ModelConfig.model_validate({"path": str(model), "numerics": numerics}), str(model), "cpu", 1)
    ref = PolicyRef(str(model), policy.base_hash)
    ((episode, _),) = sampled(policy, ref, count=1, length=1)
    step = episode.steps[0]
    with policy.sampling() as module, torch.no_grad():
        logits = module(input_ids=torch.tensor([step.prompt_ids])).logits[0, -1:]
    everything, cumulative = distribution(logits, 1.0)
    keys = np.arange(2_000_000, dtype=np.uint64)
    draws = torch.from_numpy(uniforms(keys, np.zeros_like(keys))) * cumulative[0, -1]
    likely = int(everything[0].argmax())
    away = (draws - cumulative[0, likely]).clamp(max=0).abs() + (draws >= cumulative[0, likely])
    key = int(away.argmin())  # the draw that is closest below the end of the likeliest token's share
    neighbour = likely + 1
    other = replace(step, sampled_ids=(neighbour,), behavior_logprobs=(float(everything[0, neighbour]),))
    (report,) = reports(policy, ref, [(replace(episode, steps=(other,)), FixedKey(key))])  # type: ignore[list-item]
    assert (report.steps[0].ties, report.steps[0].mismatches) == (ties, 1 - ties)
    assert report.logprob is None


class FixedKey:
    """A key whose bits are given."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def of_step(self, episode: Episode, index: int) -> int:
        """These, from the first position on."""
        return self.bits


def test_check_tokens_of_long_row_is_the_same_in_parts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.model_validate({"path": str(model), "numerics": "exact"})
    policy = Policy.load(config, str(model), "cpu", 1)
    ref = PolicyRef(str(model), policy.base_hash)
    episodes = sampled(policy, ref, count=2)
    whole = reports(policy, ref, episodes)
    monkeypatch.setattr(verify_tokens, "BLOCK", 7)
    monkeypatch.setattr(verify_tokens, "CHUNK", 3)
    assert reports(policy, ref, episodes) == whole
    assert all(report.same and report.steps[0].tokens > 7 for report in whole)


def test_check_tokens_of_adapter_uses_its_base(model: Path, tmp_path: Path) -> None:
    config = ModelConfig.model_validate({"path": str(model), "lora_r": 4})
    policy = Policy.load(config, str(model), "cpu", 1)
    adapter = disturbed(policy, tmp_path / "adapter", 0.2)
    episodes = sampled(policy, adapter, count=8)
    found = reports(policy, adapter, episodes)
    assert all(report.same and report.precision == "float32" for report in found)
    assert any(not report.same for report in reports(policy, PolicyRef(str(model), policy.base_hash), episodes))


def test_check_tokens_refuses_token_beyond_vocabulary(model: Path) -> None:
    policy = Policy.load(ModelConfig(), str(model), "cpu", 1)
    ref = PolicyRef(str(model), policy.base_hash)
    ((episode, key),) = sampled(policy, ref, count=1)
    odd = replace(episode.steps[0], sampled_ids=(10**6, *episode.steps[0].sampled_ids[1:]))
    with pytest.raises(ModelError, match="1000000"):
        reports(policy, ref, [(replace(episode, steps=(odd,)), key)])


def test_draw_distance_is_probability_between() -> None:
    logits = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64).log().repeat(3, 1)
    _, cumulative = distribution(logits, 1.0)
    numbers = torch.tensor([0.1, 0.35, 0.9], dtype=torch.float64)
    assert draw(cumulative, numbers).tolist() == [0, 1, 2]
    assert draw_distance(cumulative, numbers, torch.tensor([0, 1, 2])).tolist() == [0, 0, 0]
    assert draw_distance(cumulative, numbers, torch.tensor([1, 0, 0])).tolist() == pytest.approx([0.1, 0.15, 0.7])


def test_check_tokens_verifies_several_turns_and_chains(model: Path) -> None:
    policy = Policy.load(ModelConfig(), str(model), "cpu", 1)
    ref = PolicyRef(str(model), policy.base_hash)
    task = next(iter(arithmetic.load("train")))
    episode, key = Episode(task), SamplingKey(0, "train", 0, task.key, 0)
    opening = policy.chat.opening(task.messages, SCHEMAS)
    engine = RollingEngine(policy)
    for index, (parent, heard) in enumerate(
        [(ROOT, task.messages), (0, (Message("tool", "42", name="calculator"),)), (ROOT, task.messages)]
    ):
        new = opening if parent == ROOT else policy.chat.continuation(heard, SCHEMAS)[0]
        assert new is not None
        prompt = episode.tokens_of(parent) + new
        said = engine.submit(GenerateRequest(prompt, ref, key.of_next(episode, prompt), 0, 12, 1.5)).result()
        message = policy.chat.parse(said.token_ids)
        step = Step(
            index, heard, new, said.token_ids, said.logprobs, said.finish_reason, message, 0, parent=parent, chain=index // 2
        )
        episode = episode.with_step(replace(step, new_row="asked again" if index == 2 else None))
    engine.close()
    policies = dict.fromkeys(range(3), ref)
    how = RolloutConfig(temperature=1.5)
    report = check_tokens(episode, policies, {}, policy, SCHEMAS, key, how)
    assert (report.draw, report.logprob) == (None, None)
    assert [score.mismatches for score in report.steps] == [0, 0, 0]
    other = check_tokens(episode, policies, {}, policy, SCHEMAS, replace(key, seed=1), how)
    assert other.draw is not None


def test_check_tokens_of_fork_uses_own_key_after_parent(model: Path) -> None:
    policy = Policy.load(ModelConfig(), str(model), "cpu", 1)
    ref = PolicyRef(str(model), policy.base_hash)
    ((parent, _),) = sampled(policy, ref, count=1)
    asked = (Message("tool", "42", name="calculator"),)
    more, _ = policy.chat.continuation(asked, SCHEMAS)
    assert more is not None
    fork = replace(parent, parent_id=7, fork_step=1, inherited=1)
    key = SamplingKey.of(fork, 0, "fork", 0)
    engine = RollingEngine(policy)
    prompt = fork.context_ids + more
    said = engine.submit(GenerateRequest(prompt, ref, key.of_next(fork, prompt), 0, 12)).result()
    engine.close()
    step = Step(1, asked, more, said.token_ids, said.logprobs, said.finish_reason, policy.chat.parse(said.token_ids), 0)
    grown = fork.with_step(step)
    report = check_tokens(grown, {1: ref}, {}, policy, SCHEMAS, key, RolloutConfig())
    assert report.same
    assert (report.parents, report.prompts, [score.step for score in report.steps]) == (1, 1, [1])
    other = check_tokens(grown, {1: ref}, {}, policy, SCHEMAS, replace(key, seed=1), RolloutConfig())
    assert other.draw is not None


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize(
    "how", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.8, "min_p": 0.05}], ids=str
)
def test_check_tokens_needs_limits_of_the_draws(model: Path, how: dict[str, Any], numerics: str) -> None:
    policy = Policy.load(ModelConfig.model_validate({"path": str(model), "numerics": numerics}), str(model), "cpu", 1)
    ref = PolicyRef(str(model), policy.base_hash)
    episodes = sampled_alone(policy, temperature=1.5, **how)
    found = reports(policy, ref, episodes, temperature=1.5, **how)
    assert all(report.same for report in found)
    assert sum(step.same for report in found for step in report.steps) > 24
    without = reports(policy, ref, episodes, temperature=1.5)
    assert any(report.draw is not None for report in without)
    assert all(report.logprob is None for report in without), "a limit changes no logprob"
    gone = reports(policy, ref, episodes, temperature=1.5, engine="continuous")
    assert all(report.same for report in gone), "of an engine that is not here any more no draw can be repeated"


def test_check_tokens_impossible_token_is_no_tie(model: Path) -> None:
    policy = Policy.load(ModelConfig(), str(model), "cpu", 1)
    ref = PolicyRef(str(model), policy.base_hash)
    ((episode, key),) = sampled_alone(policy, count=1, length=1, top_k=1)
    step = episode.steps[0]
    other = replace(step, sampled_ids=(step.sampled_ids[0] + 1,))
    (report,) = reports(policy, ref, [(replace(episode, steps=(other,)), key)], top_k=1)
    assert report.draw is not None
    assert report.draw.distance == 1.0
    assert report.draw.drawn_id == step.sampled_ids[0]


@pytest.mark.parametrize(("numerics", "ties"), [("fast", 1), ("exact", 0)])
def test_check_tokens_at_limit_is_tie_unless_exact(model: Path, numerics: str, ties: int) -> None:
    policy = Policy.load(ModelConfig.model_validate({"path": str(model), "numerics": numerics}), str(model), "cpu", 1)
    ref = PolicyRef(str(model), policy.base_hash)
    ((episode, _),) = sampled_alone(policy, count=1, length=1)
    step = episode.steps[0]
    with policy.sampling() as module, torch.no_grad():
        everything, _ = distribution(module(input_ids=torch.tensor([step.prompt_ids])).logits[0, -1:], 1.0)
    best = everything[0].sort(descending=True)
    reached = float(best.values[:3].double().exp().sum())  # by the three likeliest: a little more asks for the fourth too
    fourth = int(best.indices[3])
    limit = torch.tensor([reached + 2e-6], dtype=torch.float64)
    sums = cumulative_probabilities(mask_below(everything, lowest_logit(everything, torch.tensor([0]), limit, torch.zeros(1))))
    keys = np.arange(100_000, dtype=np.uint64)
    drawn = torch.searchsorted(sums[0], torch.from_numpy(uniforms(keys, np.zeros_like(keys))) * sums[0, -1], right=True)
    key = int((drawn == fourth).nonzero()[0, 0])
    other = replace(step, sampled_ids=(fourth,), behavior_logprobs=(float(everything[0, fourth]),))
    fixed: Any = FixedKey(key)
    (report,) = reports(policy, ref, [(replace(episode, steps=(other,)), fixed)], top_p=reached - 2e-6)
    assert (report.steps[0].ties, report.steps[0].mismatches) == (ties, 1 - ties)


def test_check_tokens_verifies_stop_string_and_reason(model: Path) -> None:
    policy = Policy.load(ModelConfig(), str(model), "cpu", 1)
    ref = PolicyRef(str(model), policy.base_hash)
    whole, _ = sampled_alone(policy, count=1)[0]
    ids = whole.steps[0].sampled_ids
    text = policy.chat.decode(ids[:8])
    how: dict[str, Any] = {"stop": (text[-len(policy.chat.decode(ids[6:8])) - 1 :],)}
    ((episode, key),) = sampled_alone(policy, count=1, **how)
    step = episode.steps[0]
    assert (step.sampled_ids, step.finish_reason) == (ids[:8], "stop")
    assert reports(policy, ref, [(episode, key)], **how)[0].same
    (without,) = reports(policy, ref, [(episode, key)])
    assert (without.ending.recorded, without.ending.found, without.same) == ("stop", None, False)
    for wrong in (replace(step, finish_reason="length"), replace(whole.steps[0])):
        (report,) = reports(policy, ref, [(replace(episode, steps=(wrong,)), key)], **how)
        assert (report.ending.step, report.ending.recorded, report.ending.found) == (0, wrong.finish_reason, 8)


@pytest.fixture(scope="module")
def halves(model: Path) -> tuple[Policy, PolicyRef, list[tuple[Episode, SamplingKey]]]:
    """The model in bfloat16, and episodes that it sampled together."""
    policy = Policy.load(ModelConfig(dtype="bfloat16"), str(model), "cpu", 1)
    ref = PolicyRef(str(model), policy.base_hash)
    return policy, ref, sampled(policy, ref, count=12)


Halves = tuple[Policy, PolicyRef, list[tuple[Episode, SamplingKey]]]


def test_check_tokens_of_bfloat16_is_within_measured_noise(halves: Halves) -> None:
    found = reports(*halves)
    assert all(report.same for report in found)
    assert all(report.noise.noise > 0 for report in found)
    assert max(step.max_difference for report in found for step in report.steps) > 1e-3
    assert max(report.draw_tolerance for report in found) < 0.05


def test_check_tokens_of_bfloat16_finds_changed_token(halves: Halves) -> None:
    policy, ref, episodes = halves
    forged = []
    for episode, key in episodes:
        step = episode.steps[0]
        with policy.sampling() as module, torch.no_grad():
            scores = module(input_ids=torch.tensor([step.prompt_ids])).logits[0, -1].float().log_softmax(-1)
        scores[step.sampled_ids[0]] = -torch.inf
        other = int(scores.argmax())  # the likeliest of the others, with its true logprob
        ids, logprobs = (other, *step.sampled_ids[1:]), (float(scores[other]), *step.behavior_logprobs[1:])
        forged.append((replace(episode, steps=(replace(step, sampled_ids=ids[:1], behavior_logprobs=logprobs[:1]),)), key))
    found = reports(policy, ref, forged)
    assert all(report.draw is not None for report in found)
    assert all(report.logprob is None for report in found)


def test_check_tokens_of_bfloat16_finds_changed_logprob(halves: Halves) -> None:
    policy, ref, episodes = halves
    forged = []
    for episode, key in episodes:
        step = episode.steps[0]
        logprobs = (step.behavior_logprobs[0] - 1.0, *step.behavior_logprobs[1:])
        forged.append((replace(episode, steps=(replace(step, behavior_logprobs=logprobs),)), key))
    found = reports(policy, ref, forged)
    assert all(report.logprob is not None and report.logprob.token == 0 for report in found)
    assert all(report.draw is None for report in found)


def test_check_tokens_of_bfloat16_finds_small_changes(halves: Halves) -> None:
    policy, ref, episodes = halves
    episode, key = max(episodes, key=lambda pair: len(pair[0].steps[0].sampled_ids))
    (honest,) = reports(policy, ref, [(episode, key)])
    step = episode.steps[0]
    logprobs = tuple(value - 3 * honest.noise.noise for value in step.behavior_logprobs)
    (report,) = reports(policy, ref, [(replace(episode, steps=(replace(step, behavior_logprobs=logprobs),)), key)])
    assert not report.noise.same
    assert report.noise.mean < -report.noise.max_mean


def test_check_tokens_of_bfloat16_finds_weights_of_one_update(halves: Halves, tmp_path: Path) -> None:
    policy, ref, _ = halves
    later = disturbed(policy, tmp_path / "later", 0.02)
    found = reports(policy, ref, sampled(policy, later, count=6))
    assert all(report.noise is not None and not report.noise.same for report in found)
    assert all(report.same for report in reports(policy, later, sampled(policy, later, count=6)))


def test_check_tokens_tolerance_is_fixed_for_8_bits_or_servers(model: Path, halves: Halves) -> None:
    policy, ref, episodes = halves
    (other,) = reports(policy, ref, episodes[:1], engine="openai")
    assert (other.noise, other.logprob_tolerance, other.draw_tolerance) == (None, *verify_tokens.TOLERANCES["coarse"])
    eight = Policy.load(ModelConfig(load_in_8bit=True), str(model), "cpu", 1)
    (report,) = reports(eight, ref, sampled(eight, ref, count=1))
    assert (report.noise, report.logprob_tolerance) == (None, 1.0)
