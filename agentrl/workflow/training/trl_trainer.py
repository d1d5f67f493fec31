"""TRL as a second trainer (`--trainer trl`): TRL's own `GRPOTrainer` makes the update; episodes and checkpoints stay agentrl's.

TRL receives the samples through its `rollout_func`: exact ids, the sampler's logprobs, and rewards. `env_mask` marks the tokens
that the policy sampled. TRL gets the policy's weights and agentrl's optimizer, so saving, resuming and fencing work as with
agentrl's trainer. Both trainers compute the same gradient in TRL's convention (`tests/training/test_trl.py`).

TRL differs in these points:

- A group trains only if each of its episodes can train and is exactly one training row.
- The model reads all rows, also those whose advantage is 0.
- The entropy bonus is a mean over the tokens of each microbatch.
- A value that is not finite is detected only after TRL's step. The caller then loads the last checkpoint.
"""

import hashlib
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from huggingface_hub import constants
from torch import nn
from transformers import PrinterCallback

from agentrl.workflow.config import RunConfig
from agentrl.workflow.errors import ConfigError, InfraError
from agentrl.workflow.models.device_errors import classify
from agentrl.workflow.models.logprobs import causal_model, checkpointing
from agentrl.workflow.models.memory import return_freed_memory
from agentrl.workflow.models.memory_estimate import MICROBATCH_TOKENS
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.plugins import find
from agentrl.workflow.stats.group_variance import NO_ADVANTAGE
from agentrl.workflow.training.advantages import Credit
from agentrl.workflow.training.prepared_update import episode_advantages, select_groups
from agentrl.workflow.training.reports import Metrics, Update
from agentrl.workflow.training.trainer import NotFinite, Trainer, require_finite
from agentrl.workflow.training.training_rows import Row, TokenLayout, rows_of
from agentrl.workflow.training.trl_options import check_trl, grpo_options, require_trl
from agentrl.workflow.trajectory import Group

METRICS = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "kl": "kl",
    "clip_ratio/region_mean": "clip_fraction",
    "cispo_clip_ratio": "clip_fraction",
}
"""The names of metrics: from TRL's to agentrl's."""


class TrlTrainer(Trainer):
    """A `Trainer` whose updates are made by TRL.

    Raises:
        ConfigError: TRL is not installed, or its trainer does not support an option of the run.
    """

    def __init__(self, policy: Policy, config: RunConfig, iterations: int = 0) -> None:
        require_trl()
        check_trl(config)
        super().__init__(policy, config, iterations)
        if self._loss_scale.is_used:
            raise ConfigError("The trainer trl does not support float16 (it has no loss scaling).", "Set model.dtype=float32.")
        self._credit: Credit = find("credits", self._algorithm.credit)

    def update(self, groups: Sequence[Group], iteration: int) -> Update:
        """Update the policy. Only groups are used in which every episode can train and is exactly one training row; `dropped`
        of the result says why the others are not used. Raise InfraError if memory runs out. Raise RewardError if an
        episode's reward is not a finite number.
        """
        started = time.perf_counter()
        usable_groups, dropped = select_whole_groups(groups, self._config.rollout.group_size)
        episodes = [episode for group in usable_groups for episode in group.episodes]
        if not episodes:
            return Update(dropped=dropped, skipped="no group is whole")
        self._set_rates(iteration)
        tokens = TokenLayout.of(episodes)
        credited = self._credit(tokens.make_earned(usable_groups), self._options)
        advantages = episode_advantages(credited, tokens)
        if not (credited.advantages.any() or self._options.kl_coef or self._options.entropy_coef):
            return Update(advantages=advantages, dropped=dropped, skipped=NO_ADVANTAGE)
        try:
            with self._policy.lock, return_freed_memory(self._policy.device, self._config.lean):
                steps = self._run_trl(tokens.rows, [float(e.reward or 0.0) for e in episodes], iteration)
        except NotFinite as error:
            return Update(advantages=advantages, dropped=dropped, skipped=str(error), bad=True)
        self.iteration = iteration
        self.updates += 1
        mean = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
        counted = {name: mean[name] * len(steps) for name in ("tokens", "rows")}
        return Update(mean | counted | {"seconds": time.perf_counter() - started}, tuple(steps), advantages, dropped)

    def _run_trl(self, rows: Sequence[Row], rewards: Sequence[float], iteration: int) -> list[Metrics]:
        """Run TRL's trainer on the rows, and return the metrics of each optimizer step."""
        again = self._config.update.gradient_checkpointing
        coef, full = self._options.kl_coef, self._policy.kind == "full"
        beside = self._policy.reference() if coef and full else nullcontext(None)  # LoRA: TRL switches the adapter off
        try:
            with (
                TemporaryDirectory(prefix="arl-trl-") as written,
                _isolate_rng(self._policy.device),
                beside as reference,
                self._policy.training() as model,
                checkpointing(model, again),
                _restore_model(model, reference),
            ):
                trl = self._make_trl_trainer(model, rows, rewards, self._arguments(written, rows, iteration))
                _set_kl_anchor(trl, coef, reference)
                trl.train()
        except (RuntimeError, MemoryError) as error:
            if classify(error) != "out_of_memory":
                raise
            raise InfraError("Memory does not suffice for TRL's update.", "Lower update.microbatch_tokens.") from error
        finally:
            self._optimizer.zero_grad()
        counts = {"tokens": float(sum(sum(row.loss_mask) for row in rows)), "rows": float(len(rows))}
        entries = [{METRICS[name]: entry[name] for name in METRICS if name in entry} for entry in trl.state.log_history]
        share = {"kl_coef": coef} if coef else {}
        steps: list[Metrics] = [{**entry, **counts, **share} for entry in entries if "loss" in entry]
        for step in steps:
            require_finite(step["loss"], step["grad_norm"])
        self._require_finite_weights()
        return steps

    def _arguments(self, folder: str, rows: Sequence[Row], iteration: int) -> Any:
        from trl import GRPOConfig

        size, on_cpu = self._config.rollout.group_size, self._policy.device.type == "cpu"
        tokens = self._config.update.microbatch_tokens or MICROBATCH_TOKENS
        at_once = rows_at_once(rows, tokens, self._config.update.gradient_accumulation_steps)
        arguments = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=len(rows) // at_once,
            num_generations=size,
            max_steps=self._config.update.epochs,
            learning_rate=self.learning_rate,
            lr_scheduler_type="constant",
            beta=0.0,  # see `_set_kl_anchor`
            seed=_seed(self._config.seed, iteration),
            use_cpu=on_cpu,
            bf16=False,
            activation_checkpointing=False,  # ours is on, which takes it back afterwards
            activation_checkpointing_kwargs={"use_reentrant": False},
            shuffle_dataset=False,
            dataloader_pin_memory=not on_cpu,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **grpo_options(self._config),
        )
        arguments._n_gpu = 1  # the policy is on one, however many there are
        return arguments

    def _make_trl_trainer(self, model: nn.Module, rows: Sequence[Row], rewards: Sequence[float], arguments: Any) -> Any:
        """Return TRL's trainer with the policy's model and this trainer's optimizer, for one update."""
        from datasets import Dataset
        from trl import GRPOTrainer

        _silence_trl()
        for group in self._optimizer.param_groups:
            group.pop("initial_lr", None)  # of the schedule of the last update
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=_rewards,
            args=arguments,
            train_dataset=Dataset.from_dict(
                {"prompt": [str(number) for number in range(len(rows) // arguments.num_generations)]}
            ),
            processing_class=self._policy.tokenizer,
            optimizers=(self._optimizer, None),
            rollout_func=_RecordedRollouts(rows, rewards, arguments.num_generations),
        )
        trainer.remove_callback(PrinterCallback)
        return trainer


def select_whole_groups(groups: Sequence[Group], size: int) -> tuple[list[Group], dict[int, str]]:
    """Return the groups in which every episode can train and is exactly one training row. Return also, by slot, the reason why
    each other group is dropped.
    """
    chosen, dropped = select_groups(groups, needs_group=True)
    whole_groups = []
    for group in chosen:
        reason = _why_not(group, size)
        if reason is None:
            whole_groups.append(group)
        else:
            dropped[group.slot] = f"{reason}: TRL takes whole groups"
    return whole_groups, dropped


def _why_not(group: Group, size: int) -> str | None:
    if len(group.episodes) != size:
        return f"{len(group.episodes)} of {size} episodes can train"
    rows = [row.episode for row in rows_of(group.episodes)]
    single = sum(rows.count(number) == 1 for number in range(size))
    return None if single == size else f"{single} of {size} episodes are one training row"


def rows_at_once(rows: Sequence[Row], tokens: int, at_least: int) -> int:
    """Return the number of rows in one forward and backward pass. The number of all rows is a multiple of it.

    TRL pads every row to the longest prompt plus the longest completion. `tokens` is the maximum of tokens in a microbatch,
    padding included, but a microbatch has at least one row. `at_least` is the minimum number of microbatches. If there are
    fewer rows, each row is a microbatch.
    """
    width = max(row.prefix + 1 for row in rows) + max(len(row.input_ids) - row.prefix - 1 for row in rows)
    max_rows = max(1, min(tokens // width, len(rows) // at_least))
    return next(count for count in range(max_rows, 0, -1) if len(rows) % count == 0)


class _RecordedRollouts:
    """TRL's `rollout_func`: a prompt is a group's number; its n-th occurrence gets its n-th row."""

    def __init__(self, rows: Sequence[Row], rewards: Sequence[float], size: int) -> None:
        numbered = list(zip(rows, rewards, strict=True))
        self._waiting = [iter(numbered[start : start + size]) for start in range(0, len(rows), size)]

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        chosen = [next(self._waiting[int(prompt)]) for prompt in prompts]
        starts = [row.prefix + 1 for row, _ in chosen]
        return {
            "prompt_ids": [list(row.input_ids[:start]) for (row, _), start in zip(chosen, starts, strict=True)],
            "completion_ids": [list(row.input_ids[start:]) for (row, _), start in zip(chosen, starts, strict=True)],
            "logprobs": [list(row.behavior_logprobs[start:]) for (row, _), start in zip(chosen, starts, strict=True)],
            "env_mask": [
                [int(trains) for trains in row.loss_mask[start:]] for (row, _), start in zip(chosen, starts, strict=True)
            ],
            "reward": [reward for _, reward in chosen],
        }


def _rewards(reward: list[float], **_: Any) -> list[float]:
    """Return the recorded rewards. TRL calls this as its reward function."""
    return reward


def _set_kl_anchor(trl: Any, coef: float, reference: nn.Module | None) -> None:
    """Pass the KL's weight and reference to TRL, which would load the base again for each update."""
    from trl.trainer.utils import add_fused_lm_head

    trl.beta = coef
    if reference is not None:
        add_fused_lm_head(reference, temperature=trl.temperature)
        trl.ref_model = reference


def _silence_trl() -> None:
    """Turn off TRL's telemetry, and its warning that `rollout_func` may change: we support one version."""
    constants.HF_HUB_DISABLE_TELEMETRY = True
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def _seed(seed: int, iteration: int) -> int:
    """Return the seed of all of TRL's generators; dropout draws from it."""
    return int.from_bytes(hashlib.sha256(f"{seed}|{iteration}".encode()).digest()[:4], "little") >> 1


@contextmanager
def _isolate_rng(device: torch.device) -> Iterator[None]:
    """Restore the state of every random generator of the process when the context ends, because TRL seeds them."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def _restore_model(*models: nn.Module | None) -> Iterator[None]:
    """Undo TRL's changes to the models at the end: forward function, special tokens, new attributes."""
    mine = [thing for model in models if model is not None for thing in _objects_trl_changes(model)]
    before: list[tuple[Any, Mapping[str, Any]]] = [(thing, dict(vars(thing))) for thing in mine]
    try:
        yield
    finally:
        for thing, values in before:
            vars(thing).clear()
            vars(thing).update(values)


def _objects_trl_changes(model: nn.Module) -> list[Any]:
    causal = causal_model(model)
    objects = [model, causal, causal.config, causal.config.get_text_config(), causal.generation_config]
    return [thing for number, thing in enumerate(objects) if not any(thing is other for other in objects[:number])]
