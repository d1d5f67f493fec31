"""A policy as one plain model: its LoRA added into its base, the base of a quantised one as what it computes with."""

from typing import Any

import torch

from workflow import base
from workflow.policy import Policy


def merged(policy: Policy) -> Any:
    """The trained weights as a model that needs no adapter and no quantisation; the policy is of no use afterwards.

    A 4-bit or 8-bit base is dequantised first, so that the sum is of the very numbers that were trained beside, and not rounded
    to so few bits again (which `merge_and_unload` would do).
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
    whole = base.load(policy.config, policy.folder, policy.device, policy.kind).dequantize()
    model = get_peft_model(whole, base.lora_config(policy.config, policy.rank), adapter_name="policy")
    for name, parameter in model.named_parameters():
        if ".policy." in name:
            parameter.copy_(weights[name.replace(".policy.", ".")])
    return model
