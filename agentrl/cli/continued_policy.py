"""`--model RUN@N`: continues training from a run's policy, with the policy's LoRA or with a new LoRA on the merged weights."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.cli.console import say
from agentrl.cli.resolve_targets import find_trained_policy, is_stored_policy
from agentrl.workflow.config import RunConfig, build
from agentrl.workflow.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.workers.requests.submit import PreparedRun
    from agentrl.workflow.trajectory import PolicyRef

DEQUANTISED_NOTE = "The base was dequantised and the LoRA merged into it: the result is a full-precision model."
FREE_KEYS = ("path", "lora", "lora_dropout", "dtype", "sampler_dtype", "attn_implementation", "numerics")
"""The keys of the section `model` that may differ between the config and the run whose weights are continued."""


def resolve_start(config: RunConfig, origins: Mapping[str, str]) -> "tuple[RunConfig, PolicyRef | None]":
    """Return the config and the initial weights for a run that continues a policy.

    If `model.path` does not name a run's policy, return the config as it is, and None as the weights. Raise NotFoundError if
    the run or the version does not exist. Raise ConfigError if an option does not fit the LoRA of the policy, or if
    `model.lora` is "new" and the policy has no LoRA.
    """
    from agentrl.workflow.trajectory import PolicyRef

    if not is_stored_policy(config.model.path):
        if config.model.lora == "new":
            raise ConfigError("--lora new requires a run's policy.", "Write --model RUN@3, or leave --lora out.")
        return config, None
    run_config, ref, _ = find_trained_policy(config.model.path, "--model")
    changes = {"path": f"{run_config.name}@{ref.version}", "lora": config.model.lora}
    if config.model.lora == "new":
        section = config.model.model_copy(update=changes)
        return config.model_copy(update={"model": section}), PolicyRef(ref.base, ref.base_hash)
    chosen = {key: value for key, value in config.model.model_dump().items() if origins[f"model.{key}"] != "default"}
    _refuse_other_options(chosen, run_config, str(ref.base))
    section = run_config.model.model_copy(update={key: value for key, value in chosen.items() if key in FREE_KEYS} | changes)
    config = build(config.flat() | {f"model.{key}": value for key, value in section})
    return config, replace(ref, version=0)


def with_origin(prepared: "PreparedRun", policy: str, lora: str = "continue", merges: bool = False) -> "PreparedRun":
    """Return the prepared run with its origin (run, version, kind of LoRA) in `manifest["from"]`. If `merges` is True, the run
    starts from the merged weights. Raise ModelError or CheckpointError if the weights cannot be merged.
    """
    run_config, ref, manifest = find_trained_policy(policy, "--model")
    submission = prepared.submission
    origin = {"run": run_config.name, "version": ref.version, "lora": lora}
    submission = replace(submission, manifest={**submission.manifest, "from": origin})
    if merges:
        base, measured = merge_base(run_config, ref, manifest), submission.evaluation
        submission = replace(submission, policy=base, evaluation=measured and replace(measured, policy=base))
    return replace(prepared, submission=submission)


def merge_base(run_config: RunConfig, ref: "PolicyRef", manifest: Mapping[str, Any]) -> "PolicyRef":
    """Return the policy merged into the model `RUN-vN` in agentrl's models folder. The model is written only if it does not
    exist yet. Raise ConflictError if another model has this name. Raise ModelError or CheckpointError if the policy cannot be
    merged.
    """
    from agentrl.workflow.models.lookup import base_hash, refuse_existing
    from agentrl.workflow.settings import settings
    from agentrl.workflow.trajectory import PolicyRef

    where = settings()
    target = where.models_dir / f"{run_config.name}-v{ref.version}"
    if not _is_made_of(target, ref):
        refuse_existing(target, overwrite=False)
        target.parent.mkdir(parents=True, exist_ok=True)
        from agentrl.workflow.training.merging import merge

        say(f"Merging {run_config.name}@{ref.version} into {str(target)!r} as the base of a new LoRA.")
        if merge(ref, run_config.model, manifest, target, where.device, where.threads)["dequantised"]:
            say(DEQUANTISED_NOTE)
    return PolicyRef(str(target), base_hash(target))


def _is_made_of(target: Path, ref: "PolicyRef") -> bool:
    from agentrl.workflow.checkpoints import RECORD

    try:
        record = json.loads((target / RECORD).read_text())
        return bool((record["stage"], record["sha256"], record["base_hash"]) == ("merge", ref.sha256, ref.base_hash))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _refuse_other_options(chosen: Mapping[str, Any], run_config: RunConfig, base: str) -> None:
    from agentrl.workflow.models.lookup import lora_rank

    there = run_config.model.model_dump()
    if "lora_r" in chosen and there["lora_r"] is None and Path(base).is_dir():
        there["lora_r"] = lora_rank(run_config.model, Path(base))
    other = [key for key, value in chosen.items() if key not in FREE_KEYS and value != there[key]]
    if other:
        stored_values = ", ".join(f"model.{key}={there[key]}" for key in other)
        raise ConfigError(
            f"A run that continues the policy of {run_config.name!r} must have {stored_values}.",
            "Leave your value out, or pass --lora new.",
        )
