"""What the documents show is true: queries run, the tree is the tree."""

import re
import subprocess
import tomllib
from pathlib import Path

from PIL import Image, ImageSequence
from sqlalchemy import text

from agentrl.workflow.algorithms import gradients
from agentrl.workflow.plugins import names
from agentrl.workflow.store.connect import Database
from tests.project.documents import DOCS, ROOT, between, rows, section
from tests.support.readme_gif import GIF, MAX_BYTES, MAX_SECONDS

ARCHITECTURE = DOCS / "architecture.md"


def test_queries_document_runs_on_both_databases(database: Database) -> None:
    queries = between(DOCS / "queries.md", "queries", "sql")
    assert len(queries) == 6
    for query in queries:
        with database.read() as tx:
            tx.execute(text(query)).all()


def paths(tree: str) -> set[str]:
    """The folders (with their slash) and files of a tree drawn by indentation."""
    found, folders = set(), list[str]()
    for line in re.findall(r"^(?: {2})*\S+", tree, re.MULTILINE):
        name = line.lstrip()
        folders[(len(line) - len(name)) // 2 :] = [name]
        found.add("".join(folders))
    return found


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [Path(file) for file in listed if (ROOT / file).is_file() and not (ROOT / file).is_symlink()]


def test_readme_tree_names_folders() -> None:
    """Every folder in the README's tree is tracked, and all top-level folders are in it."""
    (tree,) = re.findall(r"<!-- tree -->\n```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(tree.splitlines()) <= 20
    folders = {f"{folder}/" for file in tracked() for folder in file.parents}
    top = {f"{file.parts[0]}/" for file in tracked() if len(file.parts) > 1 and not file.parts[0].startswith(".")}
    assert top <= paths(tree) <= folders


def test_readme_gif_is_short_and_small() -> None:
    file = ROOT / GIF
    assert f"]({GIF})" in (ROOT / "README.md").read_text()
    assert file.stat().st_size <= MAX_BYTES
    with Image.open(file) as image:
        seconds = sum(frame.info["duration"] for frame in ImageSequence.Iterator(image)) / 1000
    assert 6 <= seconds <= MAX_SECONDS


def test_architecture_tree_is_the_tree() -> None:
    (tree,) = re.findall(r"```text\n(.*?)```", section(ARCHITECTURE, "## The tree"), re.DOTALL)
    shown = {path for path in paths(tree) if path.endswith(".py")}
    code = {
        str(file) for file in tracked() if file.suffix == ".py" and file.parts[0] == "agentrl" and file.parts[1] != "migrations"
    }
    assert shown == {file for file in code if Path(file).name not in ("__init__.py", "__main__.py")}
    for top in ("tests", "bench"):
        folders = {f"{top}/{file.parts[1]}/" for file in tracked() if file.parts[0] == top and len(file.parts) > 2}
        assert {path for path in paths(tree) if path.startswith(f"{top}/")} == folders | {f"{top}/"}


def test_architecture_table_names_files_and_definitions() -> None:
    """Every path in "Where is ...?" exists, and each name in its last column is defined in one of the row's files."""
    table = rows(section(ARCHITECTURE, "## Where is ...?"))
    assert len(table) >= 25
    for task, where, start in table:
        files = [ROOT / "agentrl" / path for path in re.findall(r"`([\w/]+/[\w.]*)`", where)]
        assert [file for file in files if not file.exists()] == [], task
        sources = [file / "__init__.py" if file.is_dir() else file for file in files]
        text = "\n".join(file.read_text() for file in sources if file.is_file())
        for name in re.findall(r"`(\w+)`", start):
            defined = rf'^(?:\s*(?:async )?(?:def|class|function) {name}\b|{name}\b[^\n]*=|\s*"{name}":)'
            assert re.search(defined, text, re.MULTILINE), f"{task}: {name}"


def test_architecture_layers_are_those_of_the_contracts() -> None:
    (block,) = re.findall(r"```text\n(.*?)```", section(ARCHITECTURE, "## Which package may import which"), re.DOTALL)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {contract["containers"][0]: contract["layers"] for contract in contracts if contract["type"] == "layers"}
    expected = [
        line
        for package in layers["agentrl"]
        for line in (package, *(f"    {layer}" for layer in layers.get(f"agentrl.{package}", [])))
    ]
    assert block.splitlines() == expected


def test_document_table_has_every_tool_format() -> None:
    table = section(DOCS / "tools-and-sandbox.md", "## How calls are written")
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(names("tool_formats"))


def test_document_table_has_every_algorithm_with_curve() -> None:
    table = section(DOCS / "algorithms.md", "# Algorithms and rewards")
    learned = section(DOCS / "measurements.md", "## Do the algorithms learn?")
    prompts = section(DOCS / "algorithms.md", "## Prompts that learn")
    named = re.compile(r"^\| `(\w+)`", re.MULTILINE)
    assert set(named.findall(prompts)) == set(names("algorithms")) - gradients().keys()
    for told in (table.replace(prompts, "").split("## Options of training")[0], learned):
        assert set(named.findall(told)) == gradients().keys()
