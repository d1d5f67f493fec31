"""The command line starts at once and a tools worker stays small: neither loads a model library, not even by a plug-in."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "peft", "bitsandbytes", "datasets", "huggingface_hub"}
PLUGINS = """
from workflow.plugins import find, names
for kind in ("datasets", "tools", "rewards", "envs"):
    for name in names(kind):
        find(kind, name)
"""


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after the code."""
    report = "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["cli.main", "workers.control", "workers.main", "workers.server", "workers.submit", "workers.supervisor"]
)
def test_what_starts_fast_loads_no_model_library(module: str) -> None:
    assert not loaded_by(f"import {module}") & HEAVY


def test_a_tools_worker_with_every_plugin_loads_no_model_library() -> None:
    assert not loaded_by(f"import workers.tools{PLUGINS}") & HEAVY
