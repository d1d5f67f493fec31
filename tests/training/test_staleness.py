"""Rollouts that go on during updates: which policy samples what, what waits for which, and what outlives a killed trainer."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from agentrl.cli.eval_run import eval_run_of
from agentrl.cli.run_view import iteration_numbers, iteration_seconds
from agentrl.workers.requests.fork_request import ForkRequest, prepare_fork
from agentrl.workers.requests.stored_groups import prepare_stored
from agentrl.workflow.control.scheduler import Dispatch, SendTrain, plan
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.resolve import resolve
from agentrl.workflow.store import control_reads, planning, repair, retention, rollout_claims, train_claims, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import ledger, run_rows
from agentrl.workflow.store.train_claims import IterationWork
from agentrl.workflow.store.train_commits import PublishedUpdate
from tests.support.played_runs import bad_update, claim, claim_training, play, start, submission, update_of, value, values

LEASE = 60.0
SAMPLED_WITH = """
    SELECT p.version FROM iterations i JOIN policies p ON p.id = i.policy_id JOIN runs r ON r.id = i.run_id
    WHERE r.name = :run ORDER BY i.number"""
BROKEN = "SELECT version FROM policies WHERE broken <> '' ORDER BY version"


def roll_out(db: Database, iteration: int) -> None:
    """All of its groups."""
    groups = planning.start_iteration(db, iteration)
    planning.mark_groups_sent(db, groups)
    for group in groups:
        play(db, group)


def commit(db: Database, work: IterationWork, **fields: Any) -> PublishedUpdate:
    """The work's update, under a checkpoint of its own name."""
    path = f"out/v{work.number + 1}"
    return train_commits.commit_update(db, work, update_of(work, **{"path": path, "sha256": path, **fields}), 3)


def overlapping(db: Database, epochs: int = 4, max_staleness: int = 1) -> list[int]:
    """A run of as many iterations; those that are planned."""
    run = planning.submit(db, submission(epochs=epochs, max_staleness=max_staleness))
    return planning.open_iterations(db, run.id)


def rolled_out_twice(db: Database, epochs: int = 4) -> IterationWork:
    """A run whose first two iterations are rolled out, the first of them claimed."""
    first, second = overlapping(db, epochs)
    roll_out(db, first)
    roll_out(db, second)
    return claim_training(db, first)


# which policy


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 8])
def test_iteration_samples_with_version_that_staleness_sets(sqlite: Database, max_staleness: int) -> None:
    planned = overlapping(sqlite, 5, max_staleness)
    assert len(planned) == min(5, 1 + max_staleness)
    for number in range(5):
        iteration = planning.open_iterations(sqlite, 1)[0]
        roll_out(sqlite, iteration)
        work = claim_training(sqlite, iteration)
        assert (work.number, work.policy.version) == (number, number), "an update starts from the one before it"
        commit(sqlite, work)
    lag = [max(0, number - max_staleness) for number in range(5)]
    assert values(sqlite, SAMPLED_WITH, run="first") == lag
    assert value(sqlite, "SELECT status FROM runs") == "done"
    assert value(sqlite, "SELECT count(*) FROM consumptions") == 5 * 4
    assert value(sqlite, "SELECT max(version) FROM policies") == 5


def test_skipped_update_publishes_version_for_later_iterations(database: Database) -> None:
    work = rolled_out_twice(database)
    published = train_commits.commit_update(database, work, replace(bad_update(), bad=False), 3)
    assert published.next_iteration is not None
    assert values(database, SAMPLED_WITH, run="first") == [0, 0, 1]
    group, *_ = planning.start_iteration(database, published.next_iteration)
    assert claim(database, group).policy.path == work.policy.path


def test_views_show_how_far_trainer_was_ahead(database: Database) -> None:
    work = rolled_out_twice(database, epochs=2)
    metrics = [{"loss": 0.5, "importance_weight": 0.75, "importance_truncated": 0.25, "rows": 4, "tokens": 8}]
    commit(database, work, metrics=metrics)
    staleness = "SELECT DISTINCT staleness FROM {} WHERE iteration = {}"
    for view in ("v_iterations", "v_episodes", "v_steps"):
        assert [values(database, staleness.format(view, number)) for number in (1, 2)] == [[0], [1]]
    for view in ("v_updates", "v_iterations"):
        assert value(database, f"SELECT importance_weight FROM {view} WHERE iteration = 1") == 0.75
        assert value(database, f"SELECT importance_truncated FROM {view} WHERE iteration = 1") == 0.25


@pytest.mark.parametrize("costs", [{"tflops": 1.5}, {"tflops": 40.0, "mfu": 0.25, "peak_memory_bytes": 3.0 * 2**33}])
def test_views_show_cost_of_update(database: Database, costs: dict[str, float]) -> None:
    """What a machine does not know is NULL; other metrics of the update are no cost."""
    commit(database, rolled_out_twice(database, epochs=2), costs={"loss": 0.5, **costs})
    for name in ("tflops", "mfu", "peak_memory_bytes"):
        assert values(database, f"SELECT {name} FROM v_iterations ORDER BY iteration") == [costs.get(name), None]


def test_views_show_no_staleness_without_update(database: Database) -> None:
    for group in start(database, submission(kind="eval")):
        play(database, group)
    for view in ("v_iterations", "v_episodes", "v_steps"):
        assert set(values(database, f"SELECT staleness FROM {view}")) == {None}


# what waits for what


def test_update_starts_once_previous_one_is_committed(database: Database) -> None:
    work = rolled_out_twice(database)
    _, second = planning.open_iterations(database, 1)
    planning.mark_train_sent(database, second)  # by the rollout that ended it; the job was refused
    assert train_claims.claim_iteration(database, second, "trainer:early", LEASE) is None
    assert plan(control_reads.snapshot(database, LEASE)) == []
    published = commit(database, work)
    assert published.trains == second
    third = published.next_iteration
    assert third is not None
    groups = tuple(values(database, "SELECT id FROM groups WHERE iteration_id = :id ORDER BY slot", id=third))
    assert plan(control_reads.snapshot(database, LEASE)) == [SendTrain(second), Dispatch(third, groups)], (
        "both may start at once"
    )
    assert commit(database, work) == published, "the answer was lost, not the commit"
    assert claim_training(database, second).policy.path == "out/v1"


def test_update_commit_starts_no_successor_before_its_rollout(database: Database) -> None:
    first, _ = overlapping(database)
    roll_out(database, first)
    published = commit(database, claim_training(database, first))
    assert published.trains is None
    assert published.next_iteration is not None


def test_paused_overlapping_run_starts_nothing_until_resume(database: Database) -> None:
    work = rolled_out_twice(database)
    planning.stop(database, "first", "paused")
    assert commit(database, work) == PublishedUpdate(1, None, None)
    assert plan(control_reads.snapshot(database, LEASE)) == []
    planning.resume(database, "first")
    second, third = planning.open_iterations(database, 1)
    train, chord = plan(control_reads.snapshot(database, LEASE))
    assert train == SendTrain(second)
    assert isinstance(chord, Dispatch)
    assert chord.iteration == third


def test_cancelled_run_accounts_for_each_planned_iteration(database: Database) -> None:
    commit(database, rolled_out_twice(database))
    planning.stop(database, "first", "cancelled")
    assert planning.open_iterations(database, 1) == []
    fates = ledger.explain_fate(database, 1)["iterations"]
    assert [(row["planned"], row["trained"], row["cancelled"]) for row in fates] == [(4, 4, 0), (4, 0, 4), (4, 0, 4)]


# checkpoints that are needed for longer


def ahead_of_its_rollouts(db: Database) -> int:
    """A run at version 3, of whose fourth iteration nothing is rolled out, with version 2; its first group."""
    overlapping(db, epochs=6)
    for _ in range(3):
        iteration = planning.open_iterations(db, 1)[0]
        roll_out(db, iteration)
        commit(db, claim_training(db, iteration))
    waiting, _ = planning.open_iterations(db, 1)
    return planning.start_iteration(db, waiting)[0]


def test_repair_rebuilds_older_checkpoint_still_read(database: Database) -> None:
    group = ahead_of_its_rollouts(database)
    waiting = planning.open_iterations(database, 1)[0]
    assert repair.mark_broken(database, 1, "out/v1", "nobody reads it any more") == waiting
    assert values(database, BROKEN) == []
    assert repair.mark_broken(database, 1, "out/v2", "it is gone") == waiting
    assert values(database, BROKEN) == [2]
    assert rollout_claims.claim_group(database, group, "host:1/a", LEASE) is None
    assert plan(control_reads.snapshot(database, LEASE)) == [SendTrain(waiting)]
    work = claim_training(database, waiting)
    rebuild = repair.load_rebuild(database, work)
    assert (rebuild.broken.version, rebuild.start.version) == (2, 1)
    assert {episode.id for made_of in rebuild.groups for episode in made_of.episodes} == {5, 6, 7, 8}, "iteration 1's"
    repair.commit_rebuild(database, work, rebuild.broken, "out/again", "again")
    assert claim(database, group).policy.path == "out/again"


def test_broken_mark_lasts_while_checkpoint_is_sampled_with(database: Database) -> None:
    first, second = overlapping(database)
    roll_out(database, first)
    commit(database, claim_training(database, first))
    third = planning.open_iterations(database, 1)[-1]
    roll_out(database, second)
    work = claim_training(database, second)
    repair.mark_broken(database, 1, "out/v1", "found by a rollout of the third")
    commit(database, work)
    assert values(database, BROKEN) == [1]
    again = claim_training(database, third)
    assert again.rebuilds
    repair.commit_rebuild(database, again, repair.load_rebuild(database, again).broken, "out/again", "again")
    roll_out(database, third)
    work = claim_training(database, third)
    repair.mark_broken(database, 1, "out/again", "nobody reads it any more")
    assert values(database, BROKEN) == []
    commit(database, work)


SKIPPED = {"path": "", "sha256": "", "metrics": (), "advantages": {}, "skipped": "no advantage differs from 0"}


def with_the_second_claimed(db: Database) -> IterationWork:
    """A run at version 1, whose second iteration is rolled out and claimed; the third samples with that version, too."""
    work = rolled_out_twice(db)
    commit(db, work)
    return claim_training(db, planning.open_iterations(db, 1)[0])


def test_broken_mark_covers_all_versions_of_checkpoint(database: Database) -> None:
    commit(database, with_the_second_claimed(database), **SKIPPED)
    third, fourth = planning.open_iterations(database, 1)
    roll_out(database, third)
    work = claim_training(database, third)
    repair.mark_broken(database, 1, "out/v1", "found by a rollout of the fourth, which samples with version 2")
    commit(database, work)
    assert values(database, BROKEN) == [1, 2]
    again = claim_training(database, fourth)
    rebuild = repair.load_rebuild(database, again)
    assert (rebuild.broken.version, rebuild.start.path) == (1, "")
    repair.commit_rebuild(database, again, rebuild.broken, "out/again", "again")
    roll_out(database, fourth)
    assert values(database, "SELECT path FROM policies ORDER BY version") == ["", "out/again", "out/again", "out/v3"]


def test_broken_mark_goes_once_checkpoint_is_restored(database: Database) -> None:
    work = with_the_second_claimed(database)
    repair.mark_broken(database, 1, "out/v1", "found by a rollout of the third")
    commit(database, work, **SKIPPED)
    assert values(database, BROKEN) == [1]
    again = claim_training(database, planning.open_iterations(database, 1)[0])
    repair.commit_rebuild(database, again, repair.load_rebuild(database, again).broken, "out/v1", "out/v1")
    assert values(database, BROKEN) == []


def test_optimizer_is_kept_for_each_version_of_lag(database: Database) -> None:
    ahead_of_its_rollouts(database)
    assert train_commits.find_optimizer_to_drop(database, 1, staleness=0) == "out/v1"
    assert train_commits.find_optimizer_to_drop(database, 1, staleness=1) is None
    needs = retention.find_needs(database, 1, {"v1", "v2", "v3"}, None)
    assert needs.resumable == {"v1", "v2", "v3"}


# what people see


def test_iteration_time_that_overlaps_is_counted_once() -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)

    def row(begin: int, end: int) -> dict[str, Any]:
        return {
            "started_at": start + timedelta(seconds=begin),
            "finished_at": start + timedelta(seconds=end),
            "seconds": end - begin,
        }

    assert iteration_seconds([row(0, 10), row(10, 14)]) == [10, 4]
    assert iteration_seconds([row(0, 10), row(2, 14), row(11, 19)]) == [10, 4, 5]
    cancelled = {"started_at": start, "finished_at": None, "seconds": None}
    assert iteration_seconds([cancelled, row(0, 10), cancelled]) == [0, 10, 0]


def test_count_progress_sums_open_iterations(database: Database) -> None:
    first, _ = overlapping(database)
    roll_out(database, first)
    now = run_rows.count_progress(database, "first")
    assert (now["iteration"], now["through"], now["finished"], now["episodes"]) == (1, 2, 4, 8)
    assert iteration_numbers(now) == "iterations 1 to 2"
    assert iteration_numbers({**now, "through": 1}) == "iteration 1"
    planning.stop(database, "first", "cancelled")
    assert run_rows.count_progress(database, "first") == {}


def test_find_similar_iterations_needs_same_model_and_work(database: Database) -> None:
    commit(database, rolled_out_twice(database, epochs=2))
    with database.read() as tx:
        model, stored = tx.execute(text("SELECT base, config FROM runs WHERE name = 'first'")).one()
    config = json.loads(stored) if isinstance(stored, str) else stored
    found = run_rows.find_similar_iterations(database, model, config | {"seed": 9, "iterations": 400})
    assert found is not None
    assert (found[0], len(found[1]), min(found[1]) >= 0) == ("first", 1, True)
    other = config | {"rollout": config["rollout"] | {"group_size": 3}}
    assert run_rows.find_similar_iterations(database, model, other) is None
    assert run_rows.find_similar_iterations(database, "another", config) is None


def test_derived_runs_of_overlapping_run_wait_for_no_update(own_database: Database, home: Path) -> None:
    """Its forks, a run on its stored episodes and its evaluation roll out nothing ahead, and need no correction for it."""
    commit(own_database, rolled_out_twice(own_database, epochs=2))
    with own_database.engine.begin() as tx:
        tx.execute(text("UPDATE runs SET config = json_set(config, '$.algorithm.importance_level', 'sequence')"))
    fork = prepare_fork(own_database, ForkRequest(episode=1, step=0, n=2))
    asked, origins = resolve(flags={"source.runs": ["first"]})
    stored = prepare_stored(own_database, asked, origins)
    measured, _ = eval_run_of("first@1", "arithmetic", "test", 2, {})
    for config in (fork.config, stored.config, measured):
        assert config.rollout.max_staleness == 0
    with pytest.raises(ConfigError, match=r"rollout\.max_staleness: fixed by the stored episodes"):
        prepare_stored(own_database, *resolve(flags={"source.runs": ["first"], "rollout.max_staleness": 1}))
