"""The list of evidence over both databases: questions, failed calls, filters, orders, searches in pieces, the way through."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest
from sqlalchemy import delete, insert, text, update

from agentrl.cli.browse import _episode_row
from agentrl.workers import page as page_package
from agentrl.workflow.stats.evaluation import is_right
from agentrl.workflow.store import steps
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.driver_reader import Row, select_rows
from agentrl.workflow.store.reads import evidence_rows, paging
from agentrl.workflow.store.rollout_claims import GroupWork
from agentrl.workflow.store.solved_rule import MEMBERS, SolvedRule
from agentrl.workflow.store.tool_calls import record_result
from agentrl.workflow.tables import schema
from tests.page.test_task_routes import played
from tests.support.grown_stores import grown_postgres, grown_sqlite, grown_store  # noqa: F401 - fixtures
from tests.support.page_answers import PageOver
from tests.support.played_runs import CALL, answered, claim, finish, sampled, start, step, submission, values

grown = grown_store({"large": 3})
EPISODES = "/api/runs/1/episodes"


def listed(page: PageOver, **asked: Any) -> list[int]:
    """The ids of all pages."""
    ids: list[int] = []
    cursor = ""
    while True:
        document = page.read(EPISODES, cursor=cursor, **asked)
        ids += [row["id"] for row in document["rows"]]
        cursor = document["next"]
        if not cursor:
            return ids


def fail_calls(database: Database, work: GroupWork, count: int = 1) -> None:
    """The work's first episode makes calls in one turn, which fail."""
    (calls,) = steps.commit_sampled(database, work.fence, [sampled(work, calls=(CALL,) * count)])
    failure = answered("SyntaxError: é", "code_error")
    for call in calls:
        assert record_result(database, call, failure, datetime.now(UTC), "tools:1")
    observed = replace(step(0, (CALL,) * count), results=(failure,) * count)
    steps.commit_observed(database, work.fence, [(work.episodes[0].id or 0, observed)])


def test_evidence_column_and_page_say_fate() -> None:
    """As `agentrl episodes --fate` and the views do."""
    assert evidence_rows.COLUMNS["fate"].title == "fate"
    scripts = {file.name: file.read_text() for file in (Path(page_package.__file__).parent / "static").glob("*.js")}
    assert [name for name, script in scripts.items() if '"training"' in script] == []


def test_evidence_shows_question_parts_and_failed_call(database: Database) -> None:
    work = claim(database, start(database, submission())[0])
    fail_calls(database, work, 3)
    finish(database, work, 0, 0.5, {"numeric_answer": 0.0, "format": 1.0})
    (row,) = PageOver(database).read(EPISODES, tool_errors=1)["rows"]
    assert row["question"].startswith("What is 6*")
    assert {part["part"]: part["value"] for part in row["parts"]} == {"numeric_answer": 0.0, "format": 1.0}
    failed = row["failed_call"]
    assert (failed["tool"], failed["error_class"], failed["result"]) == ("calculator", "code_error", "SyntaxError: é")
    assert row["more_errors"] == 2
    assert _episode_row(row)["error"] == "calculator: code_error (+2): SyntaxError: é"
    ended = {**row, "error": "lost", "error_class": "infra", "more_errors": 3}
    assert _episode_row(ended)["error"] == "lost (+3)"
    page = PageOver(database)
    for asked in ({"text": "syntaxerror: é"}, {"text": "6*7"}, {"text": "turn 0"}, {"error_class": "code_error"}):
        assert listed(page, **asked) == [row["id"]], asked
    assert listed(page, text="TypeError") == listed(page, error_class="parse_error") == []
    assert page.read("/api/runs/1/errors") == [{"error_class": "code_error", "tool": "calculator", "errors": 3, "episodes": 1}]
    assert page.ask(EPISODES, outcome="lost")[0] == page.ask(EPISODES, fate="gone")[0] == 422


def test_evidence_lists_each_episode_once_in_every_order(grown: Database) -> None:
    page = PageOver(grown)
    everything = values(grown, "SELECT id FROM episodes WHERE run_id = 1 ORDER BY id")
    for column in evidence_rows.COLUMNS.values():
        for way in ("", "-"):
            ids = listed(page, sort=f"{way}{column.sort}", size=100)
            assert sorted(ids) == everything, column
    assert listed(page, sort="-id", size=1000) == everything[::-1]


def test_evidence_search_goes_on_where_it_stopped(grown: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PageOver(grown)
    sorts = ("id", "-reward", "answer", "-seconds")
    whole = {sort: listed(page, sort=sort, text="84", size=1000) for sort in sorts}
    monkeypatch.setattr(paging, "PIECE_SECONDS", 0.0)
    monkeypatch.setattr(paging, "FIRST_WINDOW", 37)
    for sort, ids in whole.items():
        first = page.read(EPISODES, sort=sort, text="84", size=1000)
        assert (first["searched"], first["total"]) == (37, 384)
        assert first["next"]
        assert listed(page, sort=sort, text="84", size=5) == ids
        assert 0 < len(ids) < 384


def test_evidence_beside_walks_list_both_ways(grown: Database) -> None:
    page = PageOver(grown)
    for asked in ({"sort": "-reward"}, {"outcome": "solved", "sort": "reward"}, {"tool_errors": 1}, {}):
        ids = listed(page, size=1000, **asked)
        for place in (0, 1, len(ids) // 2, len(ids) - 1):
            beside = page.read(f"{EPISODES}/{ids[place]}/beside", **asked)
            before, after = ids[place - 1] if place else None, ids[place + 1] if place + 1 < len(ids) else None
            assert (beside["previous"], beside["next"]) == (before, after), (asked, place)
    assert page.read(f"{EPISODES}/999999/beside") == {"previous": None, "next": None}


def test_evidence_no_longer_solved_follows_solved_group(database: Database) -> None:
    played(database, (1.0, 0.5), (0.5, 0.5), (0.5, 1.0))
    page = PageOver(database)
    lost = page.read(EPISODES, outcome="no_longer_solved")["rows"]
    assert {row["iteration"] for row in lost} == {2}
    assert len({row["task_id"] for row in lost}) == 1
    assert [row["id"] for row in lost] == listed(page, outcome="no_longer_solved", iteration=2)
    assert listed(page, outcome="no_longer_solved", iteration=3) == []
    assert listed(page, outcome="never_solved") == []
    assert len(listed(page, outcome="solved")) == 2


RULES = [
    SolvedRule("default", [1], {"a": 1.0, "b": 0.5}, (), False, {"a": 1.0, "b": 0.5}),
    SolvedRule("default", [1], {"a": 1.0, "b": 1.0}, (), False, {"a": 1.0, "b": 1.0}),
    SolvedRule("default", [1], {"a": 1.0}, ("b",), False, {"a": 1.0}),
    SolvedRule("default", [1], {}, (), True, {"b": 1.0}),
    SolvedRule("default", [1], {"a": 1.0}, (), True, {"a": 1.0}),
    SolvedRule("default", [1], {"a": 0.5}, (), True, {"a": 0.5}),
    SolvedRule("default", [1], {"a": 2.0}, (), True, {"a": 2.0}),
]


def test_solved_rule_in_sql_agrees_with_evaluations(database: Database) -> None:
    work = claim(database, start(database, submission())[0])
    cases = ({}, {"a": 1.0}, {"b": 1.0}, {"a": 1.0, "b": 1.0}, {"a": 0.5, "b": 1.0}, {"a": 1.0, "b": 0.5})
    finish(database, work, 0, 0.5, {"numeric_answer": 0.5})
    for parts in cases:
        with database.engine.begin() as tx:
            tx.execute(delete(schema.rewards))
            row = {"reward_set_id": 1, "episode_id": 1, "weight": 1.0, "run": "first"}
            for part, value in parts.items():
                tx.execute(insert(schema.rewards).values(part=part, value=value, **row))
        for rule in RULES:
            env_parts = parts.keys() - rule.own.keys() if rule.gives else ()
            verdict = is_right(parts, rule.weights, rule.correct, env_parts)
            query = f"SELECT count(*) FROM episodes e WHERE e.id = 1 AND {rule.condition('e')}"
            assert values(database, query, **rule.parameters) == [int(bool(verdict))], (rule, parts)


WRONG = (((-1, 0.0),), ((-1, 0.5),), ((0, 1.0), (1, -0.5)))
RIGHT = (((-1, 1.0),), ((0, 0.5), (1, 0.5)))
"""The rows (step and value) of a reward part, scored at once or step by step."""


def score_at_random(tx: Any, episodes: Sequence[Row], random: Random) -> dict[int, dict[str, float]]:
    """Replace all rewards. Each episode gets some in one of the sets 1 and 2, which are returned, and others in set 3. In half
    of the groups all parts of done episodes are wrong. All parts of other episodes are right.
    """
    tx.execute(delete(schema.rewards))
    hopeless = {group: random.random() < 0.5 for group in {row["group_id"]: None for row in episodes}}
    parts, rows = dict[int, dict[str, float]](), list[Row]()
    for row in episodes:
        every = WRONG if hopeless[row["group_id"]] else ()
        every = every if row["status"] == "done" else RIGHT
        for reward_set in (random.choice((1, 2)), 3):
            names = "abc" if every else random.sample("abc", random.choice((0, 1, 1, 2, 3)))
            scores = {name: random.choice(every if every and reward_set < 3 else WRONG + RIGHT) for name in names}
            if reward_set < 3:
                parts[row["id"]] = {name: sum(value for _, value in score) for name, score in scores.items()}
            more = {"reward_set_id": reward_set, "episode_id": row["id"], "weight": 1.0, "run": "large"}
            rows += [{**more, "part": name, "step": step, "value": value} for name in names for step, value in scores[name]]
    tx.execute(insert(schema.rewards), rows)
    return parts


def is_right_by(rule: SolvedRule, parts: Mapping[str, float], reward: float) -> bool:
    verdict = is_right(parts, rule.weights, rule.correct, parts.keys() - rule.own.keys() if rule.gives else ())
    return reward >= 1 if verdict is None else verdict


def lost_after(members: Sequence[Row], solved: Mapping[Any, int]) -> set[int]:
    """The groups, of those in the order of iterations, that are not solved although their task's group before was."""
    lost, before = set(), dict[int, int]()
    for member in members:
        verdict = solved.get((member["iteration"], member["id"]))
        if verdict == 0 and before.get(member["task_id"]):
            lost.add(member["id"])
        if verdict is not None:
            before[member["task_id"]] = verdict
    return lost


@pytest.mark.parametrize("run", ["large", "again"])
@pytest.mark.parametrize("rule", RULES)
def test_solved_groups_in_sql_agree_with_evaluations(grown: Database, rule: SolvedRule, run: str) -> None:
    rule = replace(rule, reward_sets=(1, 2))
    with grown.engine.connect() as tx:
        tasks = 1 + schema.groups.c.id % 16  # each task in several iterations
        tx.execute(update(schema.groups).values(task_id=tasks, solved=None))
        args = {"run_id": tx.execute(text("SELECT id FROM runs WHERE name = :run"), {"run": run}).scalar_one()}
        own = {row["id"] for row in select_rows(tx, "SELECT id FROM groups WHERE run_id = :run_id", **args)}
        members = select_rows(tx, f"SELECT * FROM ({MEMBERS}) m ORDER BY iteration, id", **args)
        episodes = select_rows(tx, "SELECT id, group_id, status, reward FROM episodes ORDER BY id")
        parts = score_at_random(tx, episodes, Random(run))
        judged = select_rows(tx, f"{rule.judged_groups()} ORDER BY iteration, id", **args, **rule.parameters)
        lost = select_rows(tx, rule.groups_no_longer_solved(), **args, **rule.parameters)
        tx.execute(update(schema.groups).values(solved=1))
        stored = select_rows(tx, f"{rule.judged_groups()} ORDER BY iteration, id", **args, **rule.parameters)
        tx.rollback()
    done = [row for row in episodes if row["status"] == "done"]
    right = {row["group_id"] for row in done if is_right_by(rule, parts[row["id"]], row["reward"])}
    solved = {(row["iteration"], row["id"]): int(row["id"] in right) for row in members if row["mean_reward"] is not None}
    assert set(solved.values()) == {0, 1}
    assert len(judged) == len(members)
    assert {(row["iteration"], row["id"]): row["solved"] for row in judged if row["mean_reward"] is not None} == solved
    assert {row["solved"] for row in judged if row["mean_reward"] is None} <= {None}
    assert {row["id"] for row in lost} == lost_after(members, solved) & own
    assert bool(lost) == (run == "large")
    own_verdicts = [{**row, "verdict": 1, "solved": 1} for row in judged]
    assert stored == (own_verdicts if run == "large" else judged), "a run that takes groups from the store judges them itself"
