"""In a fresh folder each command says what to type and makes nothing; and what a message says to type is a command."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from agentrl.cli.app import app
from agentrl.cli.main import main
from agentrl.workers.stack.celery_app import QUEUES
from agentrl.workers.stack.process import database as process_database
from tests.cli.test_cli import process
from tests.cli.test_cli import tcp_redis as tcp_redis
from tests.conftest import forget_process
from tests.project.documents import PAGES

REPOSITORY = Path(__file__).parents[2]

READS = (
    "runs", "runs --json", "gc", "gc --dry-run", "doctor --json", "config show", "tools", "down", "db current",
)  # fmt: skip
"""Commands that have an answer where nothing is stored."""

ASKS = (
    "episodes x", "replay 1", "replay 1 --verify all", "replay 1 --diff 2", "watch x", "watch x --json", "events x", "why 1",
    "fork 1 --step 0", "rescore x --reward format", "whatif x --algorithm rloo", "resume x", "pause x", "cancel x", "vacuum",
    "sql 'select 1'", "gc x", "compare a b", "config show x", "chat --policy x", "eval --policy x",
    "sft --from-episodes x", "dpo --from-episodes x", "submit --from-groups x", "submit --from-episodes x",
)  # fmt: skip
"""Commands that ask for something of which there is none."""


@pytest.fixture
def fresh(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    forget_process()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield home
    if process_database.made:
        process_database().close()
    forget_process()


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("words", [*READS, *ASKS])
def test_reading_commands_make_nothing_in_fresh_folder(fresh: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([word.strip("'") for word in words.split(" ", 1 if words.startswith("sql") else -1)])
    told = capsys.readouterr()
    assert not fresh.exists(), f"{words} made {[str(path) for path in fresh.rglob('*')]}"
    assert code == {"db current": 4}.get(words, 5 if words in ASKS else 0), told.err
    if words in ASKS:
        assert not told.out
        said, todo, *more = told.err.splitlines()
        assert said.startswith("agentrl: ")
        assert "agentrl " in todo
        assert not more


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_reading_commands_with_named_broker_make_no_database(fresh: Path, tcp_redis: str) -> None:
    for words, code in (("runs", 0), ("doctor", 0), ("resume x", 5), ("watch x", 5)):
        done = process(["-m", "agentrl.cli", *words.split()], fresh, AGENTRL_BROKER_URL=tcp_redis)
        assert done.returncode == code, done.stdout + done.stderr
        assert not fresh.exists(), words
        if words == "doctor":
            lines = [line for line in done.stdout.splitlines() if "No worker serves" in line]
            assert [line.rpartition("->")[2].strip() for line in lines] == [f"agentrl worker {queue}" for queue in QUEUES]


def sentences() -> Iterator[tuple[str, str]]:
    """Every text of the program, and where it stands; what is put into it is `X`."""
    for package in ("cli", "workers", "workflow"):
        for file in sorted((REPOSITORY / "agentrl" / package).rglob("*.py")):
            tree = ast.parse(file.read_text())
            inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
            for node in ast.walk(tree):
                where = f"{file.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 0)}"
                if isinstance(node, ast.JoinedStr):
                    yield where, "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                    yield where, node.value
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), start=1):
            yield f"{page.relative_to(REPOSITORY)}:{number}", line.removeprefix("$ ")


def complaint(text: str) -> str:
    """What is wrong with the first command that a text says to type; empty where nothing is."""
    known = get_command(app)
    for before, said in re.findall(r"(^\s*|`|: |, then |; )agentrl ([^`;,\n()]+)", text):
        words = said.replace("'", " ").replace('"', " ").split()
        command: Any = known
        while words and words[0].rstrip(".:") in getattr(command, "commands", {}):
            command = command.commands[words.pop(0).rstrip(".:")]
        if command is known and (before.strip() or not text[:1].isspace()) and not words[0].startswith(("-", "X", "...")):
            return f"there is no `agentrl {words[0]}`"
        if command is not known and getattr(command, "no_args_is_help", False) and words:
            return f"`agentrl {command.name}` has no {words[0]}"
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        asked = [word for before, word in pairwise(("", *words)) if before != "--sort"]  # whose value may be -reward
        flags = [word for word in asked if re.fullmatch(r"--?[a-z][a-z0-9-]*", word)]
        strange = [flag for flag in flags if flag not in options | {"--help", "-h"}]
        if strange and command is not known:
            return f"`agentrl {said}` has no {strange[0]}"
    return ""


@pytest.mark.slow
def test_hinted_commands_exist_with_their_options() -> None:
    told = [(where, said, complaint(said)) for where, said in sentences() if "agentrl " in said]
    assert len(told) > 150, "they are found"
    assert [(where, wrong, said[:200]) for where, said, wrong in told if wrong] == []


@pytest.mark.parametrize(
    "text", ["Type `agentrl restart`.", "agentrl gone RUN", "See: agentrl episodes RUN --best", "agentrl db up"]
)
def test_hint_check_finds_invalid_command(text: str) -> None:
    assert complaint(text)
