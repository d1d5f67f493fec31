"""Runs of the kind serve: episodes are added while they last, end with their process, and are forgotten where asked."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from agentrl.workers.requests.serve_request import serve_config, serve_submission
from agentrl.workflow.config import build
from agentrl.workflow.errors import ConflictError, Fenced, StateError
from agentrl.workflow.store import agent_attempts, control_reads, endpoint_reads, planning, rollout_claims, served_runs, steps
from agentrl.workflow.store.agent_attempts import AgentEnd
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.planning import Submission
from agentrl.workflow.store.reads.provenance import find_origin
from agentrl.workflow.store.rollout_claims import Outcome
from agentrl.workflow.store.served_runs import ServedEpisode, ServedRun
from agentrl.workflow.trajectory import PolicyRef
from tests.support.played_runs import sampled

LEASE = 60.0
CONFIG = build({"model.path": "tiny"})


def asked(database: Database, keep_days: float | None = None, name: str | None = None) -> Submission:
    config = serve_config(CONFIG, name, {})
    return serve_submission(database, config, PolicyRef("tiny", "hash"), "", keep_days)


def served(database: Database, keep_days: float | None = None, lease: float = LEASE) -> ServedRun:
    return served_runs.open_run(database, asked(database, keep_days), "host:1/a", lease)


def opened(database: Database, run: ServedRun, key: str = "0" * 64, client: str = "client") -> ServedEpisode:
    return served_runs.open_episode(database, run, client, key, LEASE)


def ended(database: Database, run: ServedRun, episode: ServedEpisode) -> None:
    """Ends an episode as its process does."""
    work = rollout_claims.claim_group(database, episode.group, run.worker, LEASE)
    assert work is not None
    outcome = Outcome(episode.id, "failed", error_class="AgentError", error="it said nothing", of_agent=True)
    rollout_claims.finish_episodes(database, work.fence, [outcome], work.reward_set, {})


def rows(database: Database, query: str) -> Sequence[Any]:
    with database.read() as tx:
        return [tuple(row) for row in tx.execute(text(query))]


def test_served_client_gets_episode_found_by_key(database: Database) -> None:
    run = served(database)
    first, second = opened(database, run, "a" * 64, "one"), opened(database, run, "b" * 64, "two")
    query = "SELECT e.id, e.sample, t.key FROM episodes e JOIN tasks t ON t.id = e.task_id ORDER BY e.id"
    assert rows(database, query) == [(first.id, 0, "one"), (second.id, 1, "two")]
    place = endpoint_reads.find_places(database, ["b" * 64])["b" * 64]
    assert (place.run, place.episode, place.over) == ("serve-1", second.id, "")
    assert abs(time.time() - run.created) < 60
    assert place.created == run.created


def test_served_episode_clock_is_the_time_of_its_first_claim(database: Database) -> None:
    run = served(database)
    first, second = (opened(database, run, key * 64) for key in "ab")
    before = datetime.now(UTC)
    early = rollout_claims.claim_group(database, first.group, run.worker, -1.0)
    late = rollout_claims.claim_group(database, second.group, run.worker, LEASE)
    again = rollout_claims.claim_group(database, first.group, "host:2/b", LEASE)
    assert early
    assert late
    assert again
    assert before <= early.clock < late.clock
    assert again.clock == early.clock == find_origin(database, first.id).clock


def test_served_sessions_of_one_name_are_samples_of_one_task(database: Database) -> None:
    run = served(database)
    episodes = [opened(database, run, letter * 64) for letter in "ab"]
    assert rows(database, "SELECT count(DISTINCT task_id), count(DISTINCT sample) FROM episodes") == [(1, 2)]
    works = [rollout_claims.claim_group(database, episode.group, run.worker, LEASE) for episode in episodes]
    keys = {work.sampling_key(work.episodes[0]).bits for work in works if work is not None}
    assert len(keys) == 2


def test_served_episode_opened_again_is_the_same(database: Database) -> None:
    run = served(database)
    assert opened(database, run) == opened(database, run)
    assert rows(database, "SELECT count(*) FROM episodes") == [(1,)]


def test_served_run_is_ignored_by_workers(database: Database) -> None:
    opened(database, served(database))
    assert control_reads.snapshot(database, LEASE).runs == ()
    assert control_reads.count_running_runs(database) == 0
    assert not endpoint_reads.some_run_has_agent(database)


def test_served_run_can_be_cancelled_but_not_paused_or_resumed(database: Database) -> None:
    run = served(database)
    episode = opened(database, run)
    with pytest.raises(StateError, match="cannot pause"):
        planning.stop(database, run.name, "paused")
    with pytest.raises(StateError, match="only that process"):
        planning.resume(database, run.name)
    planning.stop(database, run.name, "cancelled")
    assert rows(database, f"SELECT status FROM episodes WHERE id = {episode.id}") == [("cancelled",)]
    with pytest.raises(Fenced):
        opened(database, run, "b" * 64)
    served_runs.close_run(database, run)
    assert rows(database, "SELECT status FROM runs") == [("cancelled",)]


def test_served_run_name_is_unique(database: Database) -> None:
    submission = asked(database, name="mine")
    served_runs.open_run(database, submission, "host:1/a", LEASE)
    with pytest.raises(ConflictError):
        served_runs.open_run(database, asked(database, name="mine"), "host:2/b", LEASE)


def test_served_run_closed_ends_all_its_episodes(database: Database) -> None:
    run = served(database)
    ended(database, run, opened(database, run))
    open_one = opened(database, run, "b" * 64)
    served_runs.close_run(database, run)
    assert rows(database, "SELECT status, reason FROM runs") == [("done", "")]
    assert rows(database, "SELECT status FROM iterations") == [("done",)]
    assert rows(database, "SELECT DISTINCT status FROM groups") == [("done",)]
    assert rows(database, f"SELECT status FROM episodes WHERE id = {open_one.id}") == [("cancelled",)]


def test_served_run_of_lost_process_is_ended_by_next(database: Database) -> None:
    lost, alive = served(database, lease=-1.0), served(database)
    episode = opened(database, lost)
    assert served_runs.find_lost_runs(database, LEASE) == {lost.id}
    assert served_runs.end_lost_runs(database, LEASE, {alive.id}) == []
    assert served_runs.end_lost_runs(database, LEASE) == [lost.name]
    assert served_runs.find_lost_runs(database, LEASE) == set()
    status, error = rows(database, f"SELECT status, error FROM episodes WHERE id = {episode.id}")[0]
    assert (status, error) == ("infra_error", "the process that served it (host:1) is gone")
    assert rows(database, f"SELECT status FROM runs WHERE name = '{alive.name}'") == [("running",)]
    with pytest.raises(Fenced):
        opened(database, lost, "b" * 64)


def test_served_episodes_are_kept_for_keep_days(database: Database) -> None:
    short, long = served(database, keep_days=1), served(database)
    for run, letter in ((short, "a"), (long, "b")):
        ended(database, run, opened(database, run, letter * 64))
    still_open = opened(database, short, "c" * 64)
    assert served_runs.forget_old(database) == 0
    old = datetime.now(UTC) - timedelta(days=2)
    database.write(
        lambda tx: tx.execute(text("UPDATE episodes SET finished_at = :old WHERE finished_at IS NOT NULL"), {"old": old})
    )
    assert served_runs.forget_old(database) == 1
    assert rows(database, "SELECT count(*) FROM agent_attempts") == [(2,)]
    assert {number for (number,) in rows(database, "SELECT id FROM episodes")} >= {still_open.id}
    assert len(rows(database, "SELECT id FROM groups")) == 2


@pytest.mark.parametrize("days", [36_500, 1e6, 1e300])
def test_served_run_keep_days_never_block_the_next(database: Database, days: float) -> None:
    run = served(database, keep_days=days)
    ended(database, run, opened(database, run))
    assert served_runs.forget_old(database) == 0
    assert rows(database, "SELECT count(*) FROM episodes") == [(1,)]


def test_served_episode_with_forks_is_kept(database: Database) -> None:
    run = served(database, keep_days=1)
    first, fork = opened(database, run, "a" * 64), opened(database, run, "b" * 64)
    ended(database, run, first)
    database.write(lambda tx: tx.execute(text(f"UPDATE episodes SET parent_id = {first.id} WHERE id = {fork.id}")))
    served_runs.forget_ended(database, run)
    assert {number for (number,) in rows(database, "SELECT id FROM episodes")} == {first.id, fork.id}


def test_served_run_cancelled_ends_all_rows_and_is_forgotten(database: Database) -> None:
    run = served(database, keep_days=1)
    opened(database, run)
    planning.stop(database, run.name, "cancelled", "by hand")
    assert rows(database, "SELECT status, error, lease_until FROM agent_attempts") == [("lost", "by hand", None)]
    assert rows(database, "SELECT count(*) FROM episodes WHERE finished_at IS NULL") == [(0,)]
    served_runs.forget_ended(database, run)
    assert rows(database, "SELECT count(*) FROM episodes") == [(0,)]


def test_served_episode_draws_differ_from_forgotten_ones(database: Database) -> None:
    run = served(database)
    keys = set()
    for letter in "abc":
        episode = opened(database, run, letter * 64)
        work = rollout_claims.claim_group(database, episode.group, run.worker, LEASE)
        assert work is not None
        keys.add(work.sampling_key(work.episodes[0]).bits)
        ended(database, run, episode)
        served_runs.forget_ended(database, run)
        assert rows(database, "SELECT count(*) FROM episodes") == [(0,)]
    assert len(keys) == 3


def test_served_client_may_give_rewards_at_end(database: Database) -> None:
    run = served(database)
    episode = opened(database, run)
    end = AgentEnd(answer="7", rewards={"liked": 1.0})
    assert agent_attempts.finish_agent(database, episode.agent, run.worker, end)
    assert rows(database, "SELECT status, answer FROM agent_attempts") == [("ended", "7")]


def test_served_run_has_sampling_of_policy_without_its_rewards() -> None:
    values = {"name": "trained", "env": "math", "rollout.temperature": 0.5, "rollout.max_steps": 3, "rewards": {"format": 1.0}}
    made = serve_config(build(values), None, {"top_k": 5})
    assert (made.rollout.temperature, made.rollout.top_k, dict(made.rewards), made.env) == (0.5, 5, {}, None)
    assert made.name is None


def test_served_prompts_are_those_that_begin_a_conversation(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_runs, "PROMPTS_AT_ONCE", 1)
    run = served(database)
    assert list(served_runs.load_prompts(database, run.id)) == []
    for number, client in enumerate(("one", "two")):
        episode = opened(database, run, f"{number}" * 64, client)
        work = rollout_claims.claim_group(database, episode.group, run.worker, LEASE)
        assert work is not None
        for index in (0, 1):
            steps.commit_sampled(database, work.fence, [sampled(work, index=index)])
    prompts = [(episode, step, messages[0].content) for episode, step, messages in served_runs.load_prompts(database, run.id)]
    assert prompts == [(1, 0, "turn 0"), (2, 0, "turn 0")]
