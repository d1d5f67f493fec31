"""The command line starts at once and a tools worker stays small: neither loads a model library, not even by a plug-in."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli.commands import COMMANDS
from bench.gpu.__main__ import PARTS
from bench.gpu.suites import FILES

HEAVY = {"torch", "transformers", "peft", "bitsandbytes", "datasets", "huggingface_hub"}
PLUGINS = """
from agentrl.workflow.plugins import find, names
for kind in ("datasets", "tools", "rewards", "envs"):
    for name in names(kind):
        find(kind, name)
"""


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after the code."""
    report = "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


FAST = (
    "agentrl.cli.main",
    "agentrl.workers.stack.control_loop",
    "agentrl.workers.stack.worker",
    "agentrl.workers.serving.tool_server",
    "agentrl.workers.requests.submit",
    "agentrl.workers.stack.supervisor",
)
"""What starts fast."""


def test_fast_modules_import_no_model_library() -> None:
    """One process imports them all: if none is loaded at the end, no module of them loads one."""
    assert not loaded_by("\n".join(f"import {module}" for module in FAST)) & HEAVY


def test_commands_that_read_rows_load_no_config() -> None:
    """The config's models take as long to build as such a command takes to answer."""
    modules = ("browse", "watch", "tags", "fork", "whatif", "sql", "logs")
    assert not loaded_by("\n".join(f"import agentrl.cli.{module}" for module in modules)) & {"pydantic"}


def test_tools_worker_imports_no_model_library_with_any_plugin() -> None:
    assert not loaded_by(f"import agentrl.workers.jobs.tool_call{PLUGINS}") & HEAVY


def imports_of(module: str) -> set[str]:
    """The modules that it needs to be imported, by its source: its own packages, and what stands outside of functions."""
    file = Path(*module.split("."))
    source = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    found, left = set(), [ast.parse(source.read_text())] if source.exists() else []
    while left:
        for node in ast.iter_child_nodes(left.pop()):
            if isinstance(node, ast.Import):
                found |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {str(node.module), *(f"{node.module}.{name.name}" for name in node.names)}
            elif not isinstance(node, ast.FunctionDef) and "TYPE_CHECKING" not in ast.unparse(getattr(node, "test", [])):
                left.append(node)
    packages = [name.rpartition(".")[0] for name in (module, *found)]
    return found | set(filter(None, packages))


def test_gpu_check_parts_import_no_queue_and_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of `make gpu-check` carries no wheels of the stack, nor do the tests of the second need any."""
    monkeypatch.chdir(Path(__file__).parents[2])
    needed: set[str] = set()
    left = {
        *(f"tests.{file.removesuffix('.py').replace('/', '.')}" for file in FILES),
        *(f"bench.gpu.{spec.module}" for spec in PARTS.values() if "celery" not in spec.needs),
        "bench.gpu.__main__",
        "bench.gpu.watch",
    }
    while left:
        needed |= left
        left = {name for module in left for name in imports_of(module)} - needed
    assert {"torch", "agentrl.workflow.training.trainer", "bench.gpu.part", "tests.support.small_models"} <= needed
    assert not {name.partition(".")[0] for name in needed} & {"alembic", "celery", "gguf", "kombu", "redis", "sqlalchemy"}
    assert not [name for name in needed if name.startswith("agentrl.workers")]


def test_commands_import_no_other_command() -> None:
    """Options and functions that several commands need are in modules that are no commands."""
    modules = {entry.where.partition(":")[0] for entry in COMMANDS.values()}
    imported = []
    for module in sorted(modules):
        tree = ast.parse(Path(*module.split(".")).with_suffix(".py").read_text())
        names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported += [(module, name) for name in sorted(names & modules)]
    assert imported == []
