"""An update is committed whole or not at all, by one trainer; it publishes, plans what follows, and may end the run."""

import math
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text, update
from sqlalchemy.exc import IntegrityError

from agentrl.cli.follow import eval_line, iteration_line
from agentrl.workflow.errors import Fenced, ModelError, StateError
from agentrl.workflow.runtime.shown_text import cell
from agentrl.workflow.stats.evaluation import Score, evaluate
from agentrl.workflow.store import control_reads, planning, rollout_claims, run_names, steps, train_claims, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import eval_results, iteration_rows, ledger
from agentrl.workflow.store.rollout_claims import MAX_LOSSES
from agentrl.workflow.tables import schema as tables
from agentrl.workflow.trajectory import Group
from tests.support.played_runs import (
    EXPIRED,
    LEASE,
    bad_update,
    claim,
    claim_training,
    fail,
    finish,
    play,
    ready,
    sampled,
    start,
    status_of_run,
    submission,
    update_of,
    value,
    values,
)


def test_train_claim_needs_terminal_groups_and_is_exclusive(database: Database) -> None:
    first, second = start(database, submission())
    play(database, first)
    iteration = planning.open_iterations(database, 1)[0]
    assert train_claims.claim_iteration(database, iteration, "trainer:1", LEASE) is None
    play(database, second)
    work = claim_training(database, iteration)
    assert [len(group.episodes) for group in work.groups] == [2, 2]
    assert all(len(episode.steps) == 1 for group in work.groups for episode in group.episodes)
    assert train_claims.claim_iteration(database, iteration, "trainer:2", LEASE) is None


def test_train_claim_is_committed_before_its_episodes_are_read(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a second trainer would wait for the row's lock as long as the first one reads."""
    for group in start(database, submission()):
        play(database, group)
    iteration = planning.open_iterations(database, 1)[0]
    read, meanwhile = train_claims.load_groups, []

    def load_groups(*wanted: Any) -> tuple[Group, ...]:
        meanwhile.append(train_claims.claim_iteration(database, iteration, "trainer:other", LEASE))
        return read(*wanted)

    monkeypatch.setattr(train_claims, "load_groups", load_groups)
    work = claim_training(database, iteration)
    assert meanwhile == [None]
    assert [len(group.episodes) for group in work.groups] == [2, 2]


def test_train_claim_by_second_trainer_fences_first(database: Database) -> None:
    work = ready(database, submission())
    train_claims.hand_back_iteration(database, work.id, work.token)
    heir = claim_training(database, work.id)
    with pytest.raises(Fenced):
        train_commits.commit_update(database, work, update_of(work), 3)
    assert not train_claims.extend_lease(database, work.id, work.token, LEASE)
    assert train_claims.extend_lease(database, work.id, heir.token, LEASE)
    assert value(database, "SELECT count(*) FROM policies") == 1
    train_commits.commit_update(database, heir, update_of(heir), 3)
    assert value(database, "SELECT count(*) FROM policies") == 2


def test_train_heartbeat_takes_no_lease_of_finished_iteration(database: Database) -> None:
    work = ready(database, submission())
    train_commits.commit_update(database, work, update_of(work), 3)
    assert not train_claims.extend_lease(database, work.id, work.token, LEASE)
    assert value(database, f"SELECT lease_until FROM iterations WHERE id = {work.id}") is None


def test_update_commit_repeated_is_recognised(database: Database) -> None:
    work = ready(database, submission(epochs=2))
    published = train_commits.commit_update(database, work, update_of(work), 3)
    assert train_commits.commit_update(database, work, update_of(work), 3) == published
    assert value(database, "SELECT count(*) FROM policies") == 2
    assert value(database, "SELECT count(*) FROM iterations") == 2


def test_group_claim_repeated_is_recognised_without_loss(database: Database) -> None:
    group, _ = start(database, submission())
    first, again = (rollout_claims.claim_group(database, group, "host:1/a", LEASE) for _ in range(2))
    assert first is not None
    assert again is not None
    assert rollout_claims.claim_group(database, group, "host:1/b", LEASE) is None
    assert value(database, "SELECT max(losses) FROM groups") == 0
    with pytest.raises(Fenced):
        steps.commit_sampled(database, first.fence, [sampled(first)])


def test_lease_handed_back_is_not_renewed(database: Database) -> None:
    group, _ = start(database, submission())
    fence = claim(database, group).fence
    rollout_claims.hand_back(database, fence)
    assert rollout_claims.extend_leases(database, [fence], LEASE) == set()
    claim(database, group)
    work = ready(database, submission("other"))
    train_claims.hand_back_iteration(database, work.id, work.token)
    assert not train_claims.extend_lease(database, work.id, work.token, LEASE)


def test_resume_revives_run_with_too_many_lost_trainers(database: Database) -> None:
    work = ready(database, submission())
    train_claims.hand_back_iteration(database, work.id, work.token)
    for _ in range(MAX_LOSSES):
        claim_training(database, work.id, lease=EXPIRED)
    assert train_claims.claim_iteration(database, work.id, "trainer:last", LEASE) is None
    assert status_of_run(database) == "failed"
    planning.resume(database, "first")
    heir = claim_training(database, work.id)
    train_commits.commit_update(database, heir, update_of(heir), 3)
    assert status_of_run(database) == "done"


def test_update_that_keeps_failing_fails_run_with_reason(database: Database) -> None:
    work = ready(database, submission())
    train_claims.fail_update(database, work, "RuntimeError: no memory", 2)
    assert status_of_run(database) == "running"
    train_claims.fail_update(database, claim_training(database, work.id), "RuntimeError: no memory", 2)
    assert status_of_run(database) == "failed"
    assert "no memory" in value(database, "SELECT reason FROM runs")


def test_last_update_ends_run_that_was_failed_meanwhile(database: Database) -> None:
    work = ready(database, submission())
    train_commits.fail_run(database, work.run_id, "thought lost")
    train_commits.commit_update(database, work, update_of(work), 3)
    assert status_of_run(database) == "done"


def test_eval_without_finished_episode_has_no_mean(database: Database) -> None:
    run = submission(kind="eval")
    start(database, run)
    for (group,) in [(g,) for g in values(database, "SELECT id FROM groups")]:
        work = claim(database, group)
        rollout_claims.fail_attempt(database, work.fence, "Lost", "", 1)
    (iteration,) = values(database, "SELECT id FROM iterations")
    train_commits.finish_eval(database, claim_training(database, iteration), Score(math.nan, math.nan, math.nan, 0, 4))
    assert values(database, "SELECT mean_reward FROM evals") == [None]
    assert set(values(database, "SELECT error FROM episodes")) == {"Lost"}


def test_update_commit_is_atomic(database: Database) -> None:
    work = ready(database, submission(epochs=2))
    broken = update_of(work, advantages={10**9: 0.5})
    with pytest.raises(IntegrityError):
        train_commits.commit_update(database, work, broken, 3)
    for table, rows in {"updates": 0, "consumptions": 0, "policies": 1, "iterations": 1}.items():
        assert value(database, f"SELECT count(*) FROM {table}") == rows
    assert train_commits.commit_update(database, work, update_of(work), 3).version == 1


def test_episode_left_out_of_update_is_consumed_with_reason(database: Database) -> None:
    work = ready(database, submission())
    credit = {episode.id: 0.5 for group in work.groups for episode in group.episodes if episode.id is not None}
    first, *others = credit
    reason = "1 of 2 episodes: sampler and trainer differ"
    train_commits.commit_update(database, work, update_of(work, advantages=credit | {first: 0.0}, dropped={0: reason}), 3)
    assert value(database, "SELECT count(*) FROM consumptions") == len(credit)
    told = ledger.explain_fate(database, first)
    assert (told["fate"], told["dropped"]) == ("strayed", reason)
    assert {ledger.explain_fate(database, other)["fate"] for other in others} == {"trained"}
    (row,) = told["iterations"]
    assert (row["planned"], row["trained"], row["strayed"]) == (4, 3, 1)


def test_ledger_names_truncated_episodes_only(database: Database) -> None:
    work = ready(database, submission())
    credit = {episode.id: 0.5 for group in work.groups for episode in group.episodes if episode.id is not None}
    first, second, *others = credit
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE episodes SET stop_reason = 'max_tokens' WHERE id = :id"), {"id": first})
    reasons = {0: "1 of 2 episodes: cut off at a limit"}
    update = update_of(work, advantages=credit | {first: 0.0, second: 0.0}, dropped=reasons)
    train_commits.commit_update(database, work, update, 3)
    fates = [ledger.explain_fate(database, episode)["fate"] for episode in (first, second, *others)]
    assert fates == ["truncated", "trained", *["trained"] * len(others)]


def test_ledger_names_group_without_variance_despite_dropped_one(database: Database) -> None:
    flat, varied = start(database, submission())
    play(database, flat, reward=0.0)
    play(database, varied)
    work = claim_training(database, planning.open_iterations(database, 1)[0])
    (_, of_flat), (_, of_varied) = [(group.slot, [e.id for e in group.episodes]) for group in work.groups]
    reason = "2 of 2 episodes: sampler and trainer differ"
    credit = dict.fromkeys((*of_flat, *of_varied), 0.0)
    left_out = update_of(work, advantages=credit, dropped={0: reason, 1: reason}, path="", sha256="", skipped="they differ")
    train_commits.commit_update(database, work, left_out, 3)
    assert {ledger.explain_fate(database, episode)["fate"] for episode in of_flat if episode is not None} == {"no_variance"}
    assert {ledger.explain_fate(database, episode)["fate"] for episode in of_varied if episode is not None} == {"strayed"}


def test_ledger_says_trained_if_critic_had_values(database: Database) -> None:
    """All values are 0 at first, so that equal rewards are advantages of 0; the value loss has learned from them."""
    work = ready(database, submission())
    credit = {episode.id: 0.0 for group in work.groups for episode in group.episodes if episode.id is not None}
    metrics = [{"loss": 0.5, "value_loss": 0.25, "rows": 4, "tokens": 8}]
    train_commits.commit_update(database, work, update_of(work, advantages=credit, metrics=metrics), 3)
    assert {ledger.explain_fate(database, episode)["fate"] for episode in credit} == {"trained"}


def test_explained_variance_is_shown_with_its_iteration(database: Database) -> None:
    work = ready(database, submission())
    step = {"loss": 0.5, "explained_variance": 0.25, "rows": 4, "tokens": 8}
    steps = [{**step, "value_loss": value_loss} for value_loss in (0.5, 0.25)]
    train_commits.commit_update(database, work, update_of(work, metrics=steps), 3)
    (row,) = iteration_rows.list_iterations(database, iteration_rows.IterationFilter("first")).rows
    assert (row["explained_variance"], row["value_loss"]) == (0.25, 0.375)
    assert "  loss 0.5  explained variance 0.25  2.0 s" in iteration_line(row, 1, 2.0)
    assert "explained" not in iteration_line({**row, "explained_variance": None}, 1, 2.0)


def test_update_commit_publishes_policy_and_plans_next_iteration(database: Database) -> None:
    work = ready(database, submission(epochs=2))
    published = train_commits.commit_update(database, work, update_of(work, dropped={1: "one member"}), 3)
    assert published.version == 1
    assert published.next_iteration == planning.open_iterations(database, 1)[0]
    group, *_ = planning.start_iteration(database, published.next_iteration)
    following = claim(database, group)
    assert (following.policy.version, following.policy.path, following.iteration) == (1, "out/v1", 1)
    (row, _) = iteration_rows.list_iterations(database, iteration_rows.IterationFilter("first")).rows
    assert (row["status"], row["mean_reward"], row["loss"], row["dropped_groups"]) == ("done", 0.5, 0.5, 1)
    assert (row["sampled_tokens"], row["trainable"], row["policy_version"]) == (8, 4, 0)
    assert value(database, "SELECT count(*) FROM consumptions") == 4


def test_skipped_update_publishes_alias_of_same_weights(database: Database) -> None:
    work = ready(database, submission(epochs=2))
    train_commits.commit_update(database, work, update_of(work, path="", sha256="", skipped="every group was flat"), 3)
    policy = run_names.find_policy(database, "first", 1)
    assert (policy["kind"], policy["path"]) == ("alias", "")


def test_run_is_done_after_last_iteration(database: Database) -> None:
    work = ready(database, submission())
    assert train_commits.commit_update(database, work, update_of(work), 3).next_iteration is None
    assert status_of_run(database) == "done"
    assert control_reads.count_running_runs(database) == 0
    with pytest.raises(StateError, match="done"):
        planning.resume(database, "first")


def test_bad_updates_in_a_row_fail_run_until_resume(database: Database) -> None:
    iteration = ready(database, submission(epochs=4)).id
    for number in range(2):
        with database.engine.begin() as tx:  # the claim of `ready`, given back
            tx.execute(update(tables.iterations).where(tables.iterations.c.id == iteration).values(lease_until=None))
        work = claim_training(database, iteration)
        published = train_commits.commit_update(database, work, bad_update(), 2)
        assert (published.next_iteration is None) == (number == 1)
        if published.next_iteration is not None:
            iteration = published.next_iteration
            for group in planning.start_iteration(database, iteration):
                play(database, group)
    assert status_of_run(database) == "failed"
    planning.resume(database, "first")
    assert status_of_run(database) == "running"
    assert control_reads.snapshot(database, LEASE).runs[0].iterations[0].number == 2


@pytest.mark.parametrize(
    ("done", "reason"),
    [(1, "only 1 of the 4 episodes can train: 3 failed"), (0, "none of the 4 episodes can train: 4 failed")],
)
def test_run_pauses_with_under_half_trainable_episodes(database: Database, done: int, reason: str) -> None:
    for group in start(database, submission()):
        work = claim(database, group)
        fail(database, work, 0)
        last = finish(database, work, 1) if group == 2 and done else fail(database, work, 1)
    assert last.iteration is not None
    assert train_claims.claim_iteration(database, last.iteration, "trainer:1", LEASE) is None
    assert status_of_run(database) == "paused"
    assert run_names.find_run(database, "first")["reason"] == f"iteration 1: {reason}"
    planning.resume(database, "first")
    claim_training(database, last.iteration)


def test_paused_run_gives_no_work_until_resume(database: Database) -> None:
    group, _ = start(database, submission())
    planning.stop(database, "first", "paused")
    planning.stop(database, "first", "paused")
    assert rollout_claims.claim_group(database, group, "host:1", LEASE) is None
    assert control_reads.snapshot(database, LEASE).runs == ()
    planning.resume(database, "first")
    claim(database, group)


def test_cancelled_run_drops_claims_of_workers(database: Database) -> None:
    group, _ = start(database, submission())
    work = claim(database, group)
    planning.stop(database, "first", "cancelled")
    with pytest.raises(Fenced):
        finish(database, work, 0)
    assert set(values(database, "SELECT status FROM episodes")) == {"cancelled"}
    with pytest.raises(StateError, match="cancelled"):
        planning.resume(database, "first")
    with pytest.raises(StateError, match="cancelled"):
        planning.stop(database, "first", "paused")


def test_eval_run_ends_with_score(database: Database) -> None:
    work = ready(database, submission(kind="eval"))
    train_commits.finish_eval(database, work, Score(0.5, 0.1, 0.9, 4, 0))
    assert eval_results.find_result(database, "first")["mean_reward"] == 0.5
    assert status_of_run(database) == "done"


def test_eval_of_one_task_is_stored_without_bounds(database: Database) -> None:
    work = ready(database, submission(kind="eval"))
    train_commits.finish_eval(database, work, Score(0.5, -math.inf, math.inf, 4, 0))
    row = eval_results.find_result(database, "first")
    assert (row["low"], row["mean_reward"], row["high"]) == (-math.inf, 0.5, math.inf)
    assert "  95% [-inf, inf]  " in eval_line({**row, "policy_version": 0}, None)


@pytest.mark.parametrize(("reward", "by"), [(1.0, "Wilson"), (0.5, "Student")])
def test_eval_stores_kind_of_its_interval(database: Database, reward: float, by: str) -> None:
    for group in start(database, submission(kind="eval")):
        play(database, group, reward)
    work = claim_training(database, 1)
    train_commits.finish_eval(database, work, evaluate(work.groups))
    assert values(database, "SELECT interval_by FROM v_evals") == [by]
    row = eval_results.find_result(database, "first")
    assert f"  95% {by} [{cell(row['low'])}, {cell(row['high'])}]  " in eval_line({**row, "policy_version": 0}, None)


def test_base_hash_is_stored_at_first_loading(database: Database) -> None:
    planning.submit(database, replace(submission(), policy=replace(submission().policy, base_hash="")))
    train_commits.confirm_base(database, 1, "one", {"tokenizer": "t"})
    train_commits.confirm_base(database, 1, "one", {"tokenizer": "t"})
    for base, tokenizer, made_with in (("two", "t", "base one"), ("one", "u", "tokenizer t")):
        with pytest.raises(ModelError, match=f"was submitted with {made_with}"):
            train_commits.confirm_base(database, 1, base, {"tokenizer": tokenizer})
    assert value(database, "SELECT base_hash FROM runs") == "one"
