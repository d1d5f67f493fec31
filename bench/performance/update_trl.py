"""One update by TRL's `GRPOTrainer`, as `processes.Side` runs it.

What was recorded goes in through its `rollout_func`, so that its own logprobs, loss, backward pass and optimizer run and no
sampling. Its step is timed from before the first microbatch to after the optimizer, without what `train` does around it.
As ours: one AdamW step on the mean over all trained tokens (`dapo`), advantages relative to the group, no KL, and float32
wherever ours computes in it.
"""

import time
from collections import Counter
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from agentrl.workflow.config import PROJECTIONS
from bench.performance.recorded import GROUP_SIZE, GROUPS, LEARNING_RATE, SAMPLED_TOKENS, recorded


class Clock(TrainerCallback):
    """How long the newest step took."""

    began = seconds = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Before the first microbatch."""
        _settle()
        self.began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """After the optimizer."""
        _settle()
        self.seconds = time.perf_counter() - self.began


def prepare(path: str, rank: int, microbatch: int, checkpointing: bool) -> Callable[[], dict[str, float]]:
    """One step in microbatches of so many completions, with LoRA of that rank, or of all weights (0)."""
    on_gpu = torch.cuda.is_available()
    folder, clock = TemporaryDirectory(prefix="arl-trl-"), Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16 if on_gpu and rank else torch.float32),
        reward_funcs=_rewards,
        args=_arguments(folder.name, microbatch, checkpointing, steps=2 if on_gpu else 1),
        train_dataset=Dataset.from_dict({"prompt": [str(group) for group in range(GROUPS)]}),
        processing_class=AutoTokenizer.from_pretrained(path),
        callbacks=[clock],
        peft_config=_adapter(rank) if rank else None,
        rollout_func=_completions,
    )

    def update() -> dict[str, float]:
        with folder:
            trainer.train()
        told = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
        tokens = float(GROUPS * GROUP_SIZE * told["completions/mean_length"])
        return {"seconds": clock.seconds, "tokens": tokens, **{name: told[name] for name in ("loss", "grad_norm", "entropy")}}

    return update


def _completions(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A prompt is the number of its group; its n-th occurrence gets the n-th completion and its reward."""
    data, seen = recorded(), Counter[int]()
    rows = []
    for group in map(int, prompts):
        rows.append((group, seen[group]))
        seen[group] += 1
    return {
        "logprobs": None,  # they would only be logged
        "prompt_ids": [list(data.prompts[group]) for group, _ in rows],
        "completion_ids": [list(data.completions[group][sample]) for group, sample in rows],
        "reward": [data.rewards[group][sample] for group, sample in rows],
    }


def _rewards(reward: list[float], **_: Any) -> list[float]:
    return reward


def _arguments(folder: str, microbatch: int, checkpointing: bool, steps: int) -> Any:
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=GROUPS * GROUP_SIZE // microbatch,
        num_generations=GROUP_SIZE,
        max_completion_length=SAMPLED_TOKENS,
        gradient_checkpointing=checkpointing,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="dapo",
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _adapter(rank: int) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=16, lora_dropout=0.0, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM")


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
