"""The shipped envs: every task's own solution earns 1.0, `step` is pure, a wrong answer earns less."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.workers.jobs.tool_call import run_tool
from agentrl.workflow.datasets import Dataset
from agentrl.workflow.envs import Env
from agentrl.workflow.errors import DatasetError, RewardError
from agentrl.workflow.plugins import find, names
from agentrl.workflow.rewards import score
from agentrl.workflow.rewards.sql_match import ordered, read_query
from agentrl.workflow.rewards.text_answer import read_answer
from agentrl.workflow.sql import query_process
from agentrl.workflow.store.tool_calls import CallWork
from agentrl.workflow.trajectory import Episode, Message, Step, Task, ToolCall, ToolResult
from tests.data.test_datasets import episode_of, reward_of

SHIPPED = ("qa", "echo", "search_qa", "text_to_sql")
"""Those with a dataset whose solutions a test plays here."""


def tasks_of(name: str) -> dict[str, list[Task]]:
    """The dataset's tasks by split."""
    return {split: list(find("datasets", name).load(split)) for split in ("train", "test")}


def answered(task: Task, text: str, calls: Sequence[tuple[ToolCall, ToolResult]] = ()) -> Episode:
    """An episode that makes these calls in one turn, if any, and then says the text."""
    steps = []
    if calls:
        made = Message("assistant", "", tool_calls=tuple(call for call, _ in calls))
        steps.append(Step(0, (), (), (), (), "stop", made, 0, results=tuple(result for _, result in calls)))
    steps.append(Step(len(steps), (), (), (), (), "stop", Message("assistant", text), 0))
    return Episode(task, steps=tuple(steps), status="done", stop_reason="answered")


def reward(name: str, text: str, reference: str = "x", **metadata: Any) -> float:
    """What that reward gives for an answer."""
    return score(answered(Task("t", (Message("user", "?"),), reference, metadata), text), {name: 1.0})[name]


# --- all of them --------------------------------------------------------------------------------------------------------------


def test_env_reset_joins_system_messages_of_env_and_task() -> None:
    own = (Message("system", "be brief"), Message("system", "be kind"), Message("user", "?"))
    assert Env(system_prompt="Answer.").reset(Task("t", own, "")) == (
        Message("system", "Answer.\n\nbe brief\n\nbe kind"), Message("user", "?"),
    )  # fmt: skip
    assert Env().reset(Task("t", own[1:], "")) == own[1:]
    assert Env().reset(Task("t", own[2:], "")) == own[2:]


@pytest.mark.parametrize("name", SHIPPED)
def test_env_solution_of_task_earns_one(name: str) -> None:
    dataset: Dataset = find("datasets", name)
    assert dataset.demonstrations is not None
    for tasks in tasks_of(name).values():
        solutions = list(dataset.demonstrations(tasks, 0))
        assert [reward_of(dataset, episode_of(*both)) for both in zip(tasks, solutions, strict=True)] == [1.0] * len(tasks)


@pytest.mark.parametrize("name", SHIPPED)
def test_env_dataset_is_sized_and_repeatable(name: str) -> None:
    tasks = tasks_of(name)
    assert tasks == tasks_of(name)
    every = [task for split in tasks.values() for task in split]
    assert 50 <= len(every) <= 100
    assert len(tasks["test"]) >= 10
    assert len({task.key for task in every}) == len({task.messages for task in every}) == len(every)
    with pytest.raises(DatasetError, match="no split 'dev'"):
        find("datasets", name).load("dev")


@pytest.mark.parametrize("name", SHIPPED)
def test_env_solution_of_other_task_earns_nothing(name: str) -> None:
    dataset: Dataset = find("datasets", name)
    assert dataset.demonstrations is not None
    tasks = tasks_of(name)["train"]
    others = tasks[1:] + tasks[:1]
    solutions = dataset.demonstrations(others, 0)
    earned = [
        reward_of(dataset, replace(episode_of(other, said), task=task))
        for task, other, said in zip(tasks, others, solutions, strict=True)
        if task.reference != other.reference
    ]
    assert len(earned) > len(tasks) // 2
    assert set(earned) == {0.0}


@pytest.mark.parametrize("name", names("envs"))
def test_env_reset_and_step_are_pure(name: str) -> None:
    env: Env = find("envs", name)
    task = Task("t", (Message("user", "Go."),), "1")
    calls = [
        (ToolCall("a", {"x": 1}), ToolResult("one")),
        (ToolCall("b", {}, error="broken"), ToolResult("two", "parse_error")),
    ]
    ended = answered(task, "1", calls)
    called = replace(ended, steps=ended.steps[:1])
    assert env.reset(task) == env.reset(task)
    assert env.step(called) == env.step(called)
    assert [(message.role, message.name, message.content) for message in env.step(called)] == [
        ("tool", "a", "one"),
        ("tool", "b", "two"),
    ]
    assert env.step(ended) == env.step(ended) == ()
    assert env.resumability == "replay"


@pytest.mark.parametrize("name", SHIPPED)
def test_env_demonstration_calls_are_repeatable(name: str) -> None:
    dataset: Dataset = find("datasets", name)
    tools = find("envs", dataset.env).toolset()
    assert dataset.demonstrations is not None
    for said in dataset.demonstrations(tasks_of(name)["test"], 0):
        for calling, told in pairwise(said):
            for call in calling.tool_calls:
                work = CallWork(1, dataset.env, call.name, call.arguments, "none")
                assert [run_tool(tools[call.name], work).content for _ in range(2)] == [told.content] * 2


# --- qa, search_qa: the text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["Oak barrels", "oak barrels.", "The oak barrels", "**oak barrels**", "Answer: oak barrels", "The answer is oak barrels.",
     "I looked it up.\n\nOak  Barrels!", "no\n#### oak barrels\nreally",
     "final answer is: \u201cOak barrels\u201d", "oak\u00a0barrels"],
)  # fmt: skip
def test_text_answer_accepts_these_forms(text: str) -> None:
    assert reward("text_answer", text, "oak barrels") == 1.0


@pytest.mark.parametrize(
    "text", ["", "oak", "oak barrels and bells", "not oak barrels", "#### ", "oak barrels\n#### bells", "oakbarrels"]
)
def test_text_answer_rejects_these_forms(text: str) -> None:
    assert reward("text_answer", text, "oak barrels") == 0.0


def test_text_answer_accepts_alias_and_needs_word_in_reference() -> None:
    assert reward("text_answer", "NYC", "New York", aliases=["nyc", "The Big Apple"]) == 1.0
    with pytest.raises(RewardError, match="contains no word"):
        reward("text_answer", "x", "the ...")


def test_text_answer_ignores_cut_turn_and_tool_call() -> None:
    task = Task("t", (Message("user", "?"),), "yes")
    assert score(replace(answered(task, "yes"), stop_reason="max_tokens"), {"text_answer": 1.0}) == {"text_answer": 0.0}


@given(st.text())
def test_text_answer_and_sql_match_score_any_text(text: str) -> None:
    assert read_answer(text) in text
    assert reward("text_answer", text) in (0.0, 1.0)
    assert reward("sql_match", text, "SELECT 1", database="bookshop.sql") in (0.0, 1.0)


def test_env_datasets_spread_kinds_and_hops_over_splits() -> None:
    for tasks in tasks_of("qa").values():
        counts = Counter(task.metadata["kind"] for task in tasks)
        assert len(counts) == 5
        assert max(counts.values()) - min(counts.values()) <= 1
    for tasks in tasks_of("search_qa").values():
        hops = Counter(task.metadata["hops"] for task in tasks)
        assert abs(hops[1] - hops[2]) <= 2


def test_search_qa_half_of_questions_need_several_searches() -> None:
    tool = find("envs", "search_qa").toolset()["search"]
    for tasks in tasks_of("search_qa").values():
        for task in tasks:
            first, *rest = task.metadata["searches"]
            found = tool.call({"query": first})
            assert task.reference in tool.call({"query": rest[0] if rest else first})
            assert not rest or task.reference not in found


def test_echo_env_pays_half_for_the_call() -> None:
    env = find("envs", "echo")
    task = Task("t", (Message("user", 'Echo "red kite".'),), "red kite")
    call = ToolCall("echo", {"text": "red kite"})
    assert score(answered(task, "red kite"), env.rewards) == {"echoed": 0.0, "text_answer": 1.0}
    assert score(answered(task, "kite", [(call, ToolResult("red kite"))]), env.rewards) == {"echoed": 1.0, "text_answer": 0.0}
    failed = (call, ToolResult("red kite", "tool_error"))
    assert score(answered(task, "red kite", [failed]), env.rewards) == {"echoed": 0.0, "text_answer": 1.0}


# --- text_to_sql --------------------------------------------------------------------------------------------------------------

CITIES = "SELECT DISTINCT city FROM customers"


@pytest.mark.parametrize(
    ("answer", "reference", "earned"),
    [
        ("SELECT city FROM customers GROUP BY city ORDER BY city DESC", CITIES, 1.0),  # in whatever order
        ("SELECT city FROM customers", CITIES, 0.0),  # as often as they come
        (CITIES + " UNION ALL SELECT 'Rome'", CITIES, 0.0),  # no row more
        ("SELECT city AS town, 1 FROM customers GROUP BY city", CITIES, 0.0),  # no column more
        ("SELECT DISTINCT city FROM customers WHERE city <> 'Oslo'", CITIES, 0.0),
        (CITIES + " ORDER BY city", CITIES + " ORDER BY city", 1.0),
        (CITIES + " ORDER BY city DESC", CITIES + " ORDER BY city", 0.0),
        (CITIES, "SELECT city FROM (SELECT DISTINCT city FROM customers ORDER BY city)", 1.0),
        ("SELECT 0.1 + 0.2", "SELECT 0.3", 1.0),
        ("SELECT 2", "SELECT 2.0", 1.0),
        ("SELECT '2'", "SELECT 2", 0.0),
        ("SELECT NULL", "SELECT NULL", 1.0),
        ("SELECT NULL", "SELECT 0", 0.0),
        ("DELETE FROM customers", "SELECT 1", 0.0),
        ("SELECT 1; DROP TABLE customers", "SELECT 1", 0.0),
        ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT max(i) FROM n", "SELECT 1", 0.0),
        ("SELECT nothing at all", "SELECT 1", 0.0),
        ("", "SELECT 1", 0.0),
    ],
)
def test_sql_match_compares_query_results(answer: str, reference: str, earned: float) -> None:
    assert reward("sql_match", f"```sql\n{answer}\n```", reference, database="bookshop.sql") == earned


def test_sql_match_of_endless_work_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_process, "CPU_SECONDS", 1)
    endless = "SELECT length(ltrim(hex(zeroblob(1900000)), replace(hex(zeroblob(150000)), '0', '1') || '0'))"
    assert reward("sql_match", endless, "SELECT 3800000", database="bookshop.sql") == 0.0


def test_read_query_takes_last_block() -> None:
    assert read_query("```sql\nSELECT 1\n```\nor\n```SQL\nSELECT 2\n```") == "SELECT 2"
    assert read_query("It is this.\n#### SELECT 3") == "SELECT 3"
    assert read_query(" SELECT 4 ") == "SELECT 4"


@pytest.mark.parametrize(
    ("query", "is_ordered"),
    [
        ("SELECT a FROM b ORDER BY a", True),
        ("select a from b order\n by a limit 1", True),
        ("SELECT a FROM (SELECT a FROM b ORDER BY a LIMIT 1)", False),
        ("SELECT ' order by ', \"order by\" FROM b -- order by a", False),
        ("SELECT rank() OVER (PARTITION BY (a) ORDER BY b) FROM c", False),
        ("SELECT a FROM (SELECT a FROM b) ORDER BY 1", True),
    ],
)
def test_sql_match_compares_order_only_if_query_orders(query: str, is_ordered: bool) -> None:
    assert ordered(query) is is_ordered


@pytest.mark.parametrize("reference", ["SELECT nothing at all", "DELETE FROM books", "SELECT 1 WHERE 0", ""])
def test_sql_match_reference_without_rows_is_error(reference: str) -> None:
    with pytest.raises(RewardError, match="does not run, or returns no row"):
        reward("sql_match", "SELECT 1", reference, database="bookshop.sql")


def test_sql_match_without_database_is_error() -> None:
    with pytest.raises(RewardError, match="There is no database"):
        reward("sql_match", "SELECT 1", "SELECT 1", database="/nowhere.db")


def test_text_to_sql_env_shows_tables_and_runs_queries() -> None:
    env = find("envs", "text_to_sql")
    assert "CREATE TABLE orders" in env.system_prompt
    assert "INSERT" not in env.system_prompt
    assert env.toolset()["sql"].call({"query": "SELECT count(*) AS n FROM books"}) == "n\n40\n(1 row)"
