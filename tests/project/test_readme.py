"""What the documents show is true: queries run, plug-ins work, the tree is the tree."""

import re
import subprocess
from pathlib import Path

import pytest
from sqlalchemy import text

from agentrl.workflow.algorithms import gradients
from agentrl.workflow.plugins import find, names
from agentrl.workflow.store.connect import Database
from agentrl.workflow.trajectory import Episode, Message, Step, Task
from tests.project.documents import DOCS, ROOT, between, section
from tests.support.small_models import tiny_calling


def test_six_queries_are_shown_and_run_on_both_databases(database: Database) -> None:
    queries = between(DOCS / "queries.md", "queries", "sql")
    assert len(queries) == 6
    for query in queries:
        with database.read() as tx:
            tx.execute(text(query)).all()


def test_the_plugins_shown_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for code in between(DOCS / "how-to.md", "plugins", "python"):
        name = re.match(r"# workflow/\w+/(\w+)\.py", code)
        assert name
        (tmp_path / f"{name[1]}.py").write_text(code)
    assert find("tools", "word_count:word_count").call({"text": "so much depends"}) == "3"
    turn = Step(0, (), (), (), (), "stop", Message("assistant", "three words here"), 0)
    episode = Episode(Task("k", (), ""), steps=(turn,), status="done", stop_reason="answered")
    assert find("rewards", "short_answer:short_answer")(episode) == 1.0
    assert find("envs", "counting:counting").rewards["short_answer"] == 0.1
    assert [task.reference for task in find("datasets", "poems:poems").load("train")] == ["3", "5"]


def test_the_first_plugin_scores_an_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (code,) = between(DOCS / "tutorial.md", "first plug-in", "python")
    (tmp_path / "mine.py").write_text(code)
    said = [Step(0, (), (), (), (), "stop", Message("assistant", answer), 0) for answer in ("-31", "It is -31.")]
    episodes = [Episode(Task("k", (), ""), steps=(step,), status="done", stop_reason="answered") for step in said]
    assert [find("rewards", "mine:brief")(episode) for episode in episodes] == [1.0, 0.0]


def test_the_policy_asked_from_python_answers(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "models").mkdir(parents=True)
    tiny_calling(tmp_path).rename(home / "models" / "tiny-arithmetic")
    (code,) = between(DOCS / "how-to.md", "python", "python")
    exec(compile(code, "how-to.md", "exec"), {})
    assert "torch.Size([1, " in capsys.readouterr().out


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
