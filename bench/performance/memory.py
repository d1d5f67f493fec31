"""One GRPO iteration of 4 x 4 x 256 tokens, Qwen2-0.5B's shape in 4 bits with LoRA: what it takes of 4 GB.

Computed from the shape, and measured: the first plan loads, samples and updates in one fresh process, as a worker does; the
others update what it sampled. On a GPU the figure is `torch.cuda.max_memory_allocated`, and the process may have no more than
4 GB; without one it is the peak resident memory of the whole process, interpreter and libraries included.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from agentrl.workflow.models.memory_estimate import (
    FLOAT,
    MICROBATCH_TOKENS,
    Parts,
    Shape,
    always,
    while_sampling,
    while_updating,
)
from agentrl.workflow.training.training_rows import microbatches, rows_of, size
from bench.performance import memory_ours
from bench.performance.cases import Cases
from bench.performance.memory_ours import CAP_MIB, GROUP_SIZE, GROUPS, PROMPT_TOKENS, RANK, SAMPLED_TOKENS
from bench.performance.models import HALF_BILLION, half_billion, shape_of
from bench.performance.processes import Ran, Side, run
from bench.performance.report import Comparison, Measured, Table, load

MIB = 2**20
ROWS = GROUPS * GROUP_SIZE
PLANS: Mapping[str, Mapping[str, Any]] = {
    "microbatches of 768": {"update.microbatch_tokens": 768},
    "as it comes": {},
    "checkpointing, microbatches of 768": {"update.microbatch_tokens": 768, "update.gradient_checkpointing": True},
    "checkpointing": {"update.gradient_checkpointing": True},
}
"""What each sets of the run's config."""

CPU, GPU = shape_of(HALF_BILLION, RANK, FLOAT), shape_of(HALF_BILLION, RANK, FLOAT // 2)


def measure() -> Measured:
    """What every part takes, and how much that is in all, computed and measured."""
    ran: dict[str, Ran] = {}
    cases = Cases()
    with tempfile.TemporaryDirectory() as folder:
        path = half_billion(Path(folder) / "model")
        arguments = {"path": str(path), "completions": str(Path(folder) / "sampled.json")}
        for name, options in PLANS.items():
            with cases.case(f"memory Qwen2-0.5B 4-bit LoRA, {name}"):
                ran[name] = run(Side("bench.performance.memory_ours", "prepare", {**arguments, "options": dict(options)}))
                print(name, {stage: round(_peak(found)) for stage, found in ran[name].value["stages"].items()}, flush=True)
    return Measured([_parts(), _stages(ran)], [_compared(name, found) for name, found in ran.items()], cases.unmeasured)


def microbatch(options: Mapping[str, Any]) -> int:
    """Tokens that the model reads in the largest microbatch of the update."""
    config = memory_ours.config_of(options).update
    groups = memory_ours.groups_of([(range(SAMPLED_TOKENS), range(SAMPLED_TOKENS))] * ROWS)
    rows = rows_of([episode for group in groups for episode in group.episodes])
    share = not config.gradient_checkpointing
    return max(size(piece, share) for piece in microbatches(rows, config.microbatch_tokens or MICROBATCH_TOKENS, share=share))


def parts(shape: Shape, stage: str, options: Mapping[str, Any]) -> Parts:
    """What is taken in a stage (`loading`, `sampling`, `update`) beside what always is."""
    if stage == "update":
        checkpointing = memory_ours.config_of(options).update.gradient_checkpointing
        return while_updating(shape, microbatch(options), checkpointing)
    on_gpu = torch.cuda.is_available()
    return while_sampling(shape, ROWS, PROMPT_TOKENS + SAMPLED_TOKENS, on_gpu) if stage == "sampling" else {}


def in_all(shape: Shape, stage: str, options: Mapping[str, Any]) -> float:
    """MiB in that stage."""
    return (sum(always(shape).values()) + sum(parts(shape, stage, options).values())) / MIB


def _parts() -> Table:
    rows: list[list[object]] = [[what, *sizes] for what, *sizes in _by_shape(always(CPU), always(GPU))]
    for name, stage in [("", "sampling"), *((name, "update") for name in PLANS)]:
        options = PLANS.get(name, {})
        found = _by_shape(parts(CPU, stage, options), parts(GPU, stage, options))
        rows += [[f"{stage}: {what}", *sizes] for what, *sizes in found]
        rows.append([f"in all, {stage} {name}".strip(), in_all(CPU, stage, options), in_all(GPU, stage, options)])
    return Table("computed, MiB", ["what", "float32, as on a CPU", "bfloat16, as on a GPU"], rows, load())


def _by_shape(cpu: Parts, gpu: Parts) -> list[tuple[str, float, float]]:
    return [(what, size / MIB, gpu[what] / MIB) for what, size in cpu.items()]


def _stages(ran: Mapping[str, Ran]) -> Table:
    shape = GPU if torch.cuda.is_available() else CPU
    rows: list[list[object]] = []
    for name, found in ran.items():
        libraries = found.value["libraries_mib"]
        for stage, values in found.value["stages"].items():
            computed = in_all(shape, stage, PLANS[name])
            peaks = [values[key] for key in ("before_mib", "peak_mib", "gpu_mib")]
            rows.append([name, stage, values["seconds"], computed, libraries, computed + libraries, *peaks])
    columns = ["", "stage", "seconds", "computed", "libraries", "both", "resident before", "peak", "peak on the GPU"]
    return Table("an iteration by stages, MiB", columns, rows, load())


def _peak(stage: Mapping[str, float]) -> float:
    """On a GPU what torch allocated there, else what was resident."""
    return stage["gpu_mib"] or stage["peak_mib"]


def _compared(name: str, ran: Ran) -> Comparison:
    memory = "GPU memory" if torch.cuda.is_available() else "resident memory"
    peak = max(_peak(stage) for stage in ran.value["stages"].values())
    return Comparison(f"memory Qwen2-0.5B 4-bit LoRA, {name}, peak {memory}", [peak], [float(CAP_MIB)], "MiB", "4 GB", "less")
