"""The best and the worst reward of an ended group, and whether it is solved, as its row says after every way to end."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from agentrl.workers.requests.serve_request import serve_config, serve_submission
from agentrl.workflow.config import build
from agentrl.workflow.stats.evaluation import is_right
from agentrl.workflow.store import planning, reward_sets, rollout_claims, served_runs, steps, train_claims, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.driver_reader import select_rows
from agentrl.workflow.store.forks import Fork
from agentrl.workflow.store.imported_runs import ImportedEpisode, write_import
from agentrl.workflow.store.planning import Submission
from agentrl.workflow.store.rollout_claims import Outcome
from agentrl.workflow.store.solved_rule import is_solved, load_rule
from agentrl.workflow.trajectory import PolicyRef
from tests.support.played_runs import (
    EXPIRED,
    LEASE,
    claim,
    claim_training,
    fail,
    finish,
    play,
    ready,
    sampled,
    start,
    submission,
    task,
    update_of,
    value,
    values,
)

Verdict = tuple[float | None, float | None, int | None]
SOLVED, UNSOLVED, NONE = (1.0, 0.0, 1), (0.5, 0.0, 0), (None, None, None)


def verdicts(database: Database) -> list[Verdict]:
    """Return best reward, worst reward and `solved` of each group, after they were compared with the group's episodes."""
    with database.read() as tx:
        groups = select_rows(tx, "SELECT id, run_id, mean_reward, best_reward, worst_reward, solved FROM groups ORDER BY id")
        found: list[Verdict] = [(row["best_reward"], row["worst_reward"], row["solved"]) for row in groups]
        assert found == [computed_verdict(tx, row) for row in groups]
        assert [is_solved(tx, row["run_id"], row["id"]) for row in groups] == [row["solved"] == 1 for row in groups]
    return found


def computed_verdict(tx: Any, group: Mapping[str, Any]) -> Verdict:
    query = "SELECT id, reward FROM episodes WHERE group_id = :id AND status = 'done'"
    rewards = {row["id"]: row["reward"] for row in select_rows(tx, query, id=group["id"])}
    if group["mean_reward"] is None:
        return NONE
    rule = load_rule(tx, group["run_id"])
    query = """
        SELECT w.part, sum(w.value) AS value FROM rewards w JOIN reward_sets s ON s.id = w.reward_set_id
        WHERE w.episode_id = :id AND s.name = 'default' GROUP BY w.part"""
    right = []
    for episode, reward in rewards.items():
        parts = {row["part"]: row["value"] for row in select_rows(tx, query, id=episode)}
        verdict = is_right(parts, rule.weights, rule.correct, parts.keys() - rule.own.keys() if rule.gives else ())
        right.append(reward >= 1 if verdict is None else verdict)
    return max(rewards.values()), min(rewards.values()), int(any(right))


RULES: Sequence[tuple[Mapping[str, float], Mapping[str, Any]]] = [
    ({}, {}),
    ({"a": 1.0, "b": 0.5}, {}),
    ({"a": 1.0, "b": 1.0}, {}),
    ({"a": 1.0}, {"right_by": {"weights": {"a": 1.0}, "correct": ["b"], "gives": False}}),
    ({"a": 1.0}, {"right_by": {"weights": {}, "correct": [], "gives": True}}),
    ({"b": 0.5}, {"right_by": {"weights": {"a": 0.5}, "correct": [], "gives": True}}),
]
"""The weights and the manifest of runs."""


def test_ended_groups_are_judged_by_rule_of_their_run(database: Database) -> None:
    random = Random(0)
    for number, (weights, manifest) in enumerate(RULES):
        asked = submission(f"run{number}", tasks=12, tasks_per_iteration=12, kind="eval")
        asked = replace(asked, weights=weights, manifest={**asked.manifest, **manifest})
        for group in start(database, asked):
            work = claim(database, group)
            for position in range(2):
                parts = {name: random.choice((0.0, 0.5, 1.0)) for name in random.sample("abc", random.choice((1, 2, 3)))}
                end = random.choice(("done", "done", "done", "failed"))
                if end == "failed":
                    fail(database, work, position)
                else:
                    finish(database, work, position, random.choice((0.0, 0.5, 1.0)), parts)
    assert {solved for _, _, solved in verdicts(database)} == {None, 0, 1}


def test_group_is_not_judged_before_its_end(database: Database) -> None:
    first, second = start(database, submission())
    work = claim(database, first)
    finish(database, work, 0, 1.0)
    assert verdicts(database) == [NONE, NONE]
    fail(database, work, 1)
    assert verdicts(database) == [(1.0, 1.0, 1), NONE]
    planning.stop(database, "first", "cancelled")
    assert value(database, "SELECT status FROM groups WHERE id = :id", id=second) == "cancelled"
    assert verdicts(database) == [(1.0, 1.0, 1), NONE]


@pytest.mark.parametrize("way", ["failures", "losses"])
def test_group_given_up_is_judged_by_its_done_episodes(database: Database, way: str) -> None:
    groups = start(database, submission())
    for group in groups:
        if group == groups[0]:
            finish(database, claim(database, group, lease=EXPIRED), 0, 0.5)
        if way == "failures":
            rollout_claims.fail_attempt(database, claim(database, group).fence, "OSError", "no disk", 1)
            continue
        while value(database, "SELECT status FROM groups WHERE id = :id", id=group) != "done":
            rollout_claims.claim_group(database, group, f"worker{value(database, 'SELECT max(attempt) FROM groups')}", EXPIRED)
    assert verdicts(database) == [(0.5, 0.5, 0), NONE]


def test_resumed_group_is_judged_at_its_end(database: Database) -> None:
    groups = start(database, submission())
    work = claim(database, groups[0])
    finish(database, work, 0, 0.0)
    planning.stop(database, "first", "paused")
    rollout_claims.hand_back(database, work.fence)
    planning.resume(database, "first")
    again = claim(database, groups[0])
    assert len(again.episodes) == 1
    finish(database, again, 0, 1.0)
    assert verdicts(database) == [SOLVED, NONE]


def test_rescored_run_keeps_verdicts_and_new_run_judges_itself(database: Database) -> None:
    work = ready(database, submission())
    train_commits.commit_update(database, work, update_of(work), 3)
    assert verdicts(database) == [SOLVED, SOLVED]
    first, second = (group.episodes for group in work.groups)
    scored = {episode.id or 0: {"brevity": float(episode in first)} for episode in (*first, *second)}
    reward_sets.add_reward_set(database, 1, "short", "code", {"brevity": 1.0}, scored)
    assert verdicts(database) == [SOLVED, SOLVED]
    groups = values(database, "SELECT group_id FROM episodes GROUP BY group_id ORDER BY min(id)")
    planning.submit(database, replace(submission("again"), groups=groups, reward_set="short"))
    with database.read() as tx:
        rule = load_rule(tx, 2)
        rows = select_rows(tx, f"{rule.judged_groups()} ORDER BY id", run_id=2, **rule.parameters)
    of_first = value(database, "SELECT group_id FROM episodes WHERE id = :id", id=first[0].id)
    assert {row["id"]: row["solved"] for row in rows} == {group: int(group == of_first) for group in groups}


def test_fork_group_is_judged_with_its_parent(database: Database) -> None:
    play(database, start(database, submission())[0], 0.5)
    parent = value(database, "SELECT id FROM episodes WHERE reward = 0.5")
    forked = replace(submission("fork", kind="fork", tasks=1), fork=Fork(parent, 0, with_parent=True))
    (group,) = start(database, forked)
    work = claim(database, group)
    for position in range(2):
        finish(database, work, position, 0.0)
    assert verdicts(database) == [UNSOLVED, NONE, UNSOLVED]


def test_imported_groups_are_judged(database: Database) -> None:
    imported = replace(submission("traces", kind="import", tasks=2), length=1)
    episodes = [
        ImportedEpisode(f"{number}", task(number // 2), (), {"numeric_answer": reward}, reward, "answered")
        for number, reward in enumerate((0.0, 1.0, 0.5, 0.0))
    ]
    write_import(database, imported, episodes)
    assert verdicts(database) == [SOLVED, UNSOLVED]


def test_served_groups_are_judged(database: Database) -> None:
    asked: Submission = serve_submission(
        database, serve_config(build({"model.path": "tiny"}), None, {}), PolicyRef("tiny", "hash"), "", None
    )
    run = served_runs.open_run(database, asked, "host:1/a", LEASE)
    for key, reward in (("a", 1.0), ("b", 0.5), ("c", None)):
        episode = served_runs.open_episode(database, run, key * 64, key * 64, LEASE)
        work = claim(database, episode.group, run.worker)
        if reward is None:
            continue
        steps.commit_sampled(database, work.fence, [sampled(work)])
        outcome = Outcome(episode.id, "done", "answered", reward, {"own": reward}, own_weights={"own": 1.0})
        rollout_claims.finish_episodes(database, work.fence, [outcome], work.reward_set, work.weights)
    served_runs.close_run(database, run)
    assert verdicts(database) == [(1.0, 1.0, 1), (0.5, 0.5, 0), NONE]


def test_groups_added_by_dynamic_sampling_are_judged(database: Database) -> None:
    groups = start(database, submission(dynamic_sampling=2))
    for group in groups:
        play(database, group, 0.0)
    iteration = value(database, "SELECT max(id) FROM iterations")
    train_claims.claim_iteration(database, iteration, "trainer:1", LEASE)
    for group in planning.start_iteration(database, iteration):
        play(database, group, 1.0)
    assert verdicts(database) == [(0.0, 0.0, 0)] * 2 + [SOLVED] * 2
    assert claim_training(database, iteration)
