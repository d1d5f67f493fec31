"""What the page is told of an iteration that changed, of a run that stopped, and of evaluations made by hand."""

from contextlib import closing
from dataclasses import asdict

import pytest
from sqlalchemy import insert, text

from agentrl.workers.page.demo import open_demo
from agentrl.workers.requests.run_verdict import judge_run
from agentrl.workflow.analysis.run_health import (
    GroupCounts,
    IterationRecord,
    Trouble,
    describe_groups,
    describe_health,
    describe_reward_change,
    find_failures,
    find_iteration_troubles,
    join_troubles,
    list_checked,
    list_health_facts,
    list_update_troubles,
)
from agentrl.workflow.runtime.shown_text import plain
from agentrl.workflow.stats.group_variance import NO_GROUP_VARIES
from agentrl.workflow.store import train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import open_database
from agentrl.workflow.tables import schema
from tests.page.test_task_routes import played
from tests.support.page_answers import PageOver
from tests.support.played_runs import bad_update, ready, submission, values
from tests.support.question_store import ERROR, REASON, WHY_FAILED, add_runs

HEALTHY = {
    "clip_fraction": 0.01, "ratio": 1.0, "sampler_difference_mean": 1e-4, "importance_outside": 0.0,
    "effective_sample_size": 0.99, "grad_norm": 0.7,
}  # fmt: skip
ITERATION = {
    "iteration": 2, "status": "done", "skipped": "", "tool_calls": 0, "tool_errors": 0, "episodes": 4, "trainable": 4,
    "staleness": 0,
}  # fmt: skip
GRPO = "grpo"


def test_changes_route_explains_drop(sqlite: Database) -> None:
    add_runs(sqlite)
    page = PageOver(sqlite)
    (run,) = values(sqlite, "SELECT id FROM runs WHERE name = 'code'")
    changes = page.read(f"/api/runs/{run}/iterations/3/changes")
    numbers = {row["name"]: (row["before"], row["now"]) for row in changes["numbers"]}
    assert numbers["reward"] == (0.3125, 0.0)
    assert numbers["failed calls"] == (0.0, 1.0)
    assert changes["parts"] == [{"part": "numeric_answer", "now": 0.0, "before": 0.3125}]
    assert changes["errors"] == [{"error_class": "code_error", "tool": "run_code", "now": 4, "before": 0}]
    assert [(row["task"], row["previous"], row["before"], row["now"]) for row in changes["tasks"]] == [
        ("train/0", 2, 0.5, 0.0),
        ("train/1", 2, 0.125, 0.0),
    ]
    assert changes["examples"]["changed"]["failed_call"]["result"] == ERROR
    assert changes["examples"]["worst"]["reward"] == 0.0
    first = page.read(f"/api/runs/{run}/iterations/1/changes")
    assert (first["before"], first["tasks"], first["again"]) == (None, [], 0)
    assert page.ask(f"/api/runs/{run}/iterations/9/changes")[0] == 404


def test_changes_route_reads_both_databases(database: Database) -> None:
    played(database, (1.0, 0.5), (0.5, 0.5))
    page = PageOver(database)
    changes = page.read("/api/runs/1/iterations/2/changes")
    assert [(row["before"], row["now"]) for row in changes["tasks"]] == [(0.5, 0.25)]
    assert (changes["again"], changes["shared"], changes["worst_count"]) == (2, 2, 2)
    examples = page.read("/api/runs/1/examples")
    assert [row["reward"] for row in examples["best"]] == [0.5, 0.5]
    assert [row["reward"] for row in examples["worst"]] == [0.0, 0.0]


def test_iteration_route_says_why_update_was_skipped(database: Database) -> None:
    work = ready(database, submission())
    train_commits.commit_update(database, work, bad_update(), 3)
    told = PageOver(database).read("/api/runs/1/iterations/1")
    assert told["updates"] == []
    assert "The update made no step: the loss is nan." in [trouble["text"] for trouble in told["troubles"]]


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("clip_fraction", 0.4, "clipped"),
        ("ratio", 2.0, "ratio"),
        ("ratio", 0.5, "ratio"),
        ("sampler_difference_mean", 0.3, "sampler"),
        ("importance_outside", 0.2, "off-policy"),
        ("effective_sample_size", 0.2, "sample size"),
        ("grad_norm", 0.0, "gradient"),
        ("grad_norm", float("inf"), "gradient"),
    ],
)
def test_update_health_names_what_is_off(name: str, value: float, word: str) -> None:
    def troubles(update: dict[str, float | None]) -> list[Trouble]:
        return list_update_troubles("first", IterationRecord(ITERATION, [HEALTHY, update], GroupCounts(8, 4, 2)), GRPO)

    assert troubles(HEALTHY) == []
    (trouble,) = troubles({**HEALTHY, name: value})
    assert word in trouble.text
    assert troubles({**HEALTHY, name: None}) == []


@pytest.mark.parametrize(
    ("counts", "algorithm", "text", "is_note"),
    [
        (GroupCounts(8, 5, 0), "grpo", "5 of 8 groups have equal rewards and no right episode", False),
        (GroupCounts(8, 5, 5), "grpo", "5 of 8 groups are solved and have equal rewards, so they teach nothing more.", True),
        (GroupCounts(8, 8, 4), "grpo", "", False),
        (GroupCounts(8, 8, 0), "ppo", "", False),
        (GroupCounts(8, 8, 0), "my_module:mine", "", False),
        (GroupCounts(8, 8, 0), None, "", False),
    ],
)
def test_iteration_health_of_groups(counts: GroupCounts, algorithm: str | None, text: str, is_note: bool) -> None:
    record = IterationRecord(ITERATION, [HEALTHY], counts)
    troubles = list_update_troubles("first", record, algorithm)
    assert [(trouble.text.startswith(text), trouble.is_note) for trouble in troubles] == ([(True, is_note)] if text else [])
    compares = algorithm == "grpo"
    assert list_checked([record], algorithm) == ["episodes", *(["groups"] if compares else []), "updates"]
    assert list_checked([IterationRecord(ITERATION, [], GroupCounts())], algorithm) == ["episodes"]


@pytest.mark.parametrize(("right", "texts"), [(8, ["8 of 8"]), (5, ["The update made no step", "5 of 8"])])
def test_skipped_update_is_explained_if_all_groups_are_solved(right: int, texts: list[str]) -> None:
    record = IterationRecord({**ITERATION, "skipped": NO_GROUP_VARIES}, [], GroupCounts(8, 8, right))
    troubles = list_update_troubles("first", record, GRPO)
    assert [trouble.text[: len(text)] for trouble, text in zip(troubles, texts, strict=True)] == texts
    assert [trouble.is_note for trouble in troubles] == [False, True][-len(texts) :]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"trainable": 3}, ""),
        ({"trainable": 2}, "2 of 4 episodes cannot be used."),
        ({"trainable": 0, "status": "running"}, ""),
        ({"staleness": 2}, ""),
    ],
)
def test_iteration_health_of_episodes(values: dict[str, object], text: str) -> None:
    record = IterationRecord({**ITERATION, **values}, [HEALTHY], GroupCounts(8, 4, 2))
    troubles = list_update_troubles("first", record, GRPO)
    assert [trouble.text for trouble in troubles] == ([text] if text else [])


@pytest.mark.parametrize(("done", "is_note"), [(0, False), (2, False), (3, True)])
def test_failures_are_notes_if_few_episodes_failed(done: int, is_note: bool) -> None:
    failure = {"failed": 1, "episodes": 1, "error": "no such key", "status": "failed"}
    agents = {"ended": 1, "episodes": 1, "error": "no such key"}
    assert [trouble.is_note for trouble in find_failures(failure, {}, done, "first").values()] == [is_note]
    assert [trouble.is_note for trouble in find_failures({}, agents, done + 1, "first").values()] == [is_note]


WELL = {
    "groups": 8, "flat_groups": 4, "tool_calls": 4, "tool_errors": 1, "trainable": 16, "episodes": 16, "staleness": 1,
    "status": "done", "rollout_seconds": 2.5, "update_seconds": 0.5, "skipped": "",
}  # fmt: skip
"""A healthy iteration."""


def test_health_of_iterations_without_episodes_is_unknown() -> None:
    record = IterationRecord({**ITERATION, "episodes": 0, "trainable": 0}, [], GroupCounts())
    assert list_checked([record], None) == []
    run = {"run": "served", "status": "done", "reason": ""}
    assert describe_health(run, 1, [], []).endswith("Its iterations have no episodes, so nothing can be said about its health.")
    assert describe_health(run, 0, [], []).endswith("No iteration has ended, so nothing can be said about its health.")


def test_iteration_troubles_count_each_kind_once() -> None:
    rows = [
        {**WELL, "iteration": number, "tool_errors": 4 * (number < 3), "trainable": 8 + number, "flat_groups": 5}
        for number in (1, 2, 3, 4)
    ]
    records = [IterationRecord(row, [HEALTHY], GroupCounts(8, 5, 5)) for row in rows]
    by_subject = find_iteration_troubles("first", records, GRPO)
    solved, calls, usable = by_subject.values()
    few = Trouble("1 episode failed, all with: no such key.", "agentrl episodes first --status failed", is_note=True)
    joined = join_troubles({"episodes": few, "solved": Trouble("Every episode is right.", is_note=True)}, by_subject)
    assert [(trouble.text, trouble.is_note) for trouble in joined] == [
        (f"1 episode failed, all with: no such key. {usable.text}", False),
        (calls.text, False),
        ("Every episode is right.", True),
    ]
    assert calls == Trouble(
        "In 2 of 4 iterations, most recently in iteration 2: 4 of 4 tool calls failed.", "agentrl changes first --iteration 2"
    )
    assert (solved.is_note, solved.text[:44]) == (True, "In 4 of 4 iterations, most recently in itera")
    assert usable.text == "In 3 of 4 iterations, most recently in iteration 3: 5 of 16 episodes cannot be used."
    run = {"run": "first", "status": "done", "reason": "", "kind": "train"}
    assert describe_health(run, 4, ["episodes"], [calls, solved]) == "first is done. 1 problem:"
    usual = (
        "first is done. Nothing unusual: in all 4 finished iterations, episodes, groups and updates are in their usual ranges."
    )
    assert describe_health(run, 4, ["episodes", "groups", "updates"], [solved]) == usual
    assert describe_health(run, 1, ["episodes"], []).endswith("in its finished iteration, episodes are in their usual ranges.")
    assert "No iteration has ended" in describe_health({**run, "status": "running"}, 0, [], [])


@pytest.mark.parametrize(
    ("again", "then", "now", "cause"),
    [
        (0, None, None, "The tasks are different ones: none of the 6 tasks of iteration 7 was sampled before."),
        (6, 0.75, 0.5, "The same tasks became worse: 6 of the 6 tasks of iteration 7 were sampled before,"),
        (
            1,
            0.5,
            0.5,
            "It comes mainly from tasks other than those of iteration 6: 1 of the 6 tasks of iteration 7 was sampled",
        ),
        (6, 0.5, 0.75, "It comes mainly from tasks other than those of iteration 6"),
    ],
)
def test_reward_change_names_its_cause(again: int, then: float | None, now: float | None, cause: str) -> None:
    change = {"iteration": 7, "previous": 6, "before": 0.75, "now": 0.5, "tasks": 6, "again": again}
    text, sentence = describe_reward_change({**change, "again_before": then, "again_now": now})
    assert text == "0.75 -> 0.5 (-0.25), iteration 6 to 7"
    assert sentence.startswith(cause)


def test_health_facts_mark_what_is_off() -> None:
    facts = list_health_facts(WELL, 3, GRPO)
    assert [fact.text for fact in facts] == [
        "4 of 8 groups with different rewards, 3 solved with equal rewards, 1 with equal rewards",
        "1 of 4 tool calls failed",
        "16 of 16 episodes usable",
        "sampled 1 version behind",
        "rollout 2.5 s, update 0.5 s",
    ]
    assert not any(fact.is_off for fact in facts)
    ill = {"flat_groups": 8, "tool_errors": 2, "trainable": 11, "staleness": 2, "skipped": "the loss is nan"}
    facts = list_health_facts({**WELL, **ill}, 3, GRPO)
    assert [fact.is_off for fact in facts] == [True, True, True, False, False, True]


def test_iteration_route_counts_groups_in_words(sqlite: Database) -> None:
    add_runs(sqlite)
    page = PageOver(sqlite)
    (run,) = values(sqlite, "SELECT id FROM runs WHERE name = 'code'")
    told = [page.read(f"/api/runs/{run}/iterations/{number}")["counted"] for number in (1, 2, 3)]
    assert told == ["2, 1 with equal rewards", "2", "2, 2 with equal rewards"]
    many = describe_groups(GroupCounts(8, 4, 3), {"dropped_groups": 2, "more_groups": 1})
    assert many == "8, 3 solved with equal rewards, 1 with equal rewards, 2 dropped, 1 additional"


def test_question_store_has_advantages_of_its_rewards(sqlite: Database) -> None:
    add_runs(sqlite)
    flat = "SELECT e.id FROM episodes e JOIN groups g ON g.id = e.group_id WHERE g.std_reward = 0"
    consumed = "SELECT count(*) FROM consumptions WHERE advantage {} 0 AND episode_id {} IN ({})"
    assert values(sqlite, consumed.format("=", "", flat)) == [6]
    assert values(sqlite, consumed.format("<>", "", flat)) == [0]
    assert values(sqlite, consumed.format("=", "NOT", flat)) == [0]


def test_run_route_tells_health_of_newest_iteration(sqlite: Database) -> None:
    add_runs(sqlite)
    page = PageOver(sqlite)
    ids = {row["run"]: row["id"] for row in page.read("/api/runs")["rows"]}
    health = page.read(f"/api/runs/{ids['code']}/verdict")["health"]
    assert health["iteration"] == 4
    assert health["facts"][0] == {"text": "2 of 2 groups with different rewards", "is_off": False}
    assert page.read(f"/api/runs/{ids['broken']}/verdict")["health"] is None


def test_healthy_demo_run_has_no_fault() -> None:
    with closing(open_database(open_demo().database)) as database:
        page = PageOver(database)
        troubles = [page.read(f"/api/runs/1/iterations/{number}")["troubles"] for number in range(1, 21)]
    assert [trouble["text"] for its in troubles for trouble in its if not trouble["is_note"]] == []
    assert [number for number, its in enumerate(troubles, 1) if its] == [11, 12, 16, 18]


def test_run_that_learned_everything_gets_note(database: Database) -> None:
    played(database, (1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    with database.engine.begin() as tx:
        for change in (
            "rewards SET value = 1.0",
            "episodes SET reward = 1.0",
            "groups SET mean_reward = 1.0, std_reward = 0.0",
            "iterations SET skipped = 'no advantage differs from 0'",
        ):
            tx.execute(text(f"UPDATE {change}"))
    (note,) = PageOver(database).read("/api/runs/1/verdict")["troubles"]
    assert note["text"].endswith("every episode is right. Harder tasks would teach more.")
    assert note["is_note"]


def test_run_route_says_why_run_stopped(sqlite: Database) -> None:
    add_runs(sqlite)
    page = PageOver(sqlite)
    rows = {row["run"]: row for row in page.read("/api/runs")["rows"]}
    assert (rows["broken"]["status"], rows["broken"]["reason"]) == ("paused", REASON)
    failed, resume = page.read(f"/api/runs/{rows['broken']['id']}/verdict")["troubles"]
    assert failed["text"] == f"4 episodes failed, all with: {WHY_FAILED}"
    assert (failed["command"], resume["command"]) == ("agentrl episodes broken --status failed", "agentrl resume broken")
    for name in ("broken", "code", "agents"):
        here = f"/api/runs/{rows[name]['id']}"
        assert page.read(f"{here}/verdict") == plain(asdict(judge_run(sqlite, name)))
        assert page.read(f"{here}/errors") == page.read(f"{here}/verdict")["errors"]


def test_runs_route_finds_evaluations_and_those_made_by_hand(database: Database) -> None:
    played(database, (1.0, 0.5))
    with database.engine.begin() as tx:
        columns = "status, dataset, base, base_hash, seed, format, epochs, iterations, output_dir, config, manifest"
        for name, measures in (("planned", "1, 0"), ("by-hand", "NULL, NULL")):
            query = f"""
                INSERT INTO runs (name, kind, measures_id, measures_version, {columns})
                SELECT '{name}', 'eval', {measures}, {columns} FROM runs WHERE id = 1"""
            tx.execute(text(query))
        policy = "kind, path, sha256"
        tx.execute(
            text(f"""
                INSERT INTO policies (run_id, version, {policy})
                SELECT r.id, p.version, p.kind, p.path, p.sha256 FROM runs r JOIN policies p ON p.run_id = 1 AND p.version = 1
                WHERE r.name = 'by-hand'""")
        )
        (by_hand,) = tx.execute(text("SELECT id FROM runs WHERE name = 'by-hand'")).scalars()
        score = {"episodes": 8, "errors": 0, "tasks": 8, "mean_reward": 0.75, "low": 0.5, "high": 0.9, "policy": "first@1"}
        told = {"dataset": "arithmetic", "split": "test", "accuracy": 0.75, "pass_at": {}}
        tx.execute(insert(schema.evals).values(run_id=by_hand, **score, **told))
    page = PageOver(database)
    assert {row["run"] for row in page.read("/api/runs", kind="eval")["rows"]} == {"planned", "by-hand"}
    rows = {row["run"]: row for row in page.read("/api/runs")["rows"]}
    assert {*rows} == {"first", "by-hand"}
    assert rows["first"]["eval_reward"] is None
    assert rows["first"]["measured"] == {"run_id": by_hand, "version": 1, "reward": 0.75}
