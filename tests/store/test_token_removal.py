"""The tokens of chosen runs are removed: what stays, what is refused, and a command that is killed, on both databases."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from agentrl.workers.requests import rescoring, stored_groups
from agentrl.workflow.config import SourceConfig
from agentrl.workflow.errors import NotFoundError, StateError
from agentrl.workflow.store import (
    extend_run,
    forks,
    planning,
    served_runs,
    steps,
    token_removal,
    train_commits,
    training_groups,
    vacuum,
)
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.forks import Fork
from agentrl.workflow.store.planning import Submission
from agentrl.workflow.store.reads import episode_rows, ledger, provenance
from agentrl.workflow.store.token_removal import TokenCounts
from agentrl.workflow.tables import schema
from tests.support.played_runs import (
    claim,
    claim_training,
    play,
    sampled,
    start,
    step,
    submission,
    update_of,
    value,
    values,
)

BYTES_OF_GROUP = 4 * (3 + 2 + 2) + 4 * (2 + 2)
"""The bytes of the two steps of a group of `played_runs`: each has 2 sampled ids and 2 logprobs; they share 3 prompt ids."""
REMOVED = r"The tokens of run 'first' were removed on \d{4}-\d\d-\d\d\."


def done_run(db: Database, tasks: int = 2, name: str = "first") -> None:
    """A run of one iteration, which is done: two episodes of one step for each task."""
    for group in start(db, submission(name, tasks=tasks, tasks_per_iteration=tasks)):
        ended = play(db, group)
    assert ended.iteration is not None
    work = claim_training(db, ended.iteration)
    train_commits.commit_update(db, work, update_of(work), 3)
    assert value(db, "SELECT status FROM runs WHERE name = :name", name=name) == "done"


def forked(name: str, parent: int) -> Submission:
    return replace(submission(name, kind="fork"), tasks=(), fork=Fork(parent, 0, with_parent=True))


def play_fork(db: Database, name: str, parent: int) -> list[int]:
    """A fork run of the parent that is done: the ids of its episodes, the parent's stand-in last."""
    (group,) = start(db, forked(name, parent))
    ended = play(db, group)
    assert ended.iteration is not None
    train_commits.finish_fork(db, claim_training(db, ended.iteration))
    of_run = "SELECT e.id FROM episodes e JOIN runs r ON r.id = e.run_id WHERE r.name = :name ORDER BY e.id"
    return values(db, of_run, name=name)


def remove(db: Database, *runs: str) -> list[TokenCounts]:
    counts = token_removal.count_tokens(db, runs)
    for count in counts:
        token_removal.remove_tokens(db, count)
    return counts


def rows_of(db: Database, table: str) -> list[tuple[Any, ...]]:
    with db.read() as tx:
        return [tuple(row) for row in tx.execute(schema.metadata.tables[table].select())]


def test_removal_deletes_only_tokens_of_named_runs(database: Database) -> None:
    done_run(database)
    done_run(database, name="second")
    tables = [table for table in schema.metadata.tables if table not in ("step_tokens", "runs", "events")]
    before = {table: rows_of(database, table) for table in tables}
    (counts,) = remove(database, "first")
    assert (counts.run, counts.episodes, counts.steps, counts.bytes, counts.removed_at) == (
        "first",
        4,
        4,
        2 * BYTES_OF_GROUP,
        None,
    )
    assert {table: rows_of(database, table) for table in tables} == before
    left = "SELECT s.run FROM step_tokens t JOIN steps s ON s.id = t.step_id"
    assert values(database, left) == ["second"] * 4
    assert values(database, "SELECT name FROM runs WHERE tokens_removed_at IS NULL") == ["second"]
    details = values(database, "SELECT detail FROM events WHERE kind = 'tokens_removed'")
    assert details == [f"4 steps of 4 episodes, {2 * BYTES_OF_GROUP} bytes"]


def test_removal_counts_steps_of_earlier_attempts(database: Database) -> None:
    (group,) = start(database, submission(tasks=1, tasks_per_iteration=1))
    work = claim(database, group)
    steps.commit_sampled(database, work.fence, [sampled(work)])
    steps.restart_episode(database, work.fence, 1)
    planning.stop(database, "first", "cancelled")
    (counts,) = remove(database, "first")
    assert (counts.episodes, counts.steps) == (1, 1)
    assert value(database, "SELECT count(*) FROM step_tokens") == 0


def test_removal_again_changes_nothing(database: Database) -> None:
    done_run(database)
    remove(database, "first")
    moment = value(database, "SELECT tokens_removed_at FROM runs")
    (again,) = remove(database, "1", "first")
    assert (again.steps, again.bytes, again.removed_at is None) == (0, 0, False)
    assert value(database, "SELECT tokens_removed_at FROM runs") == moment
    assert value(database, "SELECT count(*) FROM events WHERE kind = 'tokens_removed'") == 1


@pytest.mark.parametrize("status", ["running", "paused", "failed"])
def test_removal_refuses_run_that_has_not_ended(database: Database, status: str) -> None:
    for group in start(database, submission()):
        play(database, group)
    if status != "running":
        planning.stop(database, "first", status)
    with pytest.raises(StateError, match=rf"Run 'first' is {status} and needs its tokens\. .*agentrl cancel first"):
        token_removal.count_tokens(database, ["first"])
    with pytest.raises(StateError, match=f"is {status}"):
        token_removal.mark_removed(database, 1, "")
    assert value(database, "SELECT count(*) FROM step_tokens") == 4
    planning.stop(database, "first", "cancelled")
    remove(database, "first")
    assert value(database, "SELECT count(*) FROM step_tokens") == 0


def test_removal_of_unknown_run_removes_nothing(database: Database) -> None:
    done_run(database)
    with pytest.raises(NotFoundError, match="There is no run 'nobody'"):
        remove(database, "first", "nobody")
    assert value(database, "SELECT count(*) FROM step_tokens") == 4


def test_removal_refuses_run_that_open_runs_use(database: Database) -> None:
    done_run(database)
    (child, _, stand_in) = play_fork(database, "forked", 1)
    (group,) = values(database, "SELECT group_id FROM episodes WHERE id = :id", id=child)
    planning.submit(database, replace(submission("trains"), tasks=(), groups=(group,)))
    planning.submit(database, forked("grandchild", stand_in))
    for name in ("trains", "grandchild"):
        for source in ("first", "forked"):
            with pytest.raises(StateError, match=rf"Run '{name}' is running and needs the tokens of '{source}'\."):
                token_removal.count_tokens(database, [source])
        planning.stop(database, name, "paused")
        with pytest.raises(StateError, match=f"Run '{name}' is paused and needs"):
            token_removal.mark_removed(database, 1, "")
        planning.stop(database, name, "cancelled")
    assert value(database, "SELECT count(*) FROM step_tokens") == 6
    remove(database, "first")
    assert value(database, "SELECT count(*) FROM step_tokens") == 2


def source(**fields: Any) -> SourceConfig:
    return SourceConfig(**{"runs": ["first"], **fields})


NEEDS_TOKENS: dict[str, Callable[[Database], Any]] = {
    "verify": lambda db: provenance.find_origin(db, 1),
    "whatif": lambda db: provenance.load_update_inputs(db, "first", 1),
    "fork": lambda db: forks.load_fork_point(db, 1, 0),
    "submit_fork": lambda db: planning.submit(db, forked("later", 1)),
    "rescore": lambda db: rescoring.rescore(db, "first", ["numeric_answer"], None),
    "stored": lambda db: stored_groups.load_stored_groups(db, source(), 2),
    "submit_stored": lambda db: planning.submit(db, replace(submission("later"), tasks=(), groups=(1, 2))),
    "sft": lambda db: training_groups.load_chosen_episodes(db, [1]),
    "resume": lambda db: planning.resume(db, "first"),
    "extend": lambda db: extend_run.extend(db, "first", "key", iterations=1),
}


@pytest.mark.parametrize("what", NEEDS_TOKENS)
def test_removed_tokens_are_refused_in_one_sentence(database: Database, what: str) -> None:
    done_run(database)
    remove(database, "first")
    with pytest.raises(StateError, match=rf"{REMOVED} Its texts, tool calls and rewards are still stored: agentrl episodes"):
        NEEDS_TOKENS[what](database)
    assert values(database, "SELECT name FROM runs") == ["first"]


def test_half_removed_run_is_refused_too(database: Database) -> None:
    done_run(database)
    token_removal.mark_removed(database, 1, "")
    assert value(database, "SELECT count(*) FROM step_tokens") == 4
    with pytest.raises(StateError, match=REMOVED):
        training_groups.load_chosen_episodes(database, [1])
    assert episode_rows.find_episode(database, 1).episode.steps[0].sampled_ids == (0, 0)


def test_removed_episode_keeps_texts_and_token_counts(database: Database) -> None:
    done_run(database)
    before = episode_rows.find_episode(database, 2)
    why = ledger.explain_fate(database, 2)
    remove(database, "first")
    after = episode_rows.find_episode(database, 2)
    assert after.removed is not None
    assert after.removed.run == "first"
    (old,), (new,) = before.episode.steps, after.episode.steps
    assert new == replace(old, prompt_ids=(0, 0, 0), sampled_ids=(0, 0), behavior_logprobs=(0.0, 0.0))
    assert (after.row, after.steps, after.rewards) == (before.row, before.steps, before.rewards)
    assert ledger.explain_fate(database, 2) == why


def test_fork_of_removed_run_keeps_own_tokens(database: Database) -> None:
    done_run(database)
    child, _, stand_in = play_fork(database, "forked", 1)
    (*_, grandchild) = play_fork(database, "grandchild", stand_in)
    remove(database, "first")
    assert training_groups.load_chosen_episodes(database, [child])[0].steps[0].sampled_ids == step().sampled_ids
    for episode in (stand_in, grandchild):
        with pytest.raises(StateError, match=REMOVED):
            training_groups.load_chosen_episodes(database, [episode])
    record = episode_rows.find_episode(database, stand_in)
    assert record.removed is not None
    assert (record.removed.run, record.episode.steps[0].message.content) == ("first", "42")
    with pytest.raises(StateError, match=REMOVED):
        planning.submit(database, forked("later", stand_in))


def test_served_prompts_do_not_need_tokens(database: Database) -> None:
    done_run(database)
    before = list(served_runs.load_prompts(database, 1))
    remove(database, "first")
    assert list(served_runs.load_prompts(database, 1)) == before != []


def test_removal_lets_others_write_between_batches(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_removal, "STEPS_AT_ONCE", 3)
    done_run(database)
    waiting = start(database, submission("second", tasks=2))
    removed: list[int] = []
    worker = Database(database.url.render_as_string(hide_password=False))

    def remove_and_play(db: Database, run: str, after: int) -> list[int]:
        if steps := remove_some(db, run, after):
            removed.append(len(steps))
            play(worker, waiting.pop())
        return steps

    remove_some = token_removal.remove_some
    monkeypatch.setattr(token_removal, "remove_some", remove_and_play)
    (counts,) = token_removal.count_tokens(database, ["first"])
    token_removal.remove_tokens(database, counts)
    worker.close()
    assert removed == [3, 1]
    assert values(database, "SELECT s.run FROM step_tokens t JOIN steps s ON s.id = t.step_id") == ["second"] * 4


def test_removal_and_submission_at_once_exclude_each_other(database: Database) -> None:
    done_run(database)
    other = Database(database.url.render_as_string(hide_password=False))
    errors: list[str] = []

    def mark() -> None:
        try:
            token_removal.mark_removed(other, 1, "")
        except StateError as error:
            errors.append(error.message)

    thread = threading.Thread(target=mark)
    with database.engine.begin() as tx:
        planning.insert_submission(tx, forked("forked", 1))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive(), "it waits for the submission"
    thread.join(30)
    other.close()
    assert errors == ["Run 'forked' is running and needs the tokens of 'first'."]


@pytest.mark.parametrize(
    ("point", "left"), [("mark_removed.after", 204), ("remove_some.before", 204), ("remove_some.after", 4)]
)
@pytest.mark.slow
def test_removal_killed_anywhere_is_completed_by_next(
    database: Database, home: Path, tmp_path: Path, point: str, left: int
) -> None:
    done_run(database, tasks=102)
    (tmp_path / "hits").mkdir()
    asked = {
        "AGENTRL_DATABASE_URL": database.url.render_as_string(hide_password=False),
        "AGENTRL_FAULT_DIR": str(tmp_path / "hits"),
        "AGENTRL_FAULT": f"{point}:1:kill",
    }
    command = [sys.executable, "-m", "agentrl.cli", "gc", "--tokens", "first", "--yes", "--json"]
    assert subprocess.run(command, env=os.environ | asked, check=False).returncode == -signal.SIGKILL
    assert value(database, "SELECT count(*) FROM step_tokens") == left
    with pytest.raises(StateError, match=REMOVED):
        training_groups.load_chosen_episodes(database, [204])
    done = subprocess.run(command, env=os.environ | asked, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["runs"] == {"first": {"episodes": left, "steps": left, "bytes": left // 2 * BYTES_OF_GROUP}}
    assert value(database, "SELECT count(*) FROM step_tokens") == 0
    assert value(database, "SELECT count(*) FROM steps") == 204


def test_vacuum_after_removal_shrinks_sqlite_file(sqlite: Database) -> None:
    done_run(sqlite)
    with sqlite.engine.begin() as tx:
        tx.execute(text("UPDATE step_tokens SET prompt_ids = zeroblob(1000000)"))
    remove(sqlite, "first")
    done = vacuum.vacuum(sqlite)
    assert done.after < done.before - 3_500_000
