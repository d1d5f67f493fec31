"""Runs are written once, claimed by one worker at a time, ended for good, on both databases; who comes late is fenced out."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.exc import IntegrityError

from agentrl.workers.requests.submit import submission_of
from agentrl.workflow.config import build
from agentrl.workflow.errors import ConfigError, ConflictError, Fenced, NotFoundError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.rewards import MAX_REWARD
from agentrl.workflow.store import (
    blocked_runs,
    control_reads,
    leases,
    planning,
    rollout_claims,
    run_names,
    steps,
    train_commits,
)
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.iterations import task_order
from agentrl.workflow.store.planning import SubmittedRun
from agentrl.workflow.store.reads import episode_rows, event_rows, run_rows
from agentrl.workflow.store.reads.episode_rows import EpisodeFilter
from agentrl.workflow.store.reads.paging import Paging
from agentrl.workflow.store.reads.provenance import find_origin
from agentrl.workflow.store.rollout_claims import MAX_LOSSES, Fence
from agentrl.workflow.tables import schema as tables
from agentrl.workflow.tables.views import VIEWS
from agentrl.workflow.trajectory import TERMINAL, PolicyRef
from tests.support.played_runs import (
    EXPIRED,
    LEASE,
    CompletedWork,
    claim,
    claim_training,
    fail,
    finish,
    play,
    ready,
    sampled,
    start,
    step,
    submission,
    update_of,
    value,
    values,
)

# submitting


def test_submit_writes_run_and_first_iteration(database: Database) -> None:
    made = planning.submit(database, submission(tasks=5, epochs=2))
    assert made == SubmittedRun(1, "first", True, 6)
    assert values(database, "SELECT count(*) FROM iterations") == [1]
    assert values(database, "SELECT status FROM episodes") == ["planned"] * 4
    assert run_names.find_policy(database, "first", None)["version"] == 0


def test_submit_again_finds_run_and_other_config_conflicts(database: Database) -> None:
    made = planning.submit(database, submission())
    assert planning.submit(database, submission()) == replace(made, created=False)
    with pytest.raises(ConflictError, match="'first'"):
        planning.submit(database, submission(seed=1))
    assert value(database, "SELECT count(*) FROM runs") == 1


def test_submit_matches_older_run_by_default_of_new_option(database: Database) -> None:
    made = planning.submit(database, submission())
    older = {**submission().config, "rollout": {"group_size": 2, "tasks_per_iteration": 2}}
    assert len(older["rollout"]) < len(submission().config["rollout"])
    with database.engine.begin() as tx:
        tx.execute(update(tables.runs).values(config=older))
    assert planning.submit(database, submission()) == replace(made, created=False)
    with pytest.raises(ConflictError, match="another config"):
        planning.submit(database, submission(dynamic_sampling=2))
    with database.engine.begin() as tx:
        tx.execute(update(tables.runs).values(config=older | {"gone": 1}))
    with pytest.raises(ConflictError, match="another config"):
        planning.submit(database, submission())


def test_submit_refuses_name_of_digits() -> None:
    asked = Experiment(build({"name": "2"}), {})
    with pytest.raises(ConfigError, match="--name 2 looks like a run number"):
        submission_of(None, asked, "train", PolicyRef("tiny", "hash"), "arithmetic-tiny", manifest={}, tasks=(), code_hash="")


def test_submit_of_one_name_by_twenty_threads_makes_one_run(database: Database) -> None:
    with ThreadPoolExecutor(20) as pool:
        made = list(pool.map(lambda _: planning.submit(database, submission()), range(20)))
    assert sum(one.created for one in made) == 1
    assert {one.id for one in made} == {made[0].id}
    assert value(database, "SELECT count(*) FROM episodes") == 4


def test_submit_without_name_takes_next_free_one_and_folder(database: Database) -> None:
    planning.submit(database, submission("first-1"))
    unnamed = replace(submission("first-1"), stem="first", root="/runs")
    assert planning.submit(database, unnamed).name == "first-2"
    rows = "SELECT name || ' ' || output_dir FROM runs ORDER BY id"
    assert values(database, rows) == ["first-1 out", "first-2 /runs/first-2"]
    assert run_names.find_run(database, "first-2")["config"] == {**unnamed.config, "name": "first-2"}
    chosen = replace(submission("first-1"), stem="first")
    assert planning.submit(database, chosen).name == "first-3"
    assert values(database, rows)[2] == "first-3 out"


def test_submit_without_name_in_threads_makes_as_many_runs(database: Database) -> None:
    with ThreadPoolExecutor(20) as pool:
        made = list(pool.map(lambda _: planning.submit(database, replace(submission("a-1"), stem="a")), range(20)))
    assert {one.name for one in made} == {f"a-{number}" for number in range(1, 21)}
    assert all(one.created for one in made)


def test_submit_repeated_after_lost_commit_finds_its_run(database: Database) -> None:
    planning.submit(database, submission("first-1"))
    unnamed = replace(submission("first-1"), stem="first")
    assert planning.submit(database, unnamed) == planning.submit(database, unnamed)
    assert values(database, "SELECT name FROM runs ORDER BY id") == ["first-1", "first-2"]


def test_tasks_of_two_runs_share_rows(database: Database) -> None:
    planning.submit(database, submission())
    planning.submit(database, submission("second"))
    assert value(database, "SELECT count(*) FROM tasks") == 2
    assert planning.find_free_name(database, "first") == "first-1"


def test_epoch_holds_each_task_once_in_own_order() -> None:
    keys = [f"train/{number}" for number in range(50)]
    orders = [task_order(seed, epoch, keys) for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] == orders[1]
    assert orders[0] != orders[2] != orders[3] != orders[0]


def test_iterations_take_tasks_in_epoch_order(database: Database) -> None:
    wanted = submission(tasks=3)
    work = ready(database, wanted)
    train_commits.commit_update(database, work, update_of(work), 3)
    seen = values(database, "SELECT task FROM v_groups ORDER BY iteration, slot")
    assert seen == [f"train/{index}" for index in task_order(0, 0, ["train/0", "train/1", "train/2"])]


def test_run_by_iterations_may_end_within_epoch(database: Database) -> None:
    wanted = replace(submission(tasks=5), epochs=None, length=4)  # two tasks each: an epoch has three
    assert planning.submit(database, wanted) == SubmittedRun(1, "first", True, 4)
    assert values(database, "SELECT epochs || ' ' || iterations FROM v_runs") == ["2 4"]
    assert wanted.episodes == (5 + 2) * 2
    for number in range(4):
        if number:
            for group in planning.start_iteration(database, number + 1):
                play(database, group)
        work = claim_training(database, number + 1) if number else ready(database, wanted)
        train_commits.commit_update(database, work, update_of(work), 3)
    assert values(database, "SELECT epoch FROM v_iterations ORDER BY iteration") == [1, 1, 1, 2]
    seen = values(database, "SELECT task FROM v_groups ORDER BY iteration, slot")
    orders = [task_order(0, epoch, [f"train/{number}" for number in range(5)]) for epoch in range(2)]
    assert seen == [f"train/{index}" for index in (*orders[0], *orders[1][:2])]
    assert run_names.find_run(database, "first")["status"] == "done"


def test_unknown_run_is_not_found(database: Database) -> None:
    start(database, submission())
    with pytest.raises(NotFoundError, match="'nobody'") as unlike:
        run_names.find_run(database, "nobody")
    assert "mean" not in unlike.value.hint
    with pytest.raises(NotFoundError, match="no run 'frist'") as close:
        run_names.find_run(database, "frist")
    assert "Did you mean 'first'?" in close.value.hint
    with pytest.raises(NotFoundError):
        run_names.find_run(database, "a" * 1_000_000)


# claims


def test_group_claim_is_exclusive(database: Database) -> None:
    group, _ = start(database, submission())
    work = claim(database, group, "host:1")
    assert [episode.sample for episode in work.episodes] == [0, 1]
    assert rollout_claims.claim_group(database, group, "host:2", LEASE) is None


def test_group_claim_by_threads_succeeds_once(database: Database) -> None:
    group, _ = start(database, submission())
    with ThreadPoolExecutor(10) as pool:
        works = list(pool.map(lambda n: rollout_claims.claim_group(database, group, f"host:{n}", LEASE), range(10)))
    assert sum(work is not None for work in works) == 1


def test_group_claim_after_lease_fences_previous_worker(database: Database) -> None:
    group, _ = start(database, submission())
    zombie = claim(database, group, lease=EXPIRED)
    heir = claim(database, group, "host:2")
    assert heir.fence == Fence(group, zombie.fence.attempt + 1)
    writes: list[Callable[[], object]] = [
        lambda: steps.commit_sampled(database, zombie.fence, [sampled(zombie)]),
        lambda: steps.commit_observed(database, zombie.fence, [(zombie.episodes[0].id or 0, step())]),
        lambda: steps.restart_episode(database, zombie.fence, zombie.episodes[0].id or 0),
        lambda: finish(database, zombie, 0),
    ]
    for write in writes:
        with pytest.raises(Fenced):
            write()
    assert rollout_claims.extend_leases(database, [zombie.fence, heir.fence], LEASE) == {group}
    assert not rollout_claims.fail_attempt(database, zombie.fence, "X", "x", 1)
    assert value(database, "SELECT count(*) FROM steps") == 0


def test_heartbeat_keeps_group_lease(database: Database) -> None:
    group, _ = start(database, submission())
    work = claim(database, group, lease=EXPIRED)
    assert rollout_claims.extend_leases(database, [work.fence], LEASE) == {group}
    assert rollout_claims.claim_group(database, group, "host:2", LEASE) is None


@pytest.mark.parametrize("marks", [False, True])
def test_heartbeats_and_send_marks_hold_no_lock_while_they_wait(postgres: Database, marks: bool) -> None:
    """One group's long commit must not hold up the commits of other groups."""
    groups = start(postgres, submission(tasks=4, tasks_per_iteration=4))
    fences = [claim(postgres, group).fence for group in groups]
    lock = select(tables.groups.c.id).with_for_update(key_share=True)
    with ThreadPoolExecutor(1) as pool:
        with postgres.engine.begin() as tx:
            tx.execute(lock.where(tables.groups.c.id == groups[-1]))
            if marks:
                writing = pool.submit(planning.mark_groups_sent, postgres, groups)
            else:
                writing = pool.submit(rollout_claims.extend_leases, postgres, fences, LEASE)
            while not marks and not value(postgres, "SELECT count(*) FROM pg_locks WHERE NOT granted"):
                assert not writing.done()
            if marks:
                writing.result(30)  # the worker that has the lock is claiming the group, so the mark is not needed
            free = lock.with_for_update(nowait=True, key_share=True).where(tables.groups.c.id != groups[-1])
            with postgres.engine.begin() as other:
                assert len(other.execute(free).all()) == 3
        held = writing.result()
    assert held == (None if marks else set(groups))
    assert values(postgres, "SELECT sends FROM groups ORDER BY id") == [1 + marks] * 3 + [1]


def test_mark_of_train_job_waits_for_claim(postgres: Database) -> None:
    """A trainer may claim an iteration before its sender has marked it; without a mark, no view would show the update."""
    start(postgres, submission())
    with ThreadPoolExecutor(1) as pool:
        with postgres.engine.begin() as claiming:
            claiming.execute(select(tables.iterations.c.id).where(tables.iterations.c.id == 1).with_for_update())
            marking = pool.submit(planning.mark_train_sent, postgres, 1)
            while not value(postgres, "SELECT count(*) FROM pg_locks WHERE NOT granted"):
                assert not marking.done()
        marking.result(30)
    assert value(postgres, "SELECT train_sends FROM iterations WHERE id = 1") == 1


def test_group_lost_with_five_workers_is_poison(database: Database) -> None:
    group, _ = start(database, submission())
    for _ in range(MAX_LOSSES):
        claim(database, group, lease=EXPIRED)
    assert rollout_claims.claim_group(database, group, "host:9", LEASE) is None
    assert values(database, "SELECT status FROM episodes WHERE group_id = :g", g=group) == ["infra_error"] * 2
    assert value(database, "SELECT status FROM groups WHERE id = :g", g=group) == "done"


def test_group_claim_handed_back_is_free_without_loss(database: Database) -> None:
    group, _ = start(database, submission())
    for _ in range(MAX_LOSSES + 1):
        rollout_claims.hand_back(database, claim(database, group).fence)
    assert value(database, "SELECT losses FROM groups WHERE id = :g", g=group) == 0
    claim(database, group)


def test_group_ends_after_max_attempts_failed_by_system(database: Database) -> None:
    group, _ = start(database, submission())
    assert not rollout_claims.fail_attempt(database, claim(database, group).fence, "InfraError", "down", 2)
    assert rollout_claims.fail_attempt(database, claim(database, group).fence, "InfraError", "down", 2)
    assert values(database, "SELECT error FROM episodes WHERE group_id = :g", g=group) == ["down"] * 2
    assert values(database, "SELECT losses FROM groups WHERE id = :g", g=group) == [0]


# ends


def test_finish_closes_group_and_iteration_with_last_member(database: Database) -> None:
    first, second = start(database, submission())
    work = claim(database, first)
    assert finish(database, work, 0, 1.0, {"numeric_answer": 1.0, "format": 0.0}) == CompletedWork(False, None)
    assert finish(database, work, 1, 0.0) == CompletedWork(True, None)
    assert rollout_claims.are_all_closed(database, [first])
    assert rollout_claims.find_ready_iteration(database, first) is None
    ended = play(database, second)
    assert ended.group
    assert ended.iteration == rollout_claims.find_ready_iteration(database, second)
    with database.read() as tx:
        row = tx.execute(select(tables.groups).where(tables.groups.c.id == first)).one()
    assert (row.mean_reward, row.std_reward) == (0.5, pytest.approx(0.5**0.5))
    assert values(database, "SELECT weight FROM v_rewards WHERE part = 'format'") == [0.5]


def test_finish_accepts_largest_rewards(database: Database) -> None:
    group, _ = start(database, submission())
    work = claim(database, group)
    finish(database, work, 0, MAX_REWARD)
    assert finish(database, work, 1, -MAX_REWARD) == CompletedWork(True, None)
    assert values(database, "SELECT std_reward FROM groups WHERE id = :g", g=group) == [pytest.approx(2**0.5 * MAX_REWARD)]


def test_finish_at_once_reports_ready_iteration(database: Database) -> None:
    groups = start(database, submission(tasks=6, tasks_per_iteration=6))
    with ThreadPoolExecutor(6) as pool:
        ended = list(pool.map(lambda group: play(database, group), groups))
    # Several groups may report it, and one of them sends.
    (ready_iteration,) = {end.iteration for end in ended if end.iteration is not None}
    with ThreadPoolExecutor(6) as pool:
        sends = list(pool.map(lambda _: planning.mark_first_train_sent(database, ready_iteration), groups))
    assert sorted(sends) == [False] * 5 + [True]
    assert values(database, "SELECT train_sends FROM iterations WHERE number = 0") == [1]


def test_train_job_is_not_marked_while_a_group_is_open(database: Database) -> None:
    first, second = start(database, submission())
    (iteration,) = planning.open_iterations(database, 1)[:1]
    play(database, first)
    assert not planning.mark_first_train_sent(database, iteration)
    play(database, second)
    assert planning.mark_first_train_sent(database, iteration)
    planning.forget_train_sent(database, iteration)
    assert planning.mark_first_train_sent(database, iteration)


def test_episode_finishes_once(database: Database) -> None:
    group, _ = start(database, submission())
    work = claim(database, group)
    finish(database, work, 0, 1.0)
    finish(database, work, 0, 0.0)
    fail(database, work, 0)
    assert values(database, "SELECT reward FROM episodes WHERE id = :e", e=work.episodes[0].id) == [1.0]
    assert value(database, "SELECT count(*) FROM rewards") == 1


@pytest.mark.parametrize("row", ["episodes", "groups", "iterations", "runs"])
def test_terminal_row_cannot_change_even_by_hand(database: Database, row: str) -> None:
    work = ready(database, submission())
    train_commits.commit_update(database, work, update_of(work), 3)
    table = tables.metadata.tables[row]
    assert value(database, f"SELECT count(*) FROM {row} WHERE status = 'done'") > 0
    for status in ("running", "cancelled"):
        with pytest.raises(IntegrityError, match="keeps its status"), database.engine.begin() as tx:
            tx.execute(update(table).values(status=status))
    with database.engine.begin() as tx:
        tx.execute(update(table).values(status="done"))


@pytest.mark.parametrize("status", sorted(TERMINAL - {"cancelled"}))
def test_status_requires_its_fields(database: Database, status: str) -> None:
    start(database, submission())
    with pytest.raises(IntegrityError), database.engine.begin() as tx:
        tx.execute(update(tables.episodes).values(status=status))


# looking


RESOURCES = ("v_resources", "v_episode_resources")
EMPTY = (
    "v_tool_calls",
    "v_tool_sessions",
    "v_agent_attempts",
    "v_annotations",
    "v_evals",
    "v_critic_calls",
    "v_machine",
    *RESOURCES,
)


def test_views_are_readable_with_plain_values(database: Database) -> None:
    work = ready(database, submission(epochs=2))
    train_commits.commit_update(database, work, update_of(work), 3)
    for view in VIEWS:
        with database.read() as tx:
            rows = tx.execute(text(f"SELECT * FROM {view}")).mappings().all()
        assert rows or view in EMPTY, view
        assert not [item for row in rows for item in row.values() if isinstance(item, Decimal | bytes | memoryview)], view
    assert not [item for item in run_rows.count_progress(database, "first").values() if isinstance(item, Decimal)]


def test_lists_for_people_filter_and_page(database: Database) -> None:
    work = ready(database, submission())
    assert [row["run"] for row in run_rows.list_runs(database).rows] == ["first"]
    assert run_rows.describe_run(database, "1")["status"] == "running"
    filters = EpisodeFilter("first", status="done", min_reward=1.0, iteration=1)
    assert [row["reward"] for row in episode_rows.list_episodes(database, filters).rows] == [1.0, 1.0]
    assert len(episode_rows.list_episodes(database, EpisodeFilter("first"), Paging(3, offset=2)).rows) == 2
    train_commits.commit_update(database, work, update_of(work), 3)
    assert [row["kind"] for row in event_rows.list_events(database, event_rows.EventFilter("first")).rows] == [
        "submitted",
        "done",
    ]
    with pytest.raises(NotFoundError, match="no episode 999"):
        episode_rows.find_episode(database, 999)


def test_snapshot_shows_who_holds_what(database: Database) -> None:
    first, second = start(database, submission())
    claim(database, first)
    rollout_claims.hand_back(database, claim(database, second).fence)
    (run,) = control_reads.snapshot(database, LEASE).runs
    one, two = run.iterations[0].groups
    assert (one.claim.held, one.claim.sends) == (True, 1)
    assert not two.claim.held
    assert two.claim.expired_ago is not None


def test_service_lease_is_exclusive_until_it_expires(database: Database) -> None:
    assert leases.take_service_lease(database, "control", "host:1", LEASE)
    assert not leases.take_service_lease(database, "control", "host:2", LEASE)
    assert leases.take_service_lease(database, "control", "host:1", EXPIRED)
    assert leases.take_service_lease(database, "control", "host:2", LEASE)


def test_waiting_run_is_one_event_for_many_jobs(database: Database) -> None:
    start(database, submission())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: blocked_runs.wait_for(database, 1, "the server is away"), range(8)))
    assert blocked_runs.find_wait_reason(database, 1) == "the server is away"
    for what in ("it is not ready", "the server is away", "it is not ready"):
        blocked_runs.wait_for(database, 1, what)
    blocked_runs.wait_no_more(database, 1)
    blocked_runs.wait_no_more(database, 1)
    assert blocked_runs.find_wait_reason(database, 1) == ""
    blocked_runs.wait_for(database, 1, "the server is away")
    kinds = [event["kind"] for event in event_rows.list_events(database, event_rows.EventFilter("first")).rows]
    assert kinds == ["submitted", "waiting", "waiting", "going_on", "waiting"]


def test_run_clock_is_the_time_of_its_submission(database: Database) -> None:
    groups = start(database, submission())
    first, second = (claim(database, group) for group in groups)
    with database.read() as tx:
        created = tx.execute(select(tables.runs.c.created_at)).scalar_one()
    assert first.clock == second.clock == created
    assert find_origin(database, first.episodes[0].id).clock == created
