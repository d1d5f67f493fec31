"""The machine and its package versions, beside those of constraints.txt. A program, so that no GPU memory stays in use."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

SHOWN = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "safetensors", "tokenizers", "pydantic", "numpy")
OTHERS = (
    "pydantic-settings",
    "jinja2",
    "pytest",
    "pytest-timeout",
    "hypothesis",
    "celery",
    "sqlalchemy",
    "alembic",
    "typer",
    "gguf",
)


def facts() -> dict[str, Any]:
    """Return the facts of the machine: `device` is cuda or cpu, `versions` has each package's here and ours."""
    ours = pinned()
    return {
        **_gpu(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "versions": {name: {"here": installed(name), "ours": ours.get(name, "")} for name in (*SHOWN, *OTHERS)},
    }


def installed(name: str) -> str:
    """Return the version of a package that this Python finds; empty if it finds none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def pinned() -> dict[str, str]:
    """Return the package versions that the tests ran with."""
    lines = Path("constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def lines(facts: dict[str, Any]) -> list[str]:
    """Return the facts as two lines of text."""
    if facts["device"] == "cuda":
        gpu = f"{facts['gpu']}, {facts['memory_mib']:.0f} MiB, driver {facts['driver']}, CUDA {facts['cuda']}"
    else:
        gpu = "no GPU: the CPU half, with small models and sizes; its numbers mean nothing"
    versions = [f"{name} {_compare(facts['versions'][name])}" for name in SHOWN if name in facts["versions"]]
    return [f"{gpu}; Python {facts['python']}, {facts['cores']} cores, {facts['system']}", ", ".join(versions)]


def _compare(versions: dict[str, str]) -> str:
    here = versions["here"].partition("+")[0]
    return (versions["here"] or "none") + ("" if here == versions["ours"] else f" (ours: {versions['ours']})")


def _gpu() -> dict[str, Any]:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not installed("torch"):
        return {"device": "cpu"}
    import torch

    if not torch.cuda.is_available():
        return {"device": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": "cuda",
        "gpu": properties.name,
        "memory_mib": properties.total_memory / 2**20,
        "capability": f"{properties.major}.{properties.minor}",
        "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout.split() or ["unknown"])[0]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(facts()) + "\n")
