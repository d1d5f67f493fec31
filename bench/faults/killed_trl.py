"""`python -m bench.faults.killed_trl MODEL LOG UPDATES`: the run of `killed_sampler`, with TRL's `GRPOTrainer`.

TRL's settings for a restart: a checkpoint with optimizer and random state after every update (`save_steps=1`), from which a
second start continues (`resume_from_checkpoint=True`). TRL writes into MODEL/trl. Without a GPU, TRL samples in this process
with transformers' `generate`.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TrainerCallback

from agentrl.workflow.rewards.numeric_answer import read_answer, read_reference
from agentrl.workflow.tools.calculator import calculate
from bench.faults import calculator_run
from bench.faults.sampled_log import SampledLog
from bench.performance.grpo import trainer


class _LogTokens(StoppingCriteria):
    """Logs the tokens of each decoding step: one for each row without an end token. It never stops a row."""

    def __init__(self, log: SampledLog, end: int) -> None:
        self._log, self._end = log, end
        self._is_over: torch.Tensor | None = None  # (B,)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        ended = input_ids[:, -1] == self._end
        over = torch.zeros_like(ended) if self._is_over is None else self._is_over
        self._log.add_tokens(int((~over).sum()))
        self._is_over = over | ended
        return torch.zeros_like(ended)


class _LogSaves(TrainerCallback):
    """Logs each update whose checkpoint is complete."""

    def __init__(self, log: SampledLog) -> None:
        self._log = log

    def on_save(self, *_: Any, **__: Any) -> None:
        self._log.add_update()


def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly, for example (48 + 24) / 2.

    Args:
        expression: the expression.
    """
    return calculate(expression)


def _is_answer(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


def main() -> None:
    """Train, from the newest checkpoint if there is one."""
    model, log = Path(sys.argv[1]), SampledLog(Path(sys.argv[2]))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    references = {question: read_reference(reference) for question, reference in calculator_run.questions()}

    def right(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        return [
            float(_is_answer(turns[-1]) and read_answer(turns[-1]["content"]) == references[prompt[0]["content"]])
            for prompt, turns in zip(prompts, completions, strict=True)
        ]

    made = trainer(
        model,
        list(references),
        calculator_run.GROUP_SIZE,
        right,
        tools=[calculator],
        callbacks=[_LogSaves(log)],
        microbatch=calculator_run.TRL_MICROBATCH,
        max_completion_length=calculator_run.TURNS * calculator_run.TURN_TOKENS,
        max_tool_calling_iterations=calculator_run.TURNS - 1,
        max_steps=int(sys.argv[3]),
        learning_rate=calculator_run.LEARNING_RATE,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="dapo",
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        save_only_model=False,
    )
    generate, end = made.model.generate, made.processing_class.eos_token_id

    def generate_and_log(*arguments: Any, **options: Any) -> Any:
        return generate(*arguments, stopping_criteria=StoppingCriteriaList([_LogTokens(log, end)]), **options)

    made.model.generate = generate_and_log
    made.train(resume_from_checkpoint=any((model / "trl").glob("checkpoint-*")))


if __name__ == "__main__":
    main()
