"""One iteration of the half-billion model as a worker does it, as `processes.Side` runs it: load, sample, update."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from agentrl.workflow.config import RunConfig, build
from agentrl.workflow.engines import Completion, GenerateRequest
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training.trainer import Trainer
from agentrl.workflow.trajectory import Episode, Group, Message, PolicyRef, SamplingKey, Step, Task
from bench.performance.processes import measured, resident

GROUPS, GROUP_SIZE = 4, 4
PROMPT_TOKENS, SAMPLED_TOKENS = 128, 256
RANK = 8
CAP_MIB = 4096

Sampled = Sequence[tuple[Sequence[int], Sequence[float]]]
"""Token ids and logprobs of each episode, group by group."""


def prepare(
    path: str, completions: str, options: Mapping[str, Any], tokens: int = SAMPLED_TOKENS, cap_mib: int = CAP_MIB
) -> Callable[[], dict[str, Any]]:
    """An iteration in stages, each with its own peak.

    Args:
        path: the model.
        completions: a file with what was sampled; without it they are sampled and written there.
        options: further keys of the run's config.
        tokens: that are sampled in each row.
        cap_mib: memory that the GPU seems to have.
    """
    import peft  # noqa: F401  # a library that loading would bring in, and that is no part of what it takes

    if torch.cuda.is_available():
        _shrink_card(cap_mib * 2**20)
    config = config_of(options)
    if config.model.load_in_4bit:
        import bitsandbytes  # noqa: F401  # the same
    return lambda: _iteration(path, Path(completions), config, tokens)


def _shrink_card(size: int) -> None:
    """Make torch take at most so many bytes of the GPU, and say that it has no more."""
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.get_device_properties(0).total_memory)
    torch.cuda.mem_get_info = lambda device=None: (size - torch.cuda.memory_reserved(), size)


def config_of(options: Mapping[str, Any]) -> RunConfig:
    """The run's config with these keys."""
    return build({"model.load_in_4bit": True, "model.lora_r": RANK, "rollout.group_size": GROUP_SIZE, **options})


def prompts() -> list[tuple[int, ...]]:
    """One per group: random ids of the tiny tokenizer's."""
    draw = random.Random(0)
    return [tuple(draw.randrange(20, 300) for _ in range(PROMPT_TOKENS)) for _ in range(GROUPS)]


def groups_of(sampled: Sampled) -> list[Group]:
    """As the trainer gets them from the store, with random rewards."""
    draw = random.Random(0)

    def episode(task: Task, prompt: tuple[int, ...], group: int, sample: int) -> Episode:
        ids, logprobs = sampled[GROUP_SIZE * group + sample]
        step = Step(0, (Message("user", ""),), prompt, tuple(ids), tuple(logprobs), "length", Message("assistant", ""), 0)
        number = GROUP_SIZE * group + sample
        return Episode(task, sample, (step,), "done", "answered", reward=draw.random(), id=number)

    tasks = [Task(f"task/{number}", (), "") for number in range(GROUPS)]
    return [
        Group(task, tuple(episode(task, prompt, number, sample) for sample in range(GROUP_SIZE)), number)
        for number, (task, prompt) in enumerate(zip(tasks, prompts(), strict=True))
    ]


def key_of(number: int) -> SamplingKey:
    """The key of the episode with that number."""
    return SamplingKey(0, "train", 0, "", number)


def _iteration(path: str, file: Path, config: RunConfig, tokens: int) -> dict[str, Any]:
    libraries = resident("VmRSS")
    loading = measured(lambda: Policy.load(config.model, path))
    policy: Policy = loading.value
    ran = {"loading": loading}
    if not file.exists():
        base = PolicyRef("", policy.base_hash)
        ran["sampling"] = measured(lambda: file.write_text(json.dumps(sampled(policy, base, tokens))))
    groups = groups_of(json.loads(file.read_text()))
    trainer = Trainer(policy, config)
    ran["update"] = measured(lambda: trainer.update(groups, 0).metrics)
    stages = {name: vars(stage) | {"value": None} for name, stage in ran.items()}
    return {
        "libraries_mib": libraries,
        "context_mib": _context(),
        "workspaces_mib": _workspaces(),
        "microbatch_tokens": trainer._scorer.oom_backoff.tokens,
        "metrics": dict(ran["update"].value),
        "stages": stages,
    }


def _context() -> float:
    """MiB of the device that are taken beside what torch keeps: by the driver, and by whoever else is there."""
    if not torch.cuda.is_available():
        return 0.0
    free, whole = torch.cuda.cudart().cudaMemGetInfo(0)  # type: ignore[no-untyped-call]  # not `mem_get_info`: see `_shrink_card`
    return float(whole - free - torch.cuda.memory_reserved()) / 2**20


def _workspaces() -> float:
    """MiB of torch's memory that cuBLAS holds for its products; their size depends on the card (32 MiB each on a Hopper)."""
    if not torch.cuda.is_available():
        return 0.0
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return (before - torch.cuda.memory_allocated()) / 2**20


def sampled(policy: Policy, weights: PolicyRef, tokens: int = SAMPLED_TOKENS) -> Sampled:
    """Each row gets all of its tokens: what would end it cannot be drawn."""
    policy.chat.end_ids = frozenset({-1})
    engine = RollingEngine(policy)
    wanted = [prompt for prompt in prompts() for _ in range(GROUP_SIZE)]
    try:
        futures = [
            engine.submit(GenerateRequest(prompt, weights, key_of(number).of_turn(prompt, 0), 0, tokens))
            for number, prompt in enumerate(wanted)
        ]
        found: list[Completion] = [future.result() for future in futures]
    finally:
        engine.close()
    return [(completion.token_ids, completion.logprobs) for completion in found]
