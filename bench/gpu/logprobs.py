"""The sampler's logprobs beside the trainer's, of the same tokens: by precision, with LoRA, in 4 bits.

The engine samples four groups of four; the trainer's update says how far its own logprobs of these tokens are, before its
step; and every token is scored and drawn again as `agentrl replay --verify tokens` does it, with the same tolerances.
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
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training.trainer import Trainer
from agentrl.workflow.trajectory import Group, PolicyRef
from bench.gpu.kept import Part, Row
from bench.performance.memory_ours import config_of, groups_of, key_of, sampled
from bench.performance.models import ModelName, half_billion, saved

KINDS: Mapping[str, Mapping[str, Any]] = {
    "all weights, float32": {"model.lora_r": 0, "model.dtype": "float32"},
    "LoRA, float32": {"model.dtype": "float32"},
    "LoRA, bfloat16": {"model.dtype": "bfloat16"},
    "LoRA on 4 bits, bfloat16": {"model.load_in_4bit": True, "model.dtype": "bfloat16"},
    "LoRA on 8 bits, bfloat16": {"model.load_in_8bit": True, "model.dtype": "bfloat16"},
}
TOKENS, FEW_TOKENS = 64, 8
SECONDS = 20.0


def measure(part: Part) -> None:
    """A row for each model and kind."""
    with tempfile.TemporaryDirectory() as folder:
        small: ModelName = "bench" if part.gpu else "tiny"
        models = {str(small): saved(small, Path(folder))}
        if part.gpu:
            models["Qwen2-0.5B"] = half_billion(Path(folder) / "half")
        for model, path in models.items():
            for kind, options in KINDS.items():
                name = f"{model}, {kind}"
                if "bits" in kind and not find_spec("bitsandbytes"):
                    part.miss(name, "bitsandbytes is not here")
                else:
                    config = config_of({"model.load_in_4bit": False, "update.learning_rate": 1e-4, **options})
                    part.attempt(name, lambda path=path, config=config: _row(part, path, config), SECONDS)  # type: ignore[misc]
                torch.cuda.empty_cache()


def _row(part: Part, path: Path, config: RunConfig) -> Row:
    policy = Policy.load(config.model, str(path))
    with tempfile.TemporaryDirectory() as folder:
        ref = _disturbed(policy, Path(folder) / "v1")
        policy.publish(ref)
        groups = groups_of(sampled(policy, ref, TOKENS if part.gpu else FEW_TOKENS))
        trainer = Trainer(policy, config)
        update = trainer.update(groups, 0)
        return _differences(policy, ref, groups, config) | {
            "trainer_max": update.metrics["sampler_difference_max"],
            "trainer_mean": update.metrics["sampler_difference_mean"],
            "grad_norm": update.metrics["grad_norm"],
        }


@torch.no_grad()
def _disturbed(policy: Policy, folder: Path) -> PolicyRef:
    """A checkpoint somewhat away from the base, so that an adapter's second matrix is not 0."""
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.trainable().values():
        noise = torch.randn(parameter.shape, generator=generator) * 0.1 * float(parameter.std() or 0.01)
        parameter.add_(noise.to(parameter.device, parameter.dtype))
    folder.mkdir()
    policy.save_weights(folder / WEIGHTS)
    return PolicyRef(str(policy.folder), policy.base_hash, str(folder), sha256_file(folder / WEIGHTS), 1)


def _differences(policy: Policy, ref: PolicyRef, groups: list[Group], config: RunConfig) -> Row:
    episodes = [episode for group in groups for episode in group.episodes]
    reports = [check_tokens(episode, {0: ref}, {}, policy, (), key_of(episode.id), config.rollout) for episode in episodes]
    steps = [step for report in reports for step in report.steps]
    row: Row = {
        "tokens": sum(step.tokens for step in steps),
        "again_max": max(step.max_difference for step in steps),
        "tolerance": reports[0].logprob_tolerance,
        "draws_same": sum(step.same for step in steps),
        "ties": sum(step.ties for step in steps),
        "mismatches": sum(step.mismatches for step in steps),
    }
    wrong = [found for report in reports for found in (report.logprob, report.draw) if found is not None]
    return row | ({"failed": f"{len(wrong)} beyond the tolerance, the first {wrong[0]}"} if wrong else {})
