"""Models of real shapes with random weights, made once on the device and kept for the parts that follow."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config

from bench.gpu.part import Part
from bench.performance.models import HALF_BILLION, TWO_BILLION, random_model
from bench.performance.processes import Side, run

SHAPES: Mapping[str, Qwen2Config] = {"Qwen2-0.5B": HALF_BILLION, "1.7B": TWO_BILLION}


def shape_folder(name: str, part: Part) -> Path:
    """Return the folder of a model of this shape; make it in a process of its own if it is not there yet.

    Raises:
        RuntimeError, TimeoutExpired: it cannot be made, or not in the time that is left.
    """
    folder = part.files / "gpu-models" / name
    if not (folder / "config.json").exists():
        run(Side("bench.gpu.shapes", "prepare", {"name": name, "folder": str(folder)}), timeout=max(1.0, part.left))
    return folder


def prepare(name: str, folder: str) -> Callable[[], Any]:
    """Return the work of that process."""
    target, device = Path(folder), "cuda" if torch.cuda.is_available() else "cpu"

    def work() -> str:
        partial = target.with_name(f"{name}.partial")
        random_model(SHAPES[name], partial, device).rename(target)
        return device

    return work
