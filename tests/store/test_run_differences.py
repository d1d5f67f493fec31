"""What is read of whole runs: how two differ, where the seconds went, the largest changes, whether something is wrong."""

import pytest
from sqlalchemy import text

from agentrl.workers.requests.run_verdict import judge_run
from agentrl.workflow.errors import NotFoundError
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.planning import submit
from agentrl.workflow.store.reads.iteration_changes import RewardChange, RewardExtremes, load_reward_extremes
from agentrl.workflow.store.reads.run_differences import EVALUATIONS, load_run_differences
from agentrl.workflow.store.reads.run_seconds import load_run_seconds
from tests.support.played_runs import submission, value
from tests.support.question_store import REASON, add_runs


def test_differences_list_tasks_that_differ_most_first(database: Database) -> None:
    add_runs(database)
    differences = load_run_differences(database, "code", "agents")
    assert {row["key"] for row in differences.config} == {"epochs", "seed"}
    assert differences.shared == 2
    assert [(row["one"], row["other"]) for row in differences.tasks] == [(0.25, 0.5)]
    (task,) = differences.tasks
    query = "SELECT reward FROM episodes WHERE id = :id"
    assert [value(database, query, id=task[f"{side}_episode"]) for side in ("one", "other")] == [0.0, 1.0]
    with pytest.raises(NotFoundError):
        load_run_differences(database, "code", "never")


def test_differences_show_length_seed_and_best_reward(database: Database) -> None:
    add_runs(database)
    numbers = {row["name"]: (row["one"], row["other"]) for row in load_run_differences(database, "code", "agents").numbers}
    assert numbers["seed"] == (0, 7)
    assert numbers["iterations done"] == (4, 1)
    assert numbers["reward of the best iteration"] == (0.3125, 0.375)
    assert numbers["iteration with the best reward"] == (2, 1)
    assert [numbers.get(name) for name in EVALUATIONS] == [(None, None), None, None, None]


def test_seconds_of_run_and_episodes_add_up(database: Database) -> None:
    add_runs(database)
    rows = load_run_seconds(database, "code")
    parts = {(row["of"], row["part"]): row["seconds"] for row in rows}
    assert parts["episodes", "tools"] == pytest.approx(8.0)  # 16 calls of half a second
    for of, query in (
        ("run", "SELECT seconds FROM v_runs WHERE run = 'code'"),
        ("episodes", "SELECT sum(seconds) FROM v_episodes WHERE run = 'code'"),
    ):
        its = [row for row in rows if row["of"] == of]
        assert sum(row["seconds"] for row in its) == pytest.approx(value(database, query), abs=2e-3)
        assert sum(row["share"] for row in its) == pytest.approx(1.0)
    assert {row["of"] for row in load_run_seconds(database, "1", episodes=False)} == {"run"}


def test_seconds_divide_overlaps_and_stops(database: Database) -> None:
    """An iteration samples during the update of the one before, and the run pauses."""
    submit(database, submission(epochs=2, max_staleness=1))
    moments = [f"2026-01-01 00:00:{second:02d}" for second in range(60)]
    with database.engine.begin() as tx:
        tx.execute(text(f"UPDATE runs SET started_at = '{moments[0]}', finished_at = '{moments[50]}'"))
        query = f"""
            INSERT INTO events (run_id, kind, subject, detail, created_at) VALUES
            (1, 'paused', '', '', '{moments[40]}'), (1, 'resumed', '', '', '{moments[45]}')"""
        tx.execute(text(query))
        for number, start, rolled, end, seconds in ((0, 1, 10, 20, 8.0), (1, 10, 15, 48, 2.0)):
            query = f"""
                UPDATE iterations SET started_at = '{moments[start]}', rolled_out_at = '{moments[rolled]}',
                finished_at = '{moments[end]}', update_seconds = {seconds} WHERE number = {number}"""
            tx.execute(text(query))
    parts = {row["part"]: row["seconds"] for row in load_run_seconds(database, "first", episodes=False)}
    expected = {"rollout": 11.0, "rollout and update": 3.0, "update": 7.0, "stopped": 5.0, "unexplained": 24.0}
    assert parts == {part: pytest.approx(seconds) for part, seconds in expected.items()}


def test_reward_extremes_compare_same_tasks(database: Database) -> None:
    add_runs(database)
    extremes = load_reward_extremes(database, "code")
    assert extremes.drop == RewardChange(
        iteration=3, previous=2, now=0.0, before=0.3125, tasks=2, shared=2, again=2, again_now=0.0, again_before=0.3125
    )
    assert extremes.gain is not None
    assert (extremes.gain.previous, extremes.gain.iteration, extremes.gain.again_now) == (3, 4, 0.25)
    assert load_reward_extremes(database, "agents") == RewardExtremes(None, None)


def test_verdict_names_what_is_wrong_or_that_nothing_is(database: Database) -> None:
    add_runs(database)
    code = judge_run(database, "code")
    assert (code.is_healthy, code.sentence) == (False, "code is done. 2 problems:")
    assert [trouble.command for trouble in code.troubles] == 2 * ["agentrl changes code --iteration 3"]
    assert [(row["error_class"], row["errors"]) for row in code.errors] == [("code_error", 4)]
    number = value(database, "SELECT id FROM runs WHERE name = 'code'")
    typed = judge_run(database, str(number))
    assert (typed.run, typed.troubles[0].command) == ("code", f"agentrl changes {number} --iteration 3")
    agents = judge_run(database, "agents")
    assert (agents.is_healthy, agents.troubles) == (True, [])
    assert agents.sentence.startswith("agents is done. Nothing unusual: in its finished iteration,")
    broken = judge_run(database, "broken")
    assert broken.is_healthy is False
    assert broken.sentence == f"broken is paused: {REASON}. 1 problem:"
    assert [(trouble.is_note, trouble.command) for trouble in broken.troubles] == [
        (False, "agentrl episodes broken --status failed"),
        (True, "agentrl resume broken"),
    ]
    assert broken.health is None
