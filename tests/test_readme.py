"""The README is true: its queries run, its plug-ins work, its tree is the tree."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.models import tiny_calling
from workflow.plugins import find, names
from workflow.store.connect import Database
from workflow.trajectory import Episode, Message, Step, Task

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def between(mark: str, language: str) -> list[str]:
    """The code blocks of that language between `<!-- mark -->` and `<!-- /mark -->`."""
    part = README.split(f"<!-- {mark} -->")[1].split(f"<!-- /{mark} -->")[0]
    return re.findall(rf"```{language}\n(.*?)```", part, re.DOTALL)


def test_five_queries_are_shown_and_run_on_both_databases(database: Database) -> None:
    queries = between("queries", "sql")
    assert len(queries) == 5
    for query in queries:
        with database.read() as tx:
            tx.execute(text(query)).all()


def test_the_plugins_shown_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for code in between("plugins", "python"):
        name = re.match(r"# workflow/\w+/(\w+)\.py", code)
        assert name
        (tmp_path / f"{name[1]}.py").write_text(code)
    assert find("tools", "word_count:word_count").call({"text": "so much depends"}) == "3"
    turn = Step(0, (), (), (), (), "stop", Message("assistant", "three words here"), 0)
    episode = Episode(Task("k", (), ""), steps=(turn,), status="done", stop_reason="answered")
    assert find("rewards", "short_answer:short_answer")(episode) == 1.0
    assert find("envs", "counting:counting").rewards["short_answer"] == 0.1
    assert [task.reference for task in find("datasets", "poems:poems").load("train")] == ["3", "5"]


def test_the_policy_asked_from_python_answers(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "models").mkdir(parents=True)
    tiny_calling(tmp_path).rename(home / "models" / "tiny-arithmetic")
    (code,) = between("python", "python")
    exec(compile(code, "README.md", "exec"), {})
    assert "torch.Size([1, " in capsys.readouterr().out


def test_the_tree_shown_is_the_tree() -> None:
    shown = set(re.findall(r"^\s*([\w.]+(?:\.py|/))", README.split("## The tree")[1].split("## ")[0], re.MULTILINE))
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    code = {Path(file) for file in tracked if file.endswith(".py") and file.startswith(("workflow/", "workers/", "cli/"))}
    missing = {file.name for file in code if file.name not in ("__init__.py", "__main__.py")} - shown
    assert not missing


def test_the_commands_shown_exist() -> None:
    shown = set(re.findall(r"`?agentrl ([a-z]+)", README))
    known = subprocess.run([sys.executable, "-m", "cli", "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {command for command in shown if not re.search(rf"\b{command}\b", known)} <= {"keeps", "neither"}


def test_every_tool_format_is_in_the_table() -> None:
    table = README.split("### How calls are written")[1].split("### ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(names("tool_formats"))
