"""One GRPO iteration of 4 x 4 x 256 tokens with LoRA r = 8: the peak memory of the device, and seconds.

Qwen2-0.5B's shape may take 3.5 GiB, which leaves room for the driver and a screen on a card of 4 GB, and a shape of 1.7B
parameters 7.5 GiB. Each plan loads, samples and updates in a process of its own. Peaks are torch's, allocated and reserved, by
stage; what the process takes beside that (`context`) is the driver's. The computed numbers do not include cuBLAS's workspaces.
"""

import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.workflow.models.memory_estimate import FLOAT
from bench.gpu.part import Part, Row
from bench.gpu.shapes import SHAPES, shape_folder
from bench.performance import memory, memory_ours
from bench.performance.memory_ours import RANK, SAMPLED_TOKENS
from bench.performance.models import saved, shape_of
from bench.performance.processes import Side, run


class Case(NamedTuple):
    """A model, how its base is kept, a plan of `bench.performance.memory`, and the memory that torch may take."""

    model: str
    base: str
    plan: str
    cap_mib: int


BASES: Mapping[str, Mapping[str, Any]] = {"4 bits": {"model.load_in_4bit": True}, "bfloat16": {"model.load_in_4bit": False}}
SMALL_CARD, CARD = 3584, 7680
"""MiB: 3.5 and 7.5 GiB."""
CASES = [
    *(Case("Qwen2-0.5B", "4 bits", plan, SMALL_CARD) for plan in ("as it comes", "checkpointing", "microbatches of 768")),
    *(Case("1.7B", "4 bits", plan, CARD) for plan in ("as it comes", "checkpointing")),
    *(Case("Qwen2-0.5B", "bfloat16", plan, SMALL_CARD) for plan in ("as it comes", "checkpointing")),
    Case("1.7B", "bfloat16", "checkpointing", CARD),
]
"""In the order of their value."""
SMALL_CASES = [Case("tiny", "4 bits", "checkpointing", SMALL_CARD)]
SMALL_TOKENS = 4
LEAST_SECONDS = 20.0


def measure(part: Part) -> None:
    """Measure a row for each case."""
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES if part.gpu else SMALL_CASES:
            name = f"{case.model}, {case.base}, {case.plan}"
            if case.base == "4 bits" and not find_spec("bitsandbytes"):
                part.skip(name, "bitsandbytes is missing")
                continue
            part.attempt(name, lambda case=case: _row(part, case, Path(folder)), LEAST_SECONDS)  # type: ignore[misc]


def _row(part: Part, case: Case, folder: Path) -> Row:
    path = shape_folder(case.model, part) if part.gpu else saved("tiny", folder)
    options = {**BASES[case.base], **memory.PLANS[case.plan], "model.dtype": "bfloat16"}
    with tempfile.TemporaryDirectory() as sampled:
        arguments: dict[str, Any] = {
            "path": str(path),
            "completions": f"{sampled}/sampled.json",
            "options": options,
            "tokens": SAMPLED_TOKENS if part.gpu else SMALL_TOKENS,
            "cap_mib": case.cap_mib,
        }
        if not part.gpu:
            return {f"{stage}_s": result["seconds"] for stage, result in memory_ours.prepare(**arguments)()["stages"].items()}
        value = run(Side("bench.performance.memory_ours", "prepare", arguments), timeout=max(1.0, part.left)).value
    return _peaks(value, case, options)


def _peaks(value: Mapping[str, Any], case: Case, options: Mapping[str, Any]) -> Row:
    stages, context = value["stages"], value["context_mib"]
    shape = shape_of(SHAPES[case.model], RANK, FLOAT // 2, 4 if case.base == "4 bits" else 0)
    reserved = max(result["gpu_reserved_mib"] for result in stages.values())
    options = {**options, "update.microbatch_tokens": value["microbatch_tokens"]}
    row: Row = {
        "cap_mib": case.cap_mib,
        "peak_mib": max(result["gpu_mib"] for result in stages.values()),
        "reserved_mib": reserved,
        "context_mib": context,
        "with_context_mib": reserved + context,
        "workspaces_mib": value["workspaces_mib"],
        "microbatch_tokens": value["microbatch_tokens"],
    }
    for stage, result in stages.items():
        row |= {
            f"{stage}_computed_mib": memory.in_all(shape, stage, options),
            f"{stage}_mib": result["gpu_mib"],
            f"{stage}_reserved_mib": result["gpu_reserved_mib"],
            f"{stage}_s": result["seconds"],
        }
    return row
