"""In a fresh folder each command says what to type and makes nothing; and what a message says to type is a command."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.main import main
from tests.conftest import forget_process
from tests.test_cli import process
from tests.test_cli import tcp_redis as tcp_redis
from workers.app import QUEUES
from workers.process import database as process_database

READS = (
    "runs", "runs --json", "gc", "gc --dry-run", "doctor --json", "config show", "tools", "down", "db current",
)  # fmt: skip
"""Commands that have an answer where nothing is stored."""

ASKS = (
    "episodes x", "replay 1", "replay 1 --verify all", "replay 1 --diff 2", "watch x", "watch x --json", "events x", "why 1",
    "fork 1 --step 0", "rescore x --reward format", "whatif x --algorithm rloo", "resume x", "pause x", "cancel x", "vacuum",
    "sql 'select 1'", "gc x", "compare a b", "config show --run x", "chat --policy x", "eval --policy x",
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


@pytest.mark.parametrize("words", [*READS, *ASKS])
def test_a_command_that_only_looks_makes_nothing_in_a_fresh_folder(
    fresh: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_look_with_a_broker_that_is_named_makes_no_database_either(fresh: Path, tcp_redis: str) -> None:
    for words, code in (("runs", 0), ("doctor", 0), ("resume x", 5), ("watch x", 5)):
        done = process(["-m", "cli", *words.split()], fresh, AGENTRL_BROKER_URL=tcp_redis)
        assert done.returncode == code, done.stdout + done.stderr
        assert not fresh.exists(), words
        if words == "doctor":
            lines = [line for line in done.stdout.splitlines() if "No worker serves" in line]
            assert [line.rpartition("->")[2].strip() for line in lines] == [f"agentrl worker {queue}" for queue in QUEUES]
