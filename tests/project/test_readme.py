"""What the documents show is true: queries run, the tree is the tree."""

import re
import subprocess
from pathlib import Path

from sqlalchemy import text

from agentrl.workflow.algorithms import gradients
from agentrl.workflow.plugins import names
from agentrl.workflow.store.connect import Database
from tests.project.documents import DOCS, ROOT, between, section


def test_six_queries_are_shown_and_run_on_both_databases(database: Database) -> None:
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


def test_the_rooms_shown_are_the_rooms() -> None:
    (tree,) = re.findall(r"<!-- tree -->\n```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    product = {
        f"{file.parent}/"
        for file in tracked()
        if file.suffix == ".py" and file.parts[0] == "agentrl" and file.parts[1] != "migrations"
    }
    assert paths(tree) == product | {"agentrl/migrations/", "tests/", "bench/", "configs/", "examples/", "docs/"}


def test_the_tree_shown_is_the_tree() -> None:
    (tree,) = re.findall(r"```text\n(.*?)```", section(DOCS / "design.md", "## The tree"), re.DOTALL)
    shown = {path for path in paths(tree) if path.endswith(".py")}
    code = {
        str(file) for file in tracked() if file.suffix == ".py" and file.parts[0] == "agentrl" and file.parts[1] != "migrations"
    }
    assert shown == {file for file in code if Path(file).name not in ("__init__.py", "__main__.py")}
    for top in ("tests", "bench"):
        folders = {f"{top}/{file.parts[1]}/" for file in tracked() if file.parts[0] == top and len(file.parts) > 2}
        assert {path for path in paths(tree) if path.startswith(f"{top}/")} == folders | {f"{top}/"}


def test_every_tool_format_is_in_the_table() -> None:
    table = section(DOCS / "tools-and-sandbox.md", "## How calls are written")
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(names("tool_formats"))


def test_every_algorithm_is_in_the_table_with_its_curve() -> None:
    table = section(DOCS / "algorithms.md", "# Algorithms and rewards")
    learned = section(DOCS / "measurements.md", "## Do the algorithms learn?")
    prompts = section(DOCS / "algorithms.md", "## Prompts that learn")
    named = re.compile(r"^\| `(\w+)`", re.MULTILINE)
    assert set(named.findall(prompts)) == set(names("algorithms")) - gradients().keys()
    for told in (table.replace(prompts, "").split("| for any of them |")[0], learned):
        assert set(named.findall(told)) == gradients().keys()
