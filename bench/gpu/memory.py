"""One GRPO iteration of 4 x 4 x 256 tokens on Qwen2-0.5B's shape, LoRA r = 8: peak memory of the device, and seconds.

Each plan loads, samples and updates in a process of its own that may take no more than 4 GB of the device. Peaks are torch's,
allocated and reserved, stage by stage; what the process takes beside that (`context`) is the driver's.
"""

import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentrl.workflow.models.memory_estimate import FLOAT
from bench.gpu.kept import Part, Row
from bench.performance import memory
from bench.performance.memory_ours import CAP_MIB, RANK, SAMPLED_TOKENS
from bench.performance.models import HALF_BILLION, half_billion, saved, shape_of
from bench.performance.processes import Side, run

BASES: Mapping[str, Mapping[str, Any]] = {"4 bits": {"model.load_in_4bit": True}, "bfloat16": {"model.load_in_4bit": False}}
PLANS = ("as it comes", "microbatches of 768", "checkpointing")
ALL, FEW = [(base, plan) for base in BASES for plan in PLANS], [("4 bits", "checkpointing"), ("bfloat16", "as it comes")]
FEW_TOKENS = 4
SECONDS = 25.0


def measure(part: Part) -> None:
    """A row for each base and plan."""
    with tempfile.TemporaryDirectory() as folder:
        path = half_billion(Path(folder) / "half") if part.gpu else saved("tiny", Path(folder))
        for base, plan in ALL if part.gpu else FEW:
            name = f"{base}, {plan}"
            if base == "4 bits" and not find_spec("bitsandbytes"):
                part.miss(name, "bitsandbytes is not here")
                continue
            asked = {**BASES[base], **memory.PLANS[plan], "model.dtype": "bfloat16"}
            part.attempt(name, lambda asked=asked: _row(part, path, asked), SECONDS)  # type: ignore[misc]


def _row(part: Part, path: Path, options: Mapping[str, Any]) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        tokens = SAMPLED_TOKENS if part.gpu else FEW_TOKENS
        arguments = {"path": str(path), "completions": f"{folder}/sampled.json", "options": dict(options), "tokens": tokens}
        value = run(Side("bench.performance.memory_ours", "prepare", arguments), timeout=max(1.0, part.left)).value
    row: Row = {}
    for stage, found in value["stages"].items():
        if part.gpu:
            row |= {f"{stage}_mib": found["gpu_mib"], f"{stage}_reserved_mib": found["gpu_reserved_mib"]}
        row[f"{stage}_s"] = found["seconds"]
    if not part.gpu:
        return row
    shape = shape_of(HALF_BILLION, RANK, FLOAT // 2, 4 if options["model.load_in_4bit"] else 0)
    peak = max(found["gpu_mib"] for found in value["stages"].values())
    reserved = max(found["gpu_reserved_mib"] for found in value["stages"].values())
    told = {"peak_mib": peak, "reserved_mib": reserved, "context_mib": value["context_mib"]}
    computed = max(memory.in_all(shape, stage, options) for stage in value["stages"])
    return row | told | {"computed_mib": computed, "in_4_gb": reserved + value["context_mib"] <= CAP_MIB}
