"""The sampler's logprobs beside the trainer's, of the same tokens: by precision, with LoRA, in 4 and 8 bits.

The engine samples four groups of four. The trainer scores the same tokens with the same weights, and the ratio of both
probabilities is what an importance weight would be: `outside` is the share of tokens whose ratio is below 0.9 or above 1.1.
Every token is also scored and drawn again as `agentrl replay --verify tokens` does it, with the same tolerances.
"""

import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from agentrl.workflow.analysis.verify_tokens import check_tokens
from agentrl.workflow.checkpoints.sealed_folder import WEIGHTS, sha256_file
from agentrl.workflow.config import RunConfig
from agentrl.workflow.models.logprobs import token_logprobs
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training.trainer import Trainer
from agentrl.workflow.trajectory import Group, PolicyRef
from bench.gpu.part import Part, Row
from bench.gpu.shapes import shape_folder
from bench.performance.memory_ours import GROUP_SIZE, Sampled, config_of, groups_of, key_of, prompts, sampled
from bench.performance.models import saved

KINDS: Mapping[str, Mapping[str, Any]] = {
    "LoRA, bfloat16": {"model.dtype": "bfloat16"},
    "LoRA, float16": {"model.dtype": "float16"},
    "LoRA on 4 bits, bfloat16": {"model.load_in_4bit": True, "model.dtype": "bfloat16"},
    "LoRA on 4 bits, float16": {"model.load_in_4bit": True, "model.dtype": "float16"},
    "LoRA, float32": {"model.dtype": "float32"},
    "all weights, float32": {"model.lora_r": 0, "model.dtype": "float32"},
    "LoRA on 8 bits, bfloat16": {"model.load_in_8bit": True, "model.dtype": "bfloat16"},
}
"""In the order of their value."""
SMALL_KINDS = ("LoRA, bfloat16", "LoRA on 4 bits, bfloat16", "all weights, float32")
TOKENS, SMALL_TOKENS = 64, 8
LEAST_SECONDS = 8.0


def measure(part: Part) -> None:
    """Measure a row for each model and kind."""
    with tempfile.TemporaryDirectory() as folder:
        for model in ("Qwen2-0.5B", "bench") if part.gpu else ("tiny",):
            path = shape_folder(model, part) if model == "Qwen2-0.5B" else saved("bench" if part.gpu else "tiny", Path(folder))
            for kind in KINDS if part.gpu else SMALL_KINDS:
                name = f"{model}, {kind}"
                if "bits" in kind and not find_spec("bitsandbytes"):
                    part.skip(name, "bitsandbytes is missing")
                    continue
                config = config_of({"model.load_in_4bit": False, "update.learning_rate": 1e-4, **KINDS[kind]})
                part.attempt(name, lambda path=path, config=config: _row(part, path, config), LEAST_SECONDS)  # type: ignore[misc]
                torch.cuda.empty_cache()


def _row(part: Part, path: Path, config: RunConfig) -> Row:
    policy = Policy.load(config.model, str(path))
    with tempfile.TemporaryDirectory() as folder:
        ref = _disturb(policy, Path(folder) / "v1")
        policy.publish(ref)
        rows = sampled(policy, ref, TOKENS if part.gpu else SMALL_TOKENS)
        groups = groups_of(rows)
        return {
            **_compare_with_trainer(policy, rows),
            **_score_again(policy, ref, groups, config),
            "grad_norm": Trainer(policy, config).update(groups, 0).metrics["grad_norm"],
        }


@torch.no_grad()
def _compare_with_trainer(policy: Policy, rows: Sampled) -> Row:
    ids = [[*prompts()[number // GROUP_SIZE], *tokens] for number, (tokens, _) in enumerate(rows)]
    read = torch.tensor(ids, device=policy.device)  # (B, T), all of one length
    behavior = torch.tensor([logprobs for _, logprobs in rows], device=policy.device)  # (B, sampled)
    with policy.training() as model:
        model.eval()
        logprobs, _ = token_logprobs(model, read, torch.ones_like(read))
    difference = logprobs[:, -behavior.shape[1] :].float() - behavior
    ratio = difference.exp()
    return {
        "tokens": behavior.numel(),
        "difference_mean": float(difference.abs().mean()),
        "difference_max": float(difference.abs().max()),
        "outside": float(((ratio < 0.9) | (ratio > 1.1)).float().mean()),
    }


@torch.no_grad()
def _disturb(policy: Policy, folder: Path) -> PolicyRef:
    """Write a checkpoint somewhat away from the base, so that an adapter's second matrix is not 0."""
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.trainable().values():
        noise = torch.randn(parameter.shape, generator=generator) * 0.1 * float(parameter.std() or 0.01)
        parameter.add_(noise.to(parameter.device, parameter.dtype))
    folder.mkdir()
    policy.save_weights(folder / WEIGHTS)
    return PolicyRef(str(policy.folder), policy.base_hash, str(folder), sha256_file(folder / WEIGHTS), 1)


def _score_again(policy: Policy, ref: PolicyRef, groups: list[Group], config: RunConfig) -> Row:
    episodes = [episode for group in groups for episode in group.episodes]
    reports = [check_tokens(episode, {0: ref}, {}, policy, (), key_of(episode.id), config.rollout) for episode in episodes]
    steps = [step for report in reports for step in report.steps]
    row: Row = {
        "again_max": max(step.max_difference for step in steps),
        "tolerance": reports[0].logprob_tolerance,
        "draws_same": sum(step.same for step in steps),
        "ties": sum(step.ties for step in steps),
        "mismatches": sum(step.mismatches for step in steps),
    }
    wrong: list[object] = [found for report in reports for found in (report.logprob, report.draw) if found is not None]
    wrong += [report.noise for report in reports if report.noise is not None and not report.noise.same]
    return row | ({"failed": f"{len(wrong)} beyond the tolerance, the first {wrong[0]}"} if wrong else {})
