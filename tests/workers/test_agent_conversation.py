"""A request continues the turn whose history it has, and begins another chain if no turn has it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.workers.jobs import pending_agents
from agentrl.workers.jobs.agent_conversation import CONTINUES_NONE, History, Match
from agentrl.workers.jobs.sampling_server import sampling_server
from agentrl.workflow.dialects import Ask
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import ledger
from agentrl.workflow.store.steps import CONTINUED
from agentrl.workflow.trajectory import ROOT, Message, Step, ToolCall
from tests.support.agents_stage import Stage, ask, end_agent, episode_of, group_of, run_agent, staged, user
from tests.support.small_models import chat
from tests.workers.test_agent_rollout import Policy
from tests.workers.test_workers import in_memory as in_memory

SYSTEM = Message("system", "You are a clerk.")
QUESTION = Message("user", "How many invoices are open?")
TOOLS: Sequence[Mapping[str, Any]] = ({"type": "function", "function": {"name": "count"}},)


def result(text: str) -> Message:
    return Message("tool", text)


def turn(n: int, thought: str = "") -> Message:
    return Message("assistant", f"part {n}", thought, (ToolCall("count", {"page": n}),))


def step(index: int, prompt: Sequence[Message], message: Message, parent: int = ROOT, **values: Any) -> Step:
    return Step(index, tuple(prompt), (), (), (), "stop", message, 0, parent=parent, **values)


class Told:
    """A conversation of some turns, as a history has it."""

    def __init__(self, count: int = 5, thought: str = "hm") -> None:
        self.steps = [step(0, (SYSTEM, QUESTION), turn(0, thought))]
        for n in range(1, count):
            self.steps.append(step(n, (result(f"result {n - 1}"),), turn(n, thought), n - 1))
        self.history = History()
        for index in range(count):
            self.history.add(self.steps, index, TOOLS, {})
        self.messages = [message for one in self.steps for message in (*one.prompt, one.message)]

    def find(self, *messages: Message, tools: Sequence[Any] = TOOLS, **options: Any) -> Match:
        return self.history.find(Ask(messages, "m", tuple(tools), options), self.steps)


NEXT = (result("result 4"),)


def test_history_continues_sampled_turn_at_any_end() -> None:
    told = Told()
    assert told.find(*told.messages, *NEXT) == Match(4, len(told.messages), equal=1)
    assert told.find(*told.messages[:5], result("another")) == Match(1, 5, equal=1)
    assert History().find(Ask((QUESTION,), "m"), ()) == Match()


def test_history_with_changed_message_matches_no_later_turn() -> None:
    told = Told()
    for place, message in enumerate(told.messages):
        changes = [{"content": "something else"}, *([{"thought": ""}] if message.thought else [])]
        for change in changes:
            edited = [*told.messages]
            edited[place] = replace(message, **change)
            match = told.find(*edited, *NEXT)
            assert match.step < place // 2, (place, change)
    assert told.find(*told.messages, *NEXT, tools=()) == Match()
    assert told.find(*told.messages, *NEXT, enable_thinking=False) == Match()


def test_history_with_foreign_or_missing_turn_matches_none() -> None:
    told = Told()
    assert told.find(SYSTEM, *told.messages[-3:], *NEXT) == Match()
    assert told.find(SYSTEM, QUESTION, Message("assistant", "no"), Message("user", "sure?")) == Match()
    assert told.find(SYSTEM, QUESTION) == Match()


def test_history_continues_first_draw_of_equal_turns() -> None:
    answer = Message("assistant", "two")
    for draws in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        steps = [step(n, (QUESTION,), answer, new_row="again" if n else None, draw=draw) for n, draw in enumerate(draws)]
        history = History()
        for index in range(3):
            history.add(steps, index, (), {})
        found = history.find(Ask((QUESTION, answer, Message("user", "sure?")), "m"), steps)
        assert (steps[found.step].draw, found.equal) == (0, 3)
        unread = [replace(one, delivered=one.draw != 0) for one in steps]
        found = history.find(Ask((QUESTION, answer, Message("user", "sure?")), "m"), unread)
        assert (unread[found.step].draw, found.equal) == (1, 2), "nobody goes on from what was not told"


def test_history_matches_ten_thousand_messages() -> None:
    steps, history = list[Step](), History()
    many = [message for n in range(4_999) for message in (turn(n % 7, "hm"), result("same"))]
    for n in range(200):
        steps.append(step(n, (QUESTION, *many[: 2 * n]), turn(0, "hm"), new_row="x" if n else None))
        history.add(steps, n, TOOLS, {})
    bare = [replace(message, thought="") for message in many]
    others = [replace(message, content="y", tool_calls=()) for message in many]
    for first, rest in ((replace(QUESTION, content="x"), many), (QUESTION, bare), (QUESTION, others), (SYSTEM, others)):
        assert history.find(Ask((first, *rest), "m", tuple(TOOLS)), steps).step == ROOT
    assert history.find(Ask((SYSTEM, QUESTION), "m", tuple(TOOLS)), steps) == Match()
    assert history.find(Ask((QUESTION, SYSTEM, QUESTION), "m", tuple(TOOLS)), steps) == Match()


@pytest.fixture
def db(own_database: Database, in_memory: None) -> Iterator[Database]:
    """The process's database, a broker that nobody reads, and nothing kept from other tests."""
    pending_agents._replies.forget()
    sampling_server.forget()
    yield own_database
    pending_agents._replies.forget()
    sampling_server.forget()


def test_history_explains_new_chains_and_possible_continuations(db: Database, capsys: pytest.CaptureFixture[str]) -> None:
    said = chat().turn(Message("assistant", "#### 42", thought="six sevens"))
    asked, answer = user("How much is 6*7?"), {"role": "assistant", "content": "#### 42", "reasoning": "six sevens"}
    with staged(Stage(db, group_of(db), Policy(said).engine, chat())) as stage:
        key = run_agent(db, 1)
        assert ask(stage, key, [asked], n=2).said == "#### 42"
        ask(stage, key, [asked, answer, user("sure?")])
        ask(stage, key, [asked, answer, user("really?")])
        ask(stage, key, [asked, {"role": "assistant", "content": "#### 42"}, user("sure?")])
        ask(stage, key, [user("And 6*8?")])
        end_agent(stage, 1)
        stage.over()
    reasons = [one.new_row for one in episode_of(db, 1).steps]
    assert reasons == [None, "another choice of one request", None, CONTINUED, CONTINUES_NONE, CONTINUES_NONE]
    assert [one.parent for one in episode_of(db, 1).steps][2:4] == [0, 0]
    found = ledger.explain_fate(db, 1)
    assert [(one["step"], one["reason"]) for one in found["chains"]] == [(n, why) for n, why in enumerate(reasons) if why]
    assert found["ambiguous"] == [{"step": 2, "after": 0, "equal": 2}, {"step": 3, "after": 0, "equal": 2}]
    assert main(["why", "1"]) == 0
    shown = capsys.readouterr().out
    assert f"step 4 begins chain 3: {CONTINUES_NONE}" in shown
    assert "step 2 continues step 0: 2 turns have the same tokens" in shown
