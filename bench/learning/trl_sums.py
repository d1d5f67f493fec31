"""`python -m bench.learning.trl_sums MODEL TRAIN.jsonl OUT SEED ITERATIONS`: the sums of `learn_real`, with TRL's own script.

Same rows, reward, LoRA, group and token budget as the cell `sums`, sampling with transformers' `generate`. Writes the merged
model and `curve.json` (the mean reward of each step, the seconds of all of them) into OUT. Every tenth step is kept in OUT.tmp:
started again, it goes on from there.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from agentrl.workflow.config import PROJECTIONS
from agentrl.workflow.rewards.numeric_answer import read_answer

GROUPS = GROUP_SIZE = 8
TOKENS = 16
# Rows of one pass. On two cores, 16 rows and 8 rows take equally long, and all 64 rows take a third longer.
ROWS = GROUPS * GROUP_SIZE if torch.cuda.is_available() else 16


class _Clock(TrainerCallback):
    """Keeps the seconds of training in a file beside the checkpoints, so that they count on after a new start."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._before = float(file.read_text()) if file.exists() else 0.0
        self._began = time.perf_counter()

    def seconds(self) -> float:
        """Seconds of all steps up to the last checkpoint of an earlier start, and of all steps since this one."""
        return self._before + time.perf_counter() - self._began

    def on_save(self, *_: Any, **__: Any) -> None:
        self._file.write_text(str(self.seconds()))


def main() -> None:
    """Train and write the model."""
    model, file, folder, seed, iterations = sys.argv[1:]
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    )
    kept = f"{folder}.tmp"
    Path(kept).mkdir(parents=True, exist_ok=True)
    options = GRPOConfig(
        output_dir=kept,
        seed=int(seed),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=GROUPS * GROUP_SIZE // ROWS,
        num_generations=GROUP_SIZE,
        max_completion_length=TOKENS,
        max_steps=int(iterations),
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        gradient_checkpointing=False,  # memory suffices, and without it a step is faster
        save_steps=10,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
    )
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM")
    end = AutoTokenizer.from_pretrained(model).eos_token_id

    def right(completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        """1 where the answer ended before the limit and its last number is the right one, as `numeric_answer`."""
        return [
            float((len(ids) < TOKENS or ids[-1] == end) and read_answer(turns[-1]["content"]) == int(number))
            for turns, ids, number in zip(completions, completion_ids, answer, strict=True)
        ]

    clock = _Clock(Path(kept, "seconds"))
    trainer = GRPOTrainer(
        model=model, reward_funcs=right, args=options, train_dataset=data, peft_config=adapter, callbacks=[clock]
    )
    trainer.train(resume_from_checkpoint=any(Path(kept).glob("checkpoint-*")))
    seconds = clock.seconds()
    merged: Any = trainer.model.merge_and_unload()
    merged.save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    (Path(folder) / "curve.json").write_text(json.dumps({"rewards": rewards, "seconds": seconds}))


if __name__ == "__main__":
    main()
