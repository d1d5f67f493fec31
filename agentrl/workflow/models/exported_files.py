"""The files that make a checkpoint's weights usable as a model in other programs: tokenizer, chat template, config.

With them PEFT (LoRA) or transformers (all weights) load the same model from the checkpoint's folder as agentrl does.
"""

import copy
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.workflow.models.lookup import code_files
from agentrl.workflow.models.policy import Policy

if TYPE_CHECKING:
    from peft import LoraConfig

GENERATION = "generation_config.json"


def make_files(policy: Policy, place: Path) -> dict[str, bytes]:
    """Return the content of each of these files, by name.

    Args:
        place: a folder for temporary files.
    """
    scratch = place / "plain"
    scratch.mkdir()
    policy.tokenizer.save_pretrained(scratch)
    for code in code_files(policy.folder):
        shutil.copyfile(code, scratch / code.name)
    if policy.kind == "lora":
        adapter_config(policy).save_pretrained(str(scratch))
    else:
        _save_config(policy, scratch)
    files = {file.relative_to(scratch).as_posix(): file.read_bytes() for file in scratch.rglob("*") if file.is_file()}
    shutil.rmtree(scratch)
    return files


def adapter_config(policy: Policy) -> "LoraConfig":
    """Return the content of PEFT's config file for the policy's adapter."""
    config = policy.lora_config()
    config.base_model_name_or_path = str(policy.folder)
    config.inference_mode = True
    return config


def _save_config(policy: Policy, folder: Path) -> None:
    with policy.training() as module:
        config: Any = copy.deepcopy(module.config)
        config.dtype = module.dtype  # otherwise it would name the base's dtype
    config.save_pretrained(folder)
    if (policy.folder / GENERATION).is_file():
        shutil.copyfile(policy.folder / GENERATION, folder / GENERATION)
