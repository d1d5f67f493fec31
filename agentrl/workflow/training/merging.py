"""The conversion of a policy to one plain model: its LoRA adapter is added to its base, and a quantised base is dequantised."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from agentrl.workflow.checkpoints import RECORD, write_error
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.errors import ModelError
from agentrl.workflow.models import loading
from agentrl.workflow.models.policy import Policy, open_with_weights
from agentrl.workflow.training.offline_checkpoint import AGAIN_HINT
from agentrl.workflow.trajectory import PolicyRef


def merge(
    ref: PolicyRef, config: ModelConfig, manifest: Mapping[str, Any], target: Path, device: str, threads: int
) -> dict[str, Any]:
    """Make a model folder from a stored policy. Return the record of the folder's origin. Raise ModelError if the base cannot
    be loaded, differs from the run's base, or the disk has no room for the new model. Raise CheckpointError if the policy's
    weights differ from the recorded ones.

    Args:
        config: the section `model` of the policy's run.
        manifest: the run's manifest, with its hashes of tokenizer and template.
        target: the model folder to make.
        device: the device that loads the model.
        threads: CPU threads; 0: torch's choice.
    """
    policy = open_with_weights(ref, config, manifest, device, threads)
    record = {"stage": "merge", **asdict(ref), "kind": policy.kind, "dequantised": config.load_in_4bit or config.load_in_8bit}
    record["tool_format"] = policy.chat.manner.tool_format.name
    write_model(target, merge_weights(policy), policy.tokenizer, record)
    return record


def write_model(folder: Path, module: Any, tokenizer: Any, record: Mapping[str, Any]) -> None:
    """Write the model folder atomically, with the record of its origin. Raise ModelError if the disk has no room for it next to
    the existing folder. Raise CheckpointError if writing failed; an existing folder is unchanged.
    """
    _check_room(folder, module)
    beside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        module.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        (beside / RECORD).write_text(json.dumps(record, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    except (OSError, SafetensorError) as error:
        raise write_error(folder, error, AGAIN_HINT, "model") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _check_room(folder: Path, module: Any) -> None:
    needed = sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in module.state_dict().values()}.values())
    there = next(parent for parent in folder.absolute().parents if parent.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        message = f"The model needs {needed >> 20} MiB, and {str(there)!r} has {free >> 20} MiB free; nothing was written."
        raise ModelError(message, "Free disk space, or name a folder on another disk.")


def merge_weights(policy: Policy) -> Any:
    """Return the trained weights as a model without adapter and quantisation. The policy cannot be used afterwards.

    A base in 4 or 8 bits is dequantised first. So the adapter is added to exactly the numbers that it was trained with. The sum
    is not quantised again, as `merge_and_unload` would do.
    """
    with policy.training() as module:
        if policy.kind == "full":
            return module
        if not (policy.config.load_in_4bit or policy.config.load_in_8bit):
            return module.merge_and_unload()  # type: ignore[operator]
        return _beside_whole_base(policy).merge_and_unload()


@torch.no_grad()
def _beside_whole_base(policy: Policy) -> Any:
    from peft import get_peft_model

    weights = policy.trainable()
    whole = loading.load(policy.config, policy.folder, policy.device, policy.kind).dequantize()
    model = get_peft_model(whole, policy.lora_config(), adapter_name="policy")
    for name, parameter in model.named_parameters():
        if ".policy." in name:
            parameter.copy_(weights[name.replace(".policy.", ".")])
    return model
