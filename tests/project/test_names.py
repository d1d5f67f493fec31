"""Modules: each is loaded under one name, has a name of its own, and can be had by its old one for one release."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from agentrl import old_names
from agentrl.workflow.envs import scoring_hash
from agentrl.workflow.plugins import KINDS, find, names
from agentrl.workflow.rewards import code_hash

ROOT = Path(__file__).parents[2]
PRODUCT = ("agentrl", "workflow", "workers", "cli")

EVERYTHING = """
import importlib, pkgutil, sys, warnings
from collections import Counter
import agentrl
OPTIONAL = ("trl_trainer", "tool_server", "__main__", "keeper")
for package in ("workflow", "workers", "cli"):
    folder = importlib.import_module(f"agentrl.{package}")
    for module in pkgutil.walk_packages(folder.__path__, folder.__name__ + "."):
        if not module.name.endswith(OPTIONAL):
            importlib.import_module(module.name)
warnings.simplefilter("ignore")
import workflow.losses, workflow.store.serving, workflow.rewards.length
from pathlib import Path
modules = {id(module): module for module in sys.modules.values() if getattr(getattr(module, "__spec__", None), "origin", None)}
files = Counter(module.__spec__.origin for module in modules.values())
twice = Counter(str(Path(file).resolve()) for file in files.elements() if file.endswith(".py"))
print([file for file, number in twice.items() if number > 1 and "site-packages" not in file and "/lib/python" not in file])
print(workflow.losses.__name__, len([name for name in sys.modules if name.startswith("agentrl.")]) > 300)
"""

BEFORE = {
    "rewards": {
        "echoed": "fd555389783a0ecadfc5a8b0b0db9a57",
        "format": "9ffec8348d2a5c0ea5434bd09a1bfdf1",
        "length": "8f1f0551bf8618611d1e7c151c038d0a",
        "math_answer": "2f22aa4dbf2601607f486298bdc3fd49",
        "numeric_answer": "d987614bae487c044b8d302ab2920b77",
        "overlong": "fda26fd56db723fd3afbd066d6657bb1",
        "progress": "a69825ed08bb38a9feee54dd89aec72e",
        "sql_match": "3028dd63f2b6388d97dd54647d4af16e",
        "tests_passed": "6b95e7f462dbfb8ea6428249d0af5f45",
        "text_answer": "91521a627edb53637a23cf73957e273a",
        "tool_use": "0db72c97fe519b3e03bb49c53b08f7d4",
    },
    "envs": {
        "arithmetic": "d987614bae487c044b8d302ab2920b77",
        "code": "d18e70ceff78c2f2754972e02b2c6b4a",
        "code_tiny": "6b95e7f462dbfb8ea6428249d0af5f45",
        "echo": "5d713b358fe5a43b625e81834b4ac4d9",
        "math": "f2d452992929cbea2577c19fbe057c36",
        "plain": "e3b0c44298fc1c149afbf4c8996fb924",
        "qa": "91521a627edb53637a23cf73957e273a",
        "search_qa": "91521a627edb53637a23cf73957e273a",
        "text_to_sql": "3028dd63f2b6388d97dd54647d4af16e",
    },
}
"""Hashes of what scores, weight 1 or the env's own, as the commit before the rooms computed them."""


BEFORE_BY_PATH = "41724d62f4b1280a4f8a1fe4aa9b2d2b"


@pytest.mark.slow
def test_every_module_is_loaded_under_one_name_the_old_names_included() -> None:
    done = subprocess.run([sys.executable, "-c", EVERYTHING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\nagentrl.workflow.training.losses True\n"


@pytest.mark.parametrize("package", ["workflow", "workers", "cli", "migrations"])
def test_our_folders_are_imported_by_no_name_but_agentrls(package: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {package}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(f"ImportError: Import agentrl.{package}: each module has one name.\n")


def test_no_basename_stands_twice_outside_of_plugins() -> None:
    plugins = {ROOT / "workflow" / kind for kind in KINDS}
    files = [file for top in PRODUCT for file in (ROOT / top).rglob("*.py") if not file.relative_to(ROOT).parent.is_symlink()]
    own = {file.resolve() for file in files if file.parent not in plugins}
    count = Counter(file.name for file in own if not file.name.startswith("__"))
    assert [name for name, number in count.items() if number > 1] == []


@pytest.mark.slow
def test_a_module_of_before_is_the_module_of_now_and_warns() -> None:
    code = "import agentrl; from workflow.engine import Engine; from agentrl.workflow.engines import Engine as Now\n"
    code += (
        "from workflow import advantages, chat; from workflow.store import serving; from agentrl.workflow import chat as room\n"
    )
    code += "print(Engine is Now, advantages.__name__, chat.__name__, serving.__name__, room.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = ("training.advantages", "chat.rendering", "store.control_reads", "chat")
    assert done.stdout.split() == ["True", *(f"agentrl.workflow.{name}" for name in found)]
    said = "FutureWarning: workflow.engine is agentrl.workflow.engines by now; the old name goes with the next release."
    assert f"<string>:1: {said}" in done.stderr


def test_a_path_to_a_plugin_with_an_old_name_leads_to_the_same_object_whose_code_hashes_as_before() -> None:
    code = "from agentrl.workflow.plugins import find; from agentrl.workflow.rewards import code_hash\n"
    code += "old = 'workflow.rewards.numeric_answer:numeric_answer'\n"
    code += "print(find('rewards', old) is find('rewards', 'numeric_answer'), code_hash({old: 1.0}))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"True {BEFORE_BY_PATH}\n"


@pytest.mark.parametrize("package", ["workflow", "workers", "cli", "migrations"])
def test_a_persons_own_package_of_such_a_name_is_theirs(tmp_path: Path, package: str) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / package / "losses.py").write_text("OWN = 'theirs'")
    (tmp_path / "mine.py").write_text(f"from {package}.losses import OWN\n\ndef thing(): return OWN\n")
    code = "from agentrl.workflow.plugins import find; print(find('rewards', 'mine:thing')())"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("theirs\n", "")


def run_in(folder: Path, code: str, *options: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *options, "-W", "ignore", "-c", code]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False)


OLD_AND_OWN = """
import agentrl
from workflow.losses import LossTerms
from workflow.rewards import *
print(LossTerms.__module__, judges_of.__module__)
"""


@pytest.mark.slow
def test_a_folder_of_files_that_is_no_package_hides_no_old_name(tmp_path: Path) -> None:
    (tmp_path / "workflow").mkdir()
    (tmp_path / "workflow" / "mine.py").write_text("OWN = 'theirs'")
    done = run_in(tmp_path, OLD_AND_OWN + "from workflow.mine import OWN; print(OWN)")
    assert (done.stdout, done.stderr) == ("agentrl.workflow.training.losses agentrl.workflow.rewards\ntheirs\n", "")


@pytest.mark.slow
def test_another_checkout_on_the_path_is_nobodys_own_package(tmp_path: Path) -> None:
    (tmp_path / "agentrl").mkdir()
    for package in ("workflow", "workers"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ImportError('this is the other')")
        (tmp_path / "agentrl" / package).symlink_to(f"../{package}")
    done = run_in(ROOT, OLD_AND_OWN.replace("import agentrl", f"import agentrl, sys; sys.path.insert(0, {str(tmp_path)!r})"))
    assert (done.stdout, done.stderr) == ("agentrl.workflow.training.losses agentrl.workflow.rewards\n", "")


def test_a_persons_own_package_may_lie_beside_ours(tmp_path: Path) -> None:
    """As in the site-packages of a wheel, where a package lies and no link."""
    copytree(ROOT / "agentrl", tmp_path / "agentrl", ignore=ignore_patterns("__pycache__"))
    (tmp_path / "workflow").mkdir()
    (tmp_path / "workflow" / "__init__.py").write_text("OWN = 'theirs'")
    done = run_in(tmp_path, "import agentrl, workflow; print(agentrl.__file__, workflow.OWN)", PYTHONPATH=str(tmp_path))
    assert (done.stdout, done.stderr) == (f"{tmp_path / 'agentrl' / '__init__.py'} theirs\n", "")


def test_a_checkout_whose_links_became_text_says_how_to_get_one_with_links(tmp_path: Path) -> None:
    (tmp_path / "agentrl").mkdir()
    for name in ("__init__.py", "elsewhere.py", "old_names.py"):
        (tmp_path / "agentrl" / name).write_bytes((ROOT / "agentrl" / name).read_bytes())
    (tmp_path / "agentrl" / "workflow").write_text("../workflow")
    done = run_in(tmp_path, "import agentrl", PYTHONPATH=str(tmp_path))
    assert "clone anew with `git clone -c core.symlinks=true`" in done.stderr.splitlines()[-1]


def test_every_old_name_leads_somewhere() -> None:
    missing = [new for old in old_names._OLD if not _file(new := old_names.new_name(f"workflow.{old}"))]
    assert missing == []


def test_a_move_changes_no_hash_of_what_scores() -> None:
    assert {name: code_hash({name: 1.0}) for name in names("rewards")} == BEFORE["rewards"]
    envs = {name: find("envs", name) for name in names("envs")}
    assert {name: scoring_hash(env, dict(env.rewards)) for name, env in envs.items()} == BEFORE["envs"]


def _file(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
