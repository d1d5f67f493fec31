"""next_action: what an episode needs next follows from its record; every mistake of the model's has its end or its answer."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.workflow.agent import QUESTION, CallTools, Finish, Generate, next_action, observe, refusal
from agentrl.workflow.chat.parsing import parse_text
from agentrl.workflow.config import RolloutConfig
from agentrl.workflow.envs import Env
from agentrl.workflow.plugins import find
from agentrl.workflow.trajectory import Episode, FinishReason, Message, Step, Task, ToolCall, ToolResult

ENV = Env(system_prompt="Calculate.", tools=("calculator",), rewards={"numeric_answer": 1.0})
LIMITS = RolloutConfig(max_steps=3, max_tool_calls=2)
ASKED = Message("user", "What is 6*7?")
EPISODE = Episode(Task("t", (ASKED,), "42"))
TOOLS = {"calculator": find("tools", "calculator")}


def turn(index: int, text: str, results: Sequence[str] | None = None, reason: FinishReason = "stop") -> Step:
    """A sampled turn that spells the text."""
    observed = None if results is None else tuple(ToolResult(result) for result in results)
    return Step(index, (), (1,), (2, 3), (-0.1, -0.2), reason, parse_text(text), 0, results=observed)


def call(expression: str) -> str:
    return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def after(*steps: Step) -> object:
    return next_action(replace(EPISODE, steps=steps), ENV, LIMITS)


def test_next_action_opens_with_messages_of_env() -> None:
    assert after() == Generate((Message("system", "Calculate."), ASKED))


def test_next_action_makes_calls_reads_results_then_continues() -> None:
    asked = turn(0, call("6*7"))
    assert after(asked) == CallTools(asked)
    assert after(turn(0, call("6*7"), ["42"])) == Generate((Message("tool", "42", name="calculator"),))


def test_next_action_reads_results_in_order_of_calls() -> None:
    said = after(turn(0, call("1+1") + call("2+2"), ["2", "4"]))
    assert isinstance(said, Generate)
    assert [message.content for message in said.messages] == ["2", "4"]


@pytest.mark.parametrize(
    ("step", "stop_reason"),
    [
        (turn(0, "42"), "answered"),
        (turn(0, ""), "answered"),
        (turn(0, "4", reason="length"), "max_tokens"),
        (turn(0, call("6*7"), reason="length"), "max_tokens"),
        (turn(0, '<tool_call>\n{"name": "calc'), "parse_error"),
        (replace(turn(0, call("6*7"), ["42"]), seconds=1e6), "timeout"),
    ],
)
def test_next_action_ends_episode_with_its_reason(step: Step, stop_reason: str) -> None:
    assert after(step) == Finish(stop_reason)  # type: ignore[arg-type]


def test_next_action_samples_nothing_after_max_steps() -> None:
    steps = [turn(number, call("1+1"), ["2"]) for number in range(3)]
    assert isinstance(after(*steps[:2]), Generate)
    assert after(*steps) == Finish("max_steps")


def test_next_action_continues_after_unreadable_call() -> None:
    step = turn(0, "<tool_call>\nnot json\n</tool_call>")
    (made,) = step.message.tool_calls
    told = refusal(made, 0, TOOLS, LIMITS)
    assert told is not None
    assert told.error_class == "parse_error"
    assert isinstance(after(replace(step, results=(told,))), Generate)


def read(*steps: Step, env: Env = ENV, last_turn: str = "ask") -> list[Message]:
    limits = LIMITS.model_copy(update={"last_turn": last_turn, "max_steps": 4})
    return list(observe(replace(EPISODE, steps=steps), env, limits))


def test_observe_asks_for_answer_before_last_turn_or_repeat() -> None:
    first, again, other = (turn(n, call(text), [result]) for n, (text, result) in enumerate([("6*7", "42")] * 2 + [("1", "1")]))
    result = Message("tool", "42", name="calculator")
    assert read(first) == [result]
    assert read(first, again) == [result, QUESTION], "the same call with the same result"
    assert read(first, replace(again, results=(ToolResult("43"),)))[1:] == [], "the same call with another result"
    assert read(first, replace(other, index=1)) == [Message("tool", "1", name="calculator")]
    assert read(first, replace(other, index=1), replace(again, index=2)) == [result, QUESTION], "the last turn comes"
    both = turn(1, call("6*7") + call("2+2"), ["42", "4"])
    assert QUESTION not in read(first, both), "one of the calls is new"


def test_observe_asks_nothing_if_off_or_env_answers() -> None:
    class Says(Env):
        def step(self, episode: Episode) -> tuple[Message, ...]:
            return (Message("user", "higher"),)

    steps = [turn(number, call("6*7"), ["42"]) for number in range(3)]
    assert QUESTION not in read(*steps, last_turn="plain")
    assert read(*steps, env=Says()) == [Message("user", "higher")]
    assert read(turn(0, "42")) == []


@pytest.mark.parametrize(
    ("made", "index", "error_class"),
    [
        (ToolCall("calculator", {"expression": "1"}), 0, None),
        (ToolCall("calculater", {"expression": "1"}), 0, "unknown_tool"),
        (ToolCall("calculator", {"expression": "1"}), 2, "too_many_calls"),
        (ToolCall("calculator", {"expression": "1" * 70_000}), 0, "bad_arguments"),
        (ToolCall("calculator", {"expression": ["1"] * 70_000}), 0, "bad_arguments"),
        (ToolCall("", {}, error="no valid JSON"), 0, "parse_error"),
    ],
)
def test_refusal_answers_bad_call_at_once(made: ToolCall, index: int, error_class: str | None) -> None:
    told = refusal(made, index, TOOLS, LIMITS)
    assert (told.error_class if told else None) == error_class


@given(st.text(max_size=300), st.sampled_from(["stop", "length"]))
def test_next_action_exists_for_any_text(text: str, reason: FinishReason) -> None:
    step = turn(0, text, reason=reason)
    action = after(step)
    assert isinstance(action, CallTools | Finish)
    for index, made in enumerate(step.message.tool_calls):
        refusal(made, index, TOOLS, LIMITS)


@given(st.text(alphabet='<tool_call>/{}"name:argumentscalculator [],\n0', max_size=200))
def test_refusal_answers_every_kind_of_broken_call(text: str) -> None:
    step = turn(0, f"<tool_call>{text}</tool_call>")
    assert step.message.tool_calls
    assert isinstance(after(step), CallTools | Finish)
