"""Dynamic sampling: an iteration whose groups have no variance is sampled on, up to a limit, and loses nothing on the way."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from agentrl.cli.eval_run import eval_run_of
from agentrl.cli.follow import iteration_line, load_view
from agentrl.cli.run_view import RunView, iteration_seconds
from agentrl.cli.screen import live_lines
from agentrl.workers.requests.fork_request import ForkRequest, prepare_fork
from agentrl.workers.requests.stored_groups import prepare_stored
from agentrl.workers.requests.submit import prepare
from agentrl.workflow.checkpoints.sealed_folder import MODEL
from agentrl.workflow.config import build
from agentrl.workflow.control.scheduler import Dispatch, SendRollouts, SendTrain, plan
from agentrl.workflow.errors import ConfigError, Fenced
from agentrl.workflow.hooks import Hook
from agentrl.workflow.resolve import resolve
from agentrl.workflow.settings import settings
from agentrl.workflow.stats.group_variance import NO_VARIANCE, SURPLUS, choose_groups, groups_to_plan
from agentrl.workflow.store import control_reads, planning, repair, run_names, train_claims, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import iteration_rows, ledger, run_rows
from agentrl.workflow.store.train_claims import IterationWork, MoreGroupsPlanned
from agentrl.workflow.trajectory import Episode, Group, SamplingKey, Task
from tests.faults.test_mending import a_worker, do_jobs, facts, restart
from tests.support.played_runs import (
    EXPIRED,
    LEASE,
    altered,
    claim,
    claim_training,
    fail,
    play,
    ready,
    start,
    submission,
    update_of,
    value,
    values,
)
from tests.support.small_models import tiny_random

FLAT, VARIED = 0.0, 1.0
TASKS = "SELECT task FROM v_groups WHERE run = :run ORDER BY iteration, slot"


def begin(db: Database, *rewards: float, tasks: int = 8, limit: int = 3, **fields: Any) -> int:
    """A run whose first groups earn so; its first iteration."""
    groups = start(db, submission(tasks=tasks, dynamic_sampling=limit, **fields))
    for group, reward in zip(groups, rewards, strict=True):
        play(db, group, reward)
    return int(value(db, "SELECT iteration_id FROM groups WHERE id = :id", id=groups[0]))


def asked(db: Database, iteration: int) -> IterationWork | MoreGroupsPlanned | None:
    """What a train job gets that comes now."""
    work = train_claims.claim_iteration(db, iteration, "trainer:1", LEASE)
    return train_claims.load_work(db, work) if isinstance(work, IterationWork) else work


def sample_on(db: Database, iteration: int, reward: float) -> None:
    """Sends and plays the groups that were planned in addition."""
    groups = planning.start_iteration(db, iteration)
    planning.mark_groups_sent(db, groups)
    for group in groups:
        play(db, group, reward)


def commit(db: Database, work: IterationWork) -> None:
    """The update on what was chosen of the work, as the train job records it."""
    chosen, dropped = choose_groups(work.groups, work.max_groups)
    credit = {episode.id: 0.5 for group in chosen for episode in group.episodes}
    skipped: dict[str, Any] = {} if chosen else {"path": "", "sha256": "", "metrics": (), "skipped": "no group has variance"}
    train_commits.commit_update(db, work, update_of(work, advantages=credit, dropped=dropped, **skipped), 3)


def fates(db: Database) -> dict[str, int]:
    """Of the first iteration's episodes, and that every planned one has one."""
    row, *_ = ledger.explain_fate(db, value(db, "SELECT min(id) FROM episodes"))["iterations"]
    counts = {fate: row[fate] for fate in ledger.FATES if row[fate]}
    assert sum(counts.values()) == row["planned"] == value(db, "SELECT episodes FROM iterations WHERE number = 0")
    return counts


# until enough


def test_dynamic_sampling_adds_groups_until_enough_vary(database: Database) -> None:
    iteration = begin(database, FLAT, VARIED)
    assert asked(database, iteration) == MoreGroupsPlanned(iteration, varied=1, groups=2, more=1)
    sample_on(database, iteration, FLAT)
    assert asked(database, iteration) == MoreGroupsPlanned(iteration, varied=1, groups=3, more=1)
    sample_on(database, iteration, VARIED)
    work = claim_training(database, iteration)
    assert (len(work.groups), work.max_groups) == (4, 2)
    commit(database, work)
    assert fates(database) == {"trained": 4, "no_variance": 4}
    assert values(database, "SELECT slot FROM groups WHERE dropped <> '' ORDER BY slot") == [0, 2]
    row, _ = iteration_rows.list_iterations(database, iteration_rows.IterationFilter("first")).rows
    shown = {name: row[name] for name in ("groups", "more_groups", "dropped_groups", "episodes", "trainable")}
    assert shown == {"groups": 4, "more_groups": 2, "dropped_groups": 2, "episodes": 8, "trainable": 8}
    assert row["mean_reward"] == 0.25, "of all that was sampled"


def test_dynamic_sampling_trains_at_once_with_enough_variance(database: Database) -> None:
    work = ready(database, submission(tasks=8, dynamic_sampling=3))
    commit(database, work)
    assert fates(database) == {"trained": 4}
    assert value(database, "SELECT max(more_groups) FROM iterations") == 0


@pytest.mark.parametrize(("reward", "expected"), [(FLAT, {"no_variance": 8}), (VARIED, {"trained": 4, "no_variance": 4})])
def test_dynamic_sampling_at_limit_trains_with_what_it_has(database: Database, reward: float, expected: dict[str, int]) -> None:
    iteration = begin(database, FLAT, FLAT, limit=2)
    assert asked(database, iteration) == MoreGroupsPlanned(iteration, varied=0, groups=2, more=2)
    sample_on(database, iteration, reward)
    commit(database, claim_training(database, iteration))
    assert fates(database) == expected
    assert value(database, "SELECT skipped <> '' FROM iterations WHERE number = 0") == (reward == FLAT)
    assert value(database, "SELECT max(version) FROM policies") == 1


def test_flat_groups_train_as_usual_without_dynamic_sampling(database: Database) -> None:
    work = claim_training(database, begin(database, FLAT, FLAT, limit=1))
    assert work.max_groups == 0


def test_dynamic_sampling_wants_no_more_than_short_iteration(database: Database) -> None:
    iteration = begin(database, FLAT, tasks=1)
    assert asked(database, iteration) == MoreGroupsPlanned(iteration, varied=0, groups=1, more=1)


# which tasks


def test_dynamic_sampling_repeat_draws_same_new_tasks(database: Database) -> None:
    for name in ("first", "again"):
        iteration = begin(database, FLAT, FLAT, name=name)
        assert asked(database, iteration) is not None
        sample_on(database, iteration, FLAT)
        assert asked(database, iteration) is not None
    first, again = (values(database, TASKS, run=name) for name in ("first", "again"))
    assert first == again
    assert len(set(first)) == 6


def test_dynamic_sampling_redraws_own_tasks_if_no_other_exists(database: Database) -> None:
    iteration = begin(database, FLAT, FLAT, tasks=2)
    assert asked(database, iteration) is not None
    sample_on(database, iteration, VARIED)
    work = claim_training(database, iteration)
    assert sorted(group.task.key for group in work.groups) == ["train/0", "train/0", "train/1", "train/1"]
    episodes = [episode for group in work.groups for episode in group.episodes]
    assert [episode.sample for episode in episodes] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert len({SamplingKey.of(episode, work.seed, work.kind, work.number).bits for episode in episodes}) == 8


# messages, losses, people


def test_dynamic_sampling_groups_are_sent_as_chord_or_one_by_one(database: Database) -> None:
    iteration = begin(database, FLAT, FLAT)
    planning.mark_train_sent(database, iteration)
    assert asked(database, iteration) is not None
    groups = tuple(values(database, "SELECT id FROM groups WHERE status = 'planned' ORDER BY slot"))
    assert plan(control_reads.snapshot(database, LEASE)) == [Dispatch(iteration, groups)], "its sender died"
    planning.mark_train_sent(database, iteration)  # the message that planned them is marked when it is out
    assert plan(control_reads.snapshot(database, LEASE)) == [SendRollouts(groups)]


def test_duplicate_train_message_plans_groups_once(database: Database) -> None:
    iteration = begin(database, FLAT, VARIED)
    together = Barrier(2)

    def come(number: int) -> Any:
        together.wait()
        return train_claims.claim_iteration(database, iteration, f"trainer:{number}", LEASE)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(come, range(2))
    assert {type(first), type(second)} == {MoreGroupsPlanned, type(None)}
    assert asked(database, iteration) is None
    assert value(database, "SELECT count(*) FROM groups") == 3


def test_trainer_is_fenced_once_its_iteration_is_sampled_further(database: Database) -> None:
    for group in start(database, submission(tasks=8, dynamic_sampling=3)):
        play(database, group)
    iteration = planning.open_iterations(database, 1)[0]
    work = claim_training(database, iteration, lease=EXPIRED)
    with altered(database, "episodes", "tainted", "id = 1", True):
        assert asked(database, iteration) == MoreGroupsPlanned(iteration, varied=1, groups=2, more=1)
    with pytest.raises(Fenced):
        commit(database, work)


def test_dynamic_sampling_waits_while_paused(database: Database) -> None:
    iteration = begin(database, FLAT, FLAT)
    planning.stop(database, "first", "paused")
    assert asked(database, iteration) is None
    planning.resume(database, "first")
    assert plan(control_reads.snapshot(database, LEASE)) == [SendTrain(iteration)]
    assert isinstance(asked(database, iteration), MoreGroupsPlanned)
    planning.stop(database, "first", "paused")
    assert plan(control_reads.snapshot(database, LEASE)) == []
    planning.resume(database, "first")
    sample_on(database, iteration, VARIED)
    commit(database, claim_training(database, iteration))
    assert fates(database) == {"trained": 4, "no_variance": 4}


def test_cancelled_dynamic_sampling_has_all_outcomes(database: Database) -> None:
    iteration = begin(database, FLAT, VARIED)
    assert asked(database, iteration) is not None
    planning.stop(database, "first", "cancelled")
    assert fates(database) == {"cancelled": 6}


def test_failed_episodes_pause_run_instead_of_more_sampling(database: Database) -> None:
    for group in start(database, submission(tasks=8, dynamic_sampling=3)):
        work = claim(database, group)
        for position in range(2):
            fail(database, work, position)
    iteration = planning.open_iterations(database, 1)[0]
    assert asked(database, iteration) is None
    assert run_names.find_run(database, "first")["status"] == "paused"
    planning.resume(database, "first")
    commit(database, claim_training(database, iteration))
    assert value(database, "SELECT count(*) FROM groups WHERE iteration_id = :id", id=iteration) == 2


# rollouts that go on during updates


def test_dynamic_sampling_uses_own_policy_before_its_update(database: Database) -> None:
    first = begin(database, VARIED, VARIED, max_staleness=1)
    _, second = planning.open_iterations(database, 1)
    for group in planning.start_iteration(database, second):
        play(database, group, FLAT)
    work = claim_training(database, first)
    assert asked(database, second) == MoreGroupsPlanned(second, varied=0, groups=2, more=2)
    commit(database, work)
    assert asked(database, second) is None
    sampled_with = [claim(database, group).policy.version for group in planning.start_iteration(database, second)]
    assert sampled_with == [0, 0], "not with the one that was published meanwhile"


def test_broken_checkpoint_is_rebuilt_from_its_own_groups(database: Database) -> None:
    iteration = begin(database, FLAT, VARIED, tasks=4)
    assert asked(database, iteration) is not None
    sample_on(database, iteration, VARIED)
    commit(database, claim_training(database, iteration))
    following = repair.mark_broken(database, 1, "out/v1", "it is gone")
    assert following is not None
    rebuild = repair.load_rebuild(database, claim_training(database, following))
    chosen, _ = choose_groups(rebuild.groups, rebuild.max_groups)
    assert {episode.id for group in chosen for episode in group.episodes} == rebuild.advantages.keys()


# real jobs


class Chosen(Hook):
    """Of every second task all episodes earn the same, of the others each one what its number says."""

    def on_rollout_end(self, episode: Episode) -> Mapping[str, float]:
        """0 or 1."""
        return {"chosen": float(int(episode.task.key.rpartition("/")[2]) % 2 * episode.sample % 2)}


def submitted(db: Database, model: Path) -> None:
    """A run of four iterations of two groups, or up to four."""
    config = build(
        {
            "name": "first", "env": "tests.faults.test_mending:bare", "epochs": 1, "output_dir": str(settings().root / "out"),
            "hooks": (f"{__name__}:Chosen",), "dataset.name": "arithmetic", "dataset.max_tasks": 8, "model.path": str(model),
            "model.numerics": "exact", "rollout.tasks_per_iteration": 2, "rollout.dynamic_sampling": 2,
            "rollout.group_size": 4, "rollout.max_new_tokens": 6, "rollout.max_steps": 1,
        }
    )  # fmt: skip
    planning.submit(db, prepare(db, config).submission)


def resumed(db: Database) -> dict[str, Any]:
    """What the run comes to that is taken up by another process."""
    planning.stop(db, "first", "paused")
    restart()
    planning.resume(db, "first")
    do_jobs()
    assert run_rows.describe_run(db, "first")["status"] == "done"
    return facts(db)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("model") / "random", width=16)


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory, migrated_file: Path) -> dict[str, Any]:
    """What the run makes without a fault, and the first of its iterations that was sampled on."""
    with a_worker(tmp_path_factory.mktemp("undisturbed"), migrated_file) as db:
        submitted(db, model)
        do_jobs()
        rows = iteration_rows.list_iterations(db, iteration_rows.IterationFilter("first")).rows
        assert len(rows) == 4
        for row in rows:
            trained = row["groups"] - row["dropped_groups"]
            assert trained == min(2, row["groups"] - row["flat_groups"])
            assert trained == 2 or row["groups"] == 4
        assert {row["trained"] + row["no_variance"] - row["planned"] for row in ledger.explain_fate(db, 1)["iterations"]} == {0}
        return {**facts(db), "sampled_on": min(row["iteration"] for row in rows if row["more_groups"])}


@pytest.fixture
def worker(tmp_path: Path, migrated_file: Path) -> Iterator[Database]:
    with a_worker(tmp_path / "home", migrated_file) as db:
        yield db


@pytest.mark.slow
def test_dynamic_sampling_resumes_after_interruption(worker: Database, model: Path, undisturbed: dict[str, Any]) -> None:
    submitted(worker, model)
    do_jobs(until=lambda: run_rows.why_sampling_on(worker, "first") != "")
    assert resumed(worker).items() <= undisturbed.items()


def test_update_repeat_drops_the_same_groups(worker: Database, model: Path, undisturbed: dict[str, Any]) -> None:
    submitted(worker, model)
    version = undisturbed["sampled_on"]
    do_jobs(until=lambda: value(worker, "SELECT max(version) FROM policies") == version)
    (Path(value(worker, f"SELECT path FROM policies WHERE version = {version}")) / MODEL).unlink()
    assert resumed(worker).items() <= undisturbed.items()
    assert value(worker, "SELECT count(*) FROM events WHERE kind = 'checkpoint_rebuilt'") == 1


# what is refused


def test_dynamic_sampling_refuses_groups_of_one() -> None:
    with pytest.raises(ConfigError, match="needs groups of two or more episodes"):
        build({"rollout.group_size": 1, "rollout.dynamic_sampling": 2})


def test_dynamic_sampling_is_refused_without_rollouts(own_database: Database, home: Path) -> None:
    commit(own_database, claim_training(own_database, begin(own_database, VARIED, VARIED)))
    with pytest.raises(ConfigError, match="an eval run has no updates"):
        prepare(own_database, build({"dataset.name": "arithmetic", "rollout.dynamic_sampling": 2}), "eval")
    with pytest.raises(ConfigError, match=r"rollout\.dynamic_sampling: fixed by"):
        prepare_stored(own_database, *resolve(flags={"source.runs": ["first"], "rollout.dynamic_sampling": 2}))
    stored = prepare_stored(own_database, *resolve(flags={"source.runs": ["first"]}))
    fork = prepare_fork(own_database, ForkRequest(episode=1, step=0, n=1))
    measured, _ = eval_run_of("first@1", "arithmetic", "test", 2, {})
    for config in (stored.config, fork.config, measured):
        assert config.rollout.dynamic_sampling == 1


# what people see


def test_watch_explains_dynamic_sampling(database: Database) -> None:
    iteration = begin(database, FLAT, VARIED)
    assert load_view(database, "first").sampled_on == ""
    assert asked(database, iteration) is not None
    assert "1 of 2 groups has variance; 1 more is sampled" in live_lines(load_view(database, "first"))
    sample_on(database, iteration, VARIED)
    commit(database, claim_training(database, iteration))
    view: RunView = load_view(database, "first")
    assert view.sampled_on == ""
    line = iteration_line(view.iterations[0], 4, iteration_seconds(view.iterations)[0])
    assert "episodes 6/6  groups 2/3" in line


# pure functions


def group(slot: int, *rewards: float | None) -> Group:
    episodes = tuple(Episode(Task("a", (), ""), status="failed" if r is None else "done", reward=r) for r in rewards)
    return Group(Task("a", (), ""), episodes, slot)


def test_training_groups_are_first_ones_with_variance() -> None:
    groups = [group(4, 1, 0), group(0, 0.1, 0.1, 0.1), group(1, 0, 1e-300), group(2, 1, None), group(3, 1, 0)]
    chosen, dropped = choose_groups(groups, 2)
    assert [one.slot for one in chosen] == [1, 3]
    assert dropped == {0: NO_VARIANCE, 2: "1 of 2 episodes can train", 4: SURPLUS}


@pytest.mark.parametrize(
    ("varied", "planned", "limit", "more"), [(12, 16, 3, 4), (16, 16, 3, 0), (0, 16, 1, 0), (10, 46, 3, 2), (15, 48, 3, 0)]
)
def test_groups_to_plan_is_the_shortfall_within_the_limit(varied: int, planned: int, limit: int, more: int) -> None:
    assert groups_to_plan(varied, 16, planned, limit) == more
