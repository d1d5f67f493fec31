"""What machine this is and which versions it has, beside those of constraints.txt. A program, so that no GPU stays in use."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "safetensors", "tokenizers", "pydantic", "numpy")
NEEDED = ("torch", "transformers", "peft", "accelerate", "pydantic", "pydantic-settings", "jinja2", "pytest", "hypothesis")
"""What the check cannot do without; bitsandbytes it can."""


def facts() -> dict[str, Any]:
    """The machine, `device` first: cuda or cpu."""
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()}
    ours = pinned()
    found["versions"] = {name: {"here": installed(name), "ours": ours.get(name, "")} for name in PACKAGES}
    found["lacking"] = [name for name in NEEDED if not installed(name)]
    return {**_gpu(), **found}


def installed(name: str) -> str:
    """The version of a package that Python finds; empty where it finds none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def pinned() -> dict[str, str]:
    """The versions that the tests ran with, by package."""
    lines = Path("constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def lines(found: dict[str, Any]) -> list[str]:
    """The machine as a person reads it."""
    if found["device"] == "cuda":
        gpu = f"{found['gpu']}, {found['memory_mib']:.0f} MiB, driver {found['driver']}, CUDA {found['cuda']}"
    else:
        gpu = "no GPU: the CPU half, with small models and sizes; its numbers mean nothing"
    told = [f"{name} {v['here'] or 'none'}" + _beside(v) for name, v in found["versions"].items()]
    return [f"{gpu}; Python {found['python']}, {found['cores']} cores, {found['system']}", ", ".join(told)]


def _beside(versions: dict[str, str]) -> str:
    here = versions["here"].partition("+")[0]
    return "" if here == versions["ours"] else f" (ours: {versions['ours']})"


def _gpu() -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        return {"device": "cpu"}
    if not torch.cuda.is_available():
        return {"device": "cpu"}
    has = torch.cuda.get_device_properties(0)
    return {
        "device": "cuda",
        "gpu": has.name,
        "memory_mib": has.total_memory / 2**20,
        "capability": f"{has.major}.{has.minor}",
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (asked.stdout.split() or ["unknown"])[0]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(facts()) + "\n")
