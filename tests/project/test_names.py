"""Modules: each has one file name and is loaded once; the links at the top of a checkout are for reading only."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from agentrl.workflow.plugins import KINDS

ROOT = Path(__file__).parents[2]
PRODUCT = ROOT / "agentrl"
LINKS = ("workflow", "workers", "cli", "migrations")

EVERYTHING = """
import importlib, pkgutil, sys
from collections import Counter
import agentrl
OPTIONAL = ("trl_trainer", "tool_server", "__main__", "keeper")
for package in ("workflow", "workers", "cli"):
    folder = importlib.import_module(f"agentrl.{package}")
    for module in pkgutil.walk_packages(folder.__path__, folder.__name__ + "."):
        if not module.name.endswith(OPTIONAL):
            importlib.import_module(module.name)
from pathlib import Path
modules = {id(module): module for module in sys.modules.values() if getattr(getattr(module, "__spec__", None), "origin", None)}
files = Counter(module.__spec__.origin for module in modules.values())
twice = Counter(str(Path(file).resolve()) for file in files.elements() if file.endswith(".py"))
print([file for file, number in twice.items() if number > 1 and "site-packages" not in file and "/lib/python" not in file])
print(len([name for name in sys.modules if name.startswith("agentrl.")]) > 300)
"""


@pytest.mark.slow
def test_modules_are_loaded_once_each() -> None:
    done = run_in(ROOT, EVERYTHING)
    assert (done.stdout, done.stderr) == ("[]\nTrue\n", "")


@pytest.mark.parametrize("link", LINKS)
def test_links_refuse_imports(link: str) -> None:
    done = run_in(ROOT, f"import {link}")
    assert done.stderr.endswith(f"ImportError: Import agentrl.{link} instead.\n")


def test_links_lead_into_package() -> None:
    """What a person reads, breaks at and edits in `workflow/` is what runs."""
    assert {link: (ROOT / link).resolve() for link in LINKS} == {link: PRODUCT / link for link in LINKS}
    links = [file for file in PRODUCT.rglob("*") if file.is_symlink()]
    assert links == []


def test_module_file_names_are_unique() -> None:
    """A command's file has the command's name, whatever else has it."""
    free = {PRODUCT / "cli", *(PRODUCT / "workflow" / kind for kind in KINDS)}
    count = Counter(file.name for file in PRODUCT.rglob("*.py") if file.parent not in free and not file.name.startswith("__"))
    assert [name for name, number in count.items() if number > 1] == []


def functions_of(folder: Path) -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield file, node


def test_variable_names_are_nouns() -> None:
    """A participle says nothing of what a variable holds."""
    stores = (
        (file, node)
        for file, function in functions_of(PRODUCT)
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    participles = {"found", "said", "told", "made", "asked", "kept", "known", "named", "shown", "most", "words", "each"}
    assert {f"{file}:{node.lineno}: {node.id}" for file, node in stores if node.id in participles} == set()


def test_public_class_names_are_unique() -> None:
    """`Trainer` has two meanings: the public one, and the one that updates a policy."""
    nodes = (node for file in PRODUCT.rglob("*.py") for node in ast.walk(ast.parse(file.read_bytes())))
    count = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    assert [name for name, number in count.items() if number > 1] == ["Trainer"]


def test_test_names_begin_with_unit() -> None:
    names = [function.name for _, function in functions_of(ROOT / "tests") if function.name.startswith("test_")]
    assert [name for name in names if len(name) > 60 or re.match(r"test_(an?|the|of|what|who|where|it)_", name)] == []
    assert [name for name, number in Counter(names).items() if number > 1] == []


@pytest.mark.parametrize("package", LINKS)
def test_users_package_comes_before_link(tmp_path: Path, package: str) -> None:
    (tmp_path / package).mkdir()
    for file in ("__init__.py", "losses.py"):
        (tmp_path / package / file).write_text("OWN = 'theirs'")
    (tmp_path / "mine.py").write_text(f"from {package}.losses import OWN\n\ndef thing(): return OWN\n")
    code = "from agentrl.workflow.plugins import find; print(find('rewards', 'mine:thing')())"
    done = run_in(tmp_path, code, "-P")
    assert (done.stdout, done.stderr) == ("theirs\n", "")


def run_in(folder: Path, code: str, *options: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_users_package_may_lie_beside_installed_agentrl(tmp_path: Path) -> None:
    copytree(PRODUCT, tmp_path / "agentrl", ignore=ignore_patterns("__pycache__"))
    (tmp_path / "workflow").mkdir()
    (tmp_path / "workflow" / "__init__.py").write_text("OWN = 'theirs'")
    done = run_in(tmp_path, "import agentrl, workflow; print(agentrl.__file__, workflow.OWN)", PYTHONPATH=str(tmp_path))
    assert (done.stdout, done.stderr) == (f"{tmp_path / 'agentrl' / '__init__.py'} theirs\n", "")
