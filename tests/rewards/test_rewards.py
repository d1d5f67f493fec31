"""Rewards: which text is which answer, which turn is well formed, and that a broken reward is never a 0."""

import linecache
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.workflow.config import RolloutConfig
from agentrl.workflow.envs import Env, score_episode
from agentrl.workflow.errors import RewardError
from agentrl.workflow.plugins import find
from agentrl.workflow.rewards import assign_rewards, code_hash, part_sum, score, total_reward
from agentrl.workflow.rewards.numeric_answer import read_answer
from agentrl.workflow.rewards.overlong import within
from agentrl.workflow.trajectory import ROOT, Episode, FinishReason, Message, Step, StopReason, Task, ToolCall, ToolResult

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
def test_numeric_answer_accepts_these_forms(text: str) -> None:
    assert numeric(text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "", "no idea", "#### ", "72 #### none", "#### 7.2", "#### 720", "#### -72", "#### 72/1", "#### 72*1", "#### 72 + 0",
        "#### 72-5", "#### 72=72", "#### 72 x 1", "#### 72,5", "#### 72.0.1", "#### 72000000", "72 or 73",
        "#### seventy-two 72", "\\boxed{}72", "\\boxed{71}72", "#### " + "7" * 5000, "7" * 100_000, "#### \u0667\u0662",
    ],
)  # fmt: skip
def test_numeric_answer_rejects_these_forms(text: str) -> None:
    assert numeric(text) == 0.0


def test_score_episode_skips_uncounted_reward_that_cannot_score() -> None:
    answer, env = episode(turn("Paris"), reference="Paris"), Env(rewards={"numeric_answer": 1.0})
    assert score_episode(env, answer, {"numeric_answer": 0.0, "text_answer": 1.0}) == {"text_answer": 1.0}
    for weights in ({"numeric_answer": 0.5, "text_answer": 1.0}, {"numeric_answer": 0.0}):
        with pytest.raises(RewardError, match="is not one number"):  # it counts; it is not the env's
            score_episode(env if weights["numeric_answer"] else Env(), answer, weights)


@pytest.mark.parametrize(
    ("text", "reference"),
    [("#### 1,200", "1200"), ("1200", "1,200"), ("#### -$5", "-5"), ("#### $-5", "-5"), ("#### \u22125", "-5"),
     ("#### .5", "0.50"), ("0.1", "$0.10"), ("#### 1,234,567.25", "1234567.25"), ("24", "48/2 = <<48/2=24>>24\n#### 24")],
)  # fmt: skip
def test_numeric_answer_compares_all_notations_exactly(text: str, reference: str) -> None:
    assert numeric(text, reference) == 1.0


@given(
    st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "#### {}", "#### {:,}.", "so \\boxed{{{}}}", "It is {:,}."])
)
def test_numeric_answer_reads_any_integer_back(number: int, shape: str) -> None:
    assert read_answer(shape.format(number)) == Fraction(number)


@given(st.text())
def test_numeric_answer_scores_any_text(text: str) -> None:
    assert numeric(text) in (0.0, 1.0)


def test_numeric_answer_needs_final_turn_without_calls() -> None:
    numeric_answer = find("rewards", "numeric_answer")
    assert numeric_answer(episode(turn("", CALL), turn("#### 72"))) == 1.0
    assert numeric_answer(episode(turn("#### 72", CALL))) == 0.0
    assert numeric_answer(episode(turn("#### 72"), turn("#### 71"))) == 0.0
    assert numeric_answer(episode(turn("#### 72", finish="length"), stop="max_tokens")) == 0.0
    assert numeric_answer(episode()) == 0.0


def test_numeric_answer_reference_without_number_is_error() -> None:
    with pytest.raises(RewardError, match="is not one number"):
        numeric("#### 1", reference="Paris")


@pytest.mark.parametrize("text", ["#### 72", "so\n\n#### 1,200", "72", "-7.5", "$5", "50%", "  ####   $1,000.50 "])
def test_format_reward_accepts_asked_form(text: str) -> None:
    assert find("rewards", "format")(episode(turn(text))) == 1.0


@pytest.mark.parametrize(
    "text",
    ["", "It is 72.", "#### 72 clips", "#### 72\nBye", "so #### 72", "####", "#### 1,00", "<think>5 #### 72", "</think>72"],
)
def test_format_reward_rejects_other_form(text: str) -> None:
    assert find("rewards", "format")(episode(turn(text))) == 0.0


def test_format_reward_is_share_of_well_formed_turns() -> None:
    form = find("rewards", "format")
    assert form(episode()) == 0.0
    assert form(episode(turn("a", CALL), turn("#### 72"))) == 1.0
    assert form(episode(turn("a", CALL), turn("no number"))) == 0.5
    assert form(episode(turn("", CALL, UNREADABLE), turn("#### 72"))) == 0.5
    assert form(episode(turn("", CALL, finish="length"), turn("", CALL, thought="<think>"), turn("", CALL), turn("1"))) == 0.5


@given(st.lists(st.builds(turn, st.text(), finish=st.sampled_from(["stop", "length"])), max_size=4))
def test_format_reward_is_always_a_share(turns: list[Step]) -> None:
    assert 0.0 <= find("rewards", "format")(episode(*turns)) <= 1.0


def test_total_reward_is_weighted_sum_with_hook_part_at_one() -> None:
    assert total_reward({"numeric_answer": 1.0, "format": 0.5, "bonus": 0.25}, {"numeric_answer": 1.0, "format": 0.0}) == 1.25


def test_math_env_rewards_the_answer_and_well_formed_turns() -> None:
    weights = find("envs", "math").rewards
    parts = score(episode(turn("a", CALL), turn("It must be 72")), weights)
    assert parts == {"numeric_answer": 1.0, "format": 0.5}
    assert total_reward(parts, weights) == 1.05
    wrong = score(episode(turn("It must be 7")), weights), score(episode(turn("#### 7")), weights)
    assert [total_reward(each, weights) for each in wrong] == [0.0, 0.1]


@pytest.fixture
def user_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own file of rewards, importable as `user_rewards`."""
    path = tmp_path / "user_rewards.py"
    path.write_text(
        "def broken(episode): return 1 / 0\ndef endless(episode): return float('nan')\ndef half(episode): return 0.5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return path


def test_reward_exception_or_non_number_fails_episode(user_rewards: Path) -> None:
    with pytest.raises(RewardError, match="'user_rewards:broken' raised ZeroDivisionError"):
        score(episode(), {"user_rewards:broken": 1.0})
    with pytest.raises(RewardError, match="returned nan"):
        score(episode(), {"user_rewards:endless": 1.0})
    assert score(episode(), {"user_rewards:half": 1.0}) == {"user_rewards:half": 0.5}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([0.5], "returned 1 numbers, and the episode has 2 steps"),
        ([0.5, float("nan")], "returned nan at step 1"),
        ((9e29, 9e29), "whose sum is 1.8e[+]30; the largest that can be trained on is 1e[+]30"),
        ([0.5, None], "raised TypeError: a reward must be a number, not 'NoneType'"),
        ("0.5", "raised TypeError: a reward must be a number, not 'str'"),
        (-1e200, "returned -1e[+]200; the largest"),
    ],
)
def test_step_reward_needs_finite_number_for_each_step(
    given: Any, why: str, user_rewards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("user_rewards.half", lambda episode: given)
    with pytest.raises(RewardError, match=f"'user_rewards:half' .*{why}"):
        score(episode(turn("", CALL), turn("1")), {"user_rewards:half": 1.0})


def test_reward_sum_too_large_fails_episode() -> None:
    with pytest.raises(RewardError, match=r"the weighted sum of the reward parts is 2e\+30; the largest"):
        total_reward({"numeric_answer": 1.0}, {"numeric_answer": 2e30})


def test_step_reward_total_is_sum_and_each_step_earns_own() -> None:
    parts = {"whole": 2.0, "steps": (0.25, 0.5), "others": (1.0, 0.0)}
    weights = {"steps": 2.0, "others": 0.0}
    told = assign_rewards(episode(turn("", CALL), turn("1")), parts, weights)
    assert [step.reward for step in told.steps] == [0.5, 1.0]
    assert (told.rewards, told.reward) == ({"whole": 2.0, "steps": 0.75, "others": 1.0}, 3.5)


def test_step_reward_of_episode_without_steps_is_zero() -> None:
    assert score(replace(episode(), limits=RolloutConfig()), {"length": 1.0}) == {"length": 0.0}


def tokens(*counts: int, cut: bool = False) -> Episode:
    """Turns of so many tokens, the last one cut off by the limit or not, in a run of 100 tokens a turn and 4 turns."""
    made = episode(*(replace(turn(""), sampled_ids=(7,) * count) for count in counts))
    last = replace(made.steps[-1], finish_reason="length" if cut else "stop")
    return replace(made, steps=(*made.steps[:-1], last), limits=RolloutConfig(max_new_tokens=100, max_steps=4))


def test_overlong_punishes_last_fifth_like_dapo() -> None:
    overlong = find("rewards", "overlong")
    assert overlong(tokens(0, 80, 81, 90, 99, 100)) == pytest.approx((0.0, 0.0, -0.05, -0.5, -0.95, -1.0))
    assert overlong(tokens(100, 30, cut=True)) == (-1.0, -1.0)  # no matter what cut it


def test_overlong_with_own_limits_needs_no_run() -> None:
    punished = within(max_tokens=10, cache=4)
    assert punished(replace(tokens(6, 7, 8, 10, 11), limits=None)) == (0.0, -0.25, -0.5, -1.0, -1.0)
    for most, cache in ((10, 0), (10, 11)):
        with pytest.raises(ValueError, match="cache must be from 1 to the limit of a turn"):
            within(most, cache)


def test_length_costs_each_step_its_share_of_limit() -> None:
    assert score(tokens(100, 40, 0), {"length": 0.1}) == {"length": (-0.25, -0.1, 0.0)}
    assert part_sum(score(tokens(100, 100, 100, 100), {"length": 0.1})["length"]) == -1.0


@pytest.mark.parametrize("name", ["length", "overlong"])
def test_reward_that_needs_run_limits_fails_without_run(name: str) -> None:
    with pytest.raises(RewardError, match="has no run"):
        score(episode(turn("72")), {name: 1.0})


def test_reward_ignores_undelivered_turn() -> None:
    cut, whole = replace(tokens(3).steps[0], index=0, delivered=False, parent=ROOT), tokens(5).steps[0]
    again = replace(whole, index=1, chain=1, parent=ROOT)
    broken = replace(tokens(5), steps=(cut, again))
    parts = score(broken, {"length": 1.0, "format": 1.0})
    calm = score(tokens(5), {"length": 1.0, "format": 1.0})
    assert parts == {"length": (0.0, *calm["length"]), "format": calm["format"]}  # type: ignore[misc]


def test_tool_use_is_share_of_answered_calls() -> None:
    tool_use = find("rewards", "tool_use")
    good, bad = ToolResult("2"), ToolResult("no", "tool_error")
    assert tool_use(episode(turn("72"))) == 0.0
    both = replace(turn("", CALL, CALL), results=(good, bad))
    assert tool_use(episode(both, turn("72"))) == 0.5
    assert tool_use(episode(both, replace(turn("", CALL), results=(good,)), turn("72"))) == pytest.approx(2 / 3)
    assert tool_use(episode(both, turn("", UNREADABLE), stop="parse_error")) == pytest.approx(1 / 3)  # it was never run


def test_code_hash_covers_file_that_customises_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    hashes = set()
    for most in (10, 200):
        (tmp_path / "mine.py").write_text(f"from agentrl.workflow.rewards.overlong import within\nbrief = within({most}, 5)\n")
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        linecache.clearcache()
        hashes.add(code_hash({"mine:brief": 1.0}))
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ('"""Another text."""\n\n# why\ndef brief(episode):\n    """And here."""\n    return (1.0)\n', True),
        ("def brief(episode):\n    return 0.5\n", False),
        ('def brief(episode):\n    return 1.0 if "a" else "b"\n', False),
    ],
)
def test_code_hash_ignores_comments_and_docstrings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, same: bool
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    hashes = []
    for source in ("def brief(episode):\n    return 1.0\n", text):
        (tmp_path / "mine.py").write_text(source)
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        linecache.clearcache()
        hashes.append(code_hash({"mine:brief": 1.0}))
    assert (hashes[0] == hashes[1]) is same


def test_code_hash_changes_with_weights_and_code() -> None:
    first = code_hash({"numeric_answer": 1.0})
    assert first == code_hash({"numeric_answer": 1.0})
    assert len({first, code_hash({"numeric_answer": 0.5}), code_hash({"format": 1.0})}) == 3
