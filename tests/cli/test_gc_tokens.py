"""`agentrl gc --tokens`: it says what it would remove, asks, and removes; afterwards the commands say that it did."""

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agentrl.workers.stack.process import database as process_database
from agentrl.workflow.store import planning, train_commits
from agentrl.workflow.store.connect import Database
from bench.faults.fork_server import Nursery
from tests.conftest import forget_process
from tests.support.forked_stack import forked_stack
from tests.support.played_runs import ready, start, submission, update_of, value, values
from tests.support.pseudo_terminal import Terminal
from tests.support.real_stack import SMALL
from tests.support.small_models import tiny_random
from tests.support.typed import agentrl

SIZES = {"episodes": 4, "steps": 4, "bytes": 88}


@pytest.fixture
def here(store_home: Path) -> Iterator[Database]:
    """The store of this process's commands, with the run `first`, which is done."""
    forget_process()
    db = process_database()
    work = ready(db, submission())
    train_commits.commit_update(db, work, update_of(work), 3)
    yield db
    db.close()
    forget_process()


def count(db: Database) -> int:
    return int(value(db, "SELECT count(*) FROM step_tokens"))


def test_gc_tokens_dry_run_removes_nothing(here: Database, capsys: pytest.CaptureFixture[str]) -> None:
    out, told = agentrl(capsys, "gc", "--tokens", "first", "--dry-run")
    assert told == "first: token ids and logprobs of 4 steps of 4 episodes, 88 bytes\n"
    assert out == "88 bytes would be removed from the database.\n"
    out, _ = agentrl(capsys, "gc", "--tokens", "first", "--dry-run", "--json")
    assert json.loads(out) == {"dry_run": True, "bytes": {"tokens": 88}, "runs": {"first": SIZES}}
    assert count(here) == 4


def test_gc_tokens_asks_and_nobody_answers(here: Database, capsys: pytest.CaptureFixture[str]) -> None:
    _, told = agentrl(capsys, "gc", "--tokens", "first", code=2)
    assert "first: token ids and logprobs of 4 steps of 4 episodes, 88 bytes" in told
    assert "Nothing was removed: this command asks first, and stdin is not a terminal." in told
    assert count(here) == 4


def test_gc_tokens_yes_removes_and_names_vacuum(here: Database, capsys: pytest.CaptureFixture[str]) -> None:
    out, told = agentrl(capsys, "gc", "--tokens", "1", "--yes")
    assert out.splitlines()[-1] == "88 bytes were removed from the database."
    assert told.splitlines()[-1] == "The file keeps its size until you type: agentrl vacuum"
    assert count(here) == 0
    out, told = agentrl(capsys, "gc", "--tokens", "first", "--yes")
    assert "The tokens of run 'first' were removed on " in told
    assert out.splitlines()[-1] == "0 bytes were removed from the database."
    agentrl(capsys, "vacuum")


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (("--tokens",), "--tokens removes the tokens of the runs that you name.", 2),
        (("--tokens", "first", "--keep-last", "1"), "--tokens and --keep-last exclude each other.", 2),
        (("first", "--yes"), "--yes has no effect without --tokens.", 2),
        (("--tokens", "nobody", "--yes"), "There is no run 'nobody'.", 5),
        (("--tokens", "first", "second", "--yes"), "Run 'second' is running and needs its tokens.", 6),
    ],
)
def test_gc_tokens_refuses_in_one_sentence(
    here: Database, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str, code: int
) -> None:
    start(here, submission("second"))
    _, told = agentrl(capsys, "gc", *words, code=code)
    assert said in told
    assert count(here) == 4


@pytest.mark.slow
def test_gc_tokens_removes_after_answer_at_terminal(here: Database, forks: Nursery) -> None:
    for answer, left in (("n\n", 4), ("y\n", 0)):
        with closing(Terminal(forks, "gc", "--tokens", "first", environment=os.environ)) as terminal:
            terminal.wait(r"Remove 88 bytes for good\? \[y/N\]")
            terminal.type(answer)
            assert terminal.end() == 0
            assert ("Nothing was removed." if left else "88 bytes were removed") in terminal.shown
        assert count(here) == left


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_commands_after_gc_tokens_of_real_run(short_folder: Path, forks: Nursery, migrated_file: Path, tmp_path: Path) -> None:
    model = tiny_random(tmp_path / "random")
    with forked_stack(short_folder, forks, migrated_file) as stack:
        asked = ("--dataset", "arithmetic", "--model", str(model), "--max-tasks", "8", *SMALL)
        stack.agentrl("submit", *asked, "--name", "first", "--wait")
        fork = stack.agentrl("fork", "1", "--step", "0", "-n", "2", "--wait").strip()
        curve = values(stack.database, "SELECT mean_reward FROM v_iterations WHERE run = 'first' ORDER BY iteration")
        before = stack.agentrl("replay", "1")
        stack.agentrl("gc", "--tokens", "first", "--yes")
        stack.agentrl("vacuum")
        sentence = "The tokens of run 'first' were removed on "
        for words in (
            ("replay", "1", "--verify", "all"), ("replay", "1", "--verify", "tokens"), ("replay", "1", "--diff", "2"),
            ("resume", "first"), ("resume", "first", "--epochs", "1"), ("fork", "1", "--step", "0"),
            ("whatif", "first", "--algorithm", "rloo"),
            ("rescore", "first", "--reward", "numeric_answer"), ("submit", "--from-episodes", "first"),
            ("sft", "--from-episodes", "first"),
            ("dpo", "--from-episodes", "first"),
        ):  # fmt: skip
            done = stack.command(*words)
            assert (done.returncode, done.stdout) == (6, ""), (words, done.stdout, done.stderr)
            assert done.stderr.startswith(f"agentrl: {sentence}"), (words, done.stderr)
        after = stack.agentrl("replay", "1").splitlines()
        assert [line for line in after if sentence in line]
        logprobs = [line for line in before.splitlines() if "logprobs: " in line]
        kept = [line.partition(", lowest")[0] if line in logprobs else line for line in before.splitlines()]
        assert [line for line in after if sentence not in line] == kept
        document = json.loads(stack.agentrl("replay", "1", "--json"))
        assert document["tokens_removed_at"] is not None
        assert {step["sampled_ids"] for step in document["steps"]} == {None}
        own = value(stack.database, "SELECT min(id) FROM v_episodes WHERE run = :run", run=fork)
        stack.agentrl("replay", str(own), "--verify", "tokens")
        query = "SELECT mean_reward FROM v_iterations WHERE run = 'first' ORDER BY iteration"
        assert values(stack.database, query) == curve != []
        stack.agentrl("why", "1")
        stack.agentrl("ui", "--export", "first", "--out", str(tmp_path / "run.html"))
        again = stack.agentrl("submit", *asked, "--name", "second", "--wait").strip()
        assert planning.open_iterations(stack.database, 1) == []
        assert again == "second"
