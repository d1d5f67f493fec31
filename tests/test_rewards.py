"""Rewards: which text is which answer, which turn is well formed, and that a broken reward is never a 0."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workflow.errors import RewardError
from workflow.plugins import find
from workflow.rewards import code_hash, score, total
from workflow.rewards.numeric_answer import read_answer
from workflow.trajectory import Episode, FinishReason, Message, Step, StopReason, Task, ToolCall

CALL = ToolCall("calculator", {"expression": "1+1"})
UNREADABLE = ToolCall("", {}, error="not JSON")


def turn(content: str, *calls: ToolCall, thought: str = "", finish: FinishReason = "stop") -> Step:
    """One policy turn."""
    return Step(0, (), (), (), (), finish, Message("assistant", content, thought, calls), 0)


def episode(*turns: Step, reference: str = "72", stop: StopReason = "answered") -> Episode:
    """A finished episode of these turns."""
    steps = tuple(replace(step, index=index) for index, step in enumerate(turns))
    return Episode(Task("t", (Message("user", "?"),), reference), steps=steps, status="done", stop_reason=stop)


def numeric(answer: str, reference: str = "72") -> float:
    """numeric_answer of one final turn."""
    return score(episode(turn(answer), reference=reference), {"numeric_answer": 1.0})["numeric_answer"]


@pytest.mark.parametrize(
    "text",
    [
        "#### 72", "####72", "#### 72.", "#### $72.00", "#### \\$72", "#### 72%", "#### **72**", "#### 72 clips", "#### +72",
        "Not 5 but\n#### 71\n#### 72", "#### 72 - and no more", "\\boxed{72}", "\\boxed{5} or \\boxed{72\\text{ clips}}",
        "72", "It is 72.", "48 + 24 = 72", "**Answer**: $72", "100-72", "(1)72",
    ],
)  # fmt: skip
def test_these_say_72(text: str) -> None:
    assert numeric(text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "", "no idea", "#### ", "72 #### none", "#### 7.2", "#### 720", "#### -72", "#### 72/1", "#### 72*1", "#### 72 + 0",
        "#### 72-5", "#### 72=72", "#### 72 x 1", "#### 72,5", "#### 72.0.1", "#### 72000000", "72 or 73",
        "#### seventy-two 72", "\\boxed{}72", "\\boxed{71}72", "#### " + "7" * 5000, "7" * 100_000, "#### \u0667\u0662",
    ],
)  # fmt: skip
def test_these_do_not_say_72(text: str) -> None:
    assert numeric(text) == 0.0


@pytest.mark.parametrize(
    ("text", "reference"),
    [("#### 1,200", "1200"), ("1200", "1,200"), ("#### -$5", "-5"), ("#### $-5", "-5"), ("#### \u22125", "-5"),
     ("#### .5", "0.50"), ("0.1", "$0.10"), ("#### 1,234,567.25", "1234567.25"), ("24", "48/2 = <<48/2=24>>24\n#### 24")],
)  # fmt: skip
def test_numbers_are_compared_exactly_however_they_are_written(text: str, reference: str) -> None:
    assert numeric(text, reference) == 1.0


@settings(deadline=None)
@given(
    st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "#### {}", "#### {:,}.", "so \\boxed{{{}}}", "It is {:,}."])
)
def test_any_whole_number_is_read_back(number: int, shape: str) -> None:
    assert read_answer(shape.format(number)) == Fraction(number)


@settings(deadline=None)
@given(st.text())
def test_no_text_of_the_model_breaks_the_reward(text: str) -> None:
    assert numeric(text) in (0.0, 1.0)


def test_only_a_last_turn_that_ended_by_itself_and_called_nothing_is_an_answer() -> None:
    numeric_answer = find("rewards", "numeric_answer")
    assert numeric_answer(episode(turn("", CALL), turn("#### 72"))) == 1.0
    assert numeric_answer(episode(turn("#### 72", CALL))) == 0.0
    assert numeric_answer(episode(turn("#### 72"), turn("#### 71"))) == 0.0
    assert numeric_answer(episode(turn("#### 72", finish="length"), stop="max_tokens")) == 0.0
    assert numeric_answer(episode()) == 0.0


def test_a_reference_without_a_number_fails_the_episode_loudly() -> None:
    with pytest.raises(RewardError, match="holds no number"):
        numeric("#### 1", reference="Paris")


@pytest.mark.parametrize("text", ["#### 72", "so\n\n#### 1,200", "72", "-7.5", "$5", "50%", "  ####   $1,000.50 "])
def test_a_final_turn_in_the_asked_form_is_well_formed(text: str) -> None:
    assert find("rewards", "format")(episode(turn(text))) == 1.0


@pytest.mark.parametrize(
    "text",
    ["", "It is 72.", "#### 72 clips", "#### 72\nBye", "so #### 72", "####", "#### 1,00", "<think>5 #### 72", "</think>72"],
)
def test_a_final_turn_in_another_form_is_not(text: str) -> None:
    assert find("rewards", "format")(episode(turn(text))) == 0.0


def test_format_is_the_share_of_well_formed_turns() -> None:
    form = find("rewards", "format")
    assert form(episode()) == 0.0
    assert form(episode(turn("a", CALL), turn("#### 72"))) == 1.0
    assert form(episode(turn("a", CALL), turn("no number"))) == 0.5
    assert form(episode(turn("", CALL, UNREADABLE), turn("#### 72"))) == 0.5
    assert form(episode(turn("", CALL, finish="length"), turn("", CALL, thought="<think>"), turn("", CALL), turn("1"))) == 0.5


@settings(deadline=None)
@given(st.lists(st.builds(turn, st.text(), finish=st.sampled_from(["stop", "length"])), max_size=4))
def test_format_is_always_a_share(turns: list[Step]) -> None:
    assert 0.0 <= find("rewards", "format")(episode(*turns)) <= 1.0


def test_the_scalar_is_the_weighted_sum_and_a_hooks_part_counts_one() -> None:
    assert total({"numeric_answer": 1.0, "format": 0.5, "bonus": 0.25}, {"numeric_answer": 1.0, "format": 0.0}) == 1.25


def test_the_math_env_rewards_the_final_answer_alone_and_records_the_form() -> None:
    weights = find("envs", "math").rewards
    parts = score(episode(turn("a", CALL), turn("It must be 72")), weights)
    assert parts == {"numeric_answer": 1.0, "format": 0.5}
    assert total(parts, weights) == 1.0


@pytest.fixture
def user_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own file of rewards, importable as `user_rewards`."""
    path = tmp_path / "user_rewards.py"
    path.write_text(
        "def broken(episode): return 1 / 0\ndef endless(episode): return float('nan')\ndef half(episode): return 0.5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return path


def test_a_reward_that_raises_or_is_no_number_fails_the_episode(user_rewards: Path) -> None:
    with pytest.raises(RewardError, match="'user_rewards:broken' raised ZeroDivisionError"):
        score(episode(), {"user_rewards:broken": 1.0})
    with pytest.raises(RewardError, match="returned nan"):
        score(episode(), {"user_rewards:endless": 1.0})
    assert score(episode(), {"user_rewards:half": 1.0}) == {"user_rewards:half": 0.5}


def test_the_code_hash_changes_with_the_weights_and_the_code() -> None:
    first = code_hash({"numeric_answer": 1.0})
    assert first == code_hash({"numeric_answer": 1.0})
    assert len({first, code_hash({"numeric_answer": 0.5}), code_hash({"format": 1.0})}) == 3
