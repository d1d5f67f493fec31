"""TRL's `GRPOTrainer`, made ready for a comparison: same folder of weights, same prompts, float32, its own loops untouched."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from agentrl.workflow.config import PROJECTIONS


def trainer(
    folder: Path,
    prompts: Sequence[str],
    group_size: int,
    reward: Callable[..., list[float]],
    *,
    tools: Sequence[Callable[..., str]] = (),
    callbacks: Sequence[TrainerCallback] = (),
    lora_r: int = 0,
    microbatch: int | None = None,
    **options: Any,
) -> Any:
    """A trainer that generates for all prompts at once; what it writes, next to nothing, is in `folder / "trl"`.

    Args:
        folder: a model in the hub's format.
        prompts: one user message each.
        reward: as TRL calls it.
        tools: functions with typed arguments and a docstring.
        lora_r: rank of the adapters; 0 trains all weights.
        microbatch: sequences in one forward and backward; unset: all.
        options: fields of `GRPOConfig`, also instead of the ones set here.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    # Ours has Qwen's shapes of calls, and TRL knows templates only by their whole text.
    tokenizer.response_template = qwen3_template
    rows = len(prompts) * group_size
    usual: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        # Faster without, where the memory is there.
        "gradient_checkpointing": False,
        "per_device_train_batch_size": microbatch or rows,
        "gradient_accumulation_steps": rows // (microbatch or rows),
        "num_generations": group_size,
        "shuffle_dataset": False,
        "temperature": 1.0,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    config = GRPOConfig(**usual | options)
    made = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in prompts]),
        processing_class=tokenizer,
        tools=list(tools) or None,
        callbacks=list(callbacks),
        peft_config=LoraConfig(r=lora_r, lora_alpha=16, target_modules=list(PROJECTIONS)) if lora_r else None,
    )
    made.remove_callback(PrinterCallback)  # `make bench` prints tables
    return made
