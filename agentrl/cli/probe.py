"""Facts about torch and models as JSON. This module runs in a separate process, so that commands import neither torch nor
transformers.

`python -m agentrl.cli.probe torch DEVICE`, `template FOLDER`, `model FOLDER|NAME CONFIG`, `sampler FOLDER|NAME CONFIG DEVICE`,
`optimizer NAME DEVICE`; see `cli.probe_process`.
"""

import gc
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from agentrl.workflow.runtime.gc_pause import pause_gc


def torch_facts(device: str) -> dict[str, Any]:
    """Return torch's version, its threads, the GPUs, the CPU, and the facts about the device that models use (see
    `_device_facts`).

    The key `lacking` maps each dtype for which weights are packed to the reason why this CPU cannot pack them. The reason is
    empty if the CPU can pack them.
    """
    import torch

    from agentrl.workflow.models.packed_weights import ROUNDING, why_not_packed

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "gpus": [f"{gpu.name} {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
        "device": _device_facts(device),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "lacking": {str(dtype).removeprefix("torch."): why_not_packed(dtype) for dtype in ROUNDING},
    }


def _device_facts(device_setting: str) -> dict[str, Any]:
    """Return facts about the device: its name, precision, memory, and `unusable` if no kernel runs on it."""
    import torch

    from agentrl.workflow.models.devices import auto_dtype, pick_device, try_kernel

    name = pick_device(device_setting)
    try:
        device = torch.device(name)
        facts: dict[str, Any] = {"name": name}
        if device.type == "cuda":
            card, (free, total) = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)
            facts |= {"gpu": card.name, "capability": f"{card.major}.{card.minor}", "free": free, "total": total}
        dtype = auto_dtype(device, "lora")
        try_kernel(device, dtype)
    except (RuntimeError, AssertionError) as error:  # AssertionError: this torch was built without such devices
        problem = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        kernels = torch.cuda.get_arch_list() if "no kernel image" in problem else []
        return {"name": name, "unusable": problem, "kernels": kernels}
    return facts | {"dtype": str(dtype).removeprefix("torch.")}


def template_facts(folder: str) -> dict[str, Any]:
    """Return the tool format, the padding token, and the reason why a conversation cannot be continued with the template; the
    reason is empty if it can.
    """
    from transformers import AutoTokenizer

    from agentrl.workflow.chat.rendering import Chat
    from agentrl.workflow.errors import ModelError
    from agentrl.workflow.tool_formats import AUTO
    from agentrl.workflow.trajectory import Message

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        chat = Chat(tokenizer, AUTO)
        _, reason = chat.continuation([Message("tool", "1", name="calculator")])
    except (ModelError, OSError, ValueError) as error:
        return {"error": str(error)}
    return {"reason": reason, "pad": tokenizer.pad_token, "calls": chat.manner.tool_format.name}


def model_facts(path: str, config: str) -> dict[str, Any]:
    """Return the model's facts for a plan, or the reason why the model cannot be loaded. For a hub model that is not on this
    machine, return no facts. `path` is the model's folder or name. `config` is the section `model` of a config, as JSON.
    """
    from agentrl.workflow.config import ModelConfig
    from agentrl.workflow.errors import AgentRLError
    from agentrl.workflow.models.loading import check
    from agentrl.workflow.models.lookup import local_folder

    try:
        folder = local_folder(path)
        return {} if folder is None else asdict(check(ModelConfig.model_validate_json(config), folder))
    except AgentRLError as error:
        return {"error": error.message, "hint": error.hint}


def sampler_facts(path: str, config: str, device: str) -> dict[str, Any]:
    """Load the model and sample one token. Return how the sampler runs the model, or the error."""
    from agentrl.workflow.config import ModelConfig
    from agentrl.workflow.errors import AgentRLError
    from agentrl.workflow.inference.model_rows import open_rows, sample_one
    from agentrl.workflow.models.policy import Policy

    try:
        policy = Policy.load(ModelConfig.model_validate_json(config), path, device)
        rows = open_rows(policy)
        sample_one(rows, policy)
    except AgentRLError as error:
        return {"error": error.message, "hint": error.hint}
    return {"sampler": rows.name}


def update_facts(optimizer: str, devices: str, device: str, numerics: str) -> dict[str, Any]:
    """Return the reason why this machine cannot run the optimizer, or has too few devices; empty if there is no such reason.

    `devices` is `update.devices`, and `device` is AGENTRL_DEVICE.
    """
    from agentrl.workflow.errors import AgentRLError
    from agentrl.workflow.models.devices import devices_of_ranks, pick_device
    from agentrl.workflow.training.optimizer import check_optimizer

    try:
        devices_of_ranks("auto" if devices == "auto" else int(devices), device, numerics)
        check_optimizer(optimizer, pick_device(device))
    except AgentRLError as error:
        return {"error": error.message, "hint": error.hint}
    return {}


FACTS: dict[str, Callable[..., dict[str, Any]]] = {
    "torch": torch_facts,
    "template": template_facts,
    "model": model_facts,
    "sampler": sampler_facts,
    "update": update_facts,
}

if __name__ == "__main__":
    with pause_gc():
        print(json.dumps(FACTS[sys.argv[1]](*sys.argv[2:])), flush=True)
        gc.freeze()  # no collection at exit either
