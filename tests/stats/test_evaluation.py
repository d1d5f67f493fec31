"""evaluate: the mean is over tasks, its interval comes from their spread, errors are counted apart; what is right."""

import math
import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.workflow.stats.evaluation import (
    bounds,
    effective_trials,
    evaluate,
    interval,
    is_right,
    pass_at,
    student_quantile,
    wilson_interval,
)
from agentrl.workflow.trajectory import Episode, Group, Status, Task


def group(*rewards: float | None) -> Group:
    """One task's episodes; None is one that the system failed."""
    task = Task(str(id(rewards)), (), "")
    ends: list[tuple[Status, float | None]] = [("infra_error" if r is None else "done", r) for r in rewards]
    return Group(task, tuple(Episode(task, number, status=s, reward=r) for number, (s, r) in enumerate(ends)))


def test_evaluate_counts_errors_apart_from_mean() -> None:
    score = evaluate([group(1.0, None), group(0.0, 1.0), group(None)])
    assert (score.mean, score.episodes, score.errors) == (0.75, 3, 2)


def test_evaluate_interval_is_of_mean_of_independent_tasks() -> None:
    score = evaluate([group(1.0)] * 60 + [group(-0.5)] * 40)
    margin = 1.984217 * 1.5 * math.sqrt(0.6 * 0.4 / 99)
    assert (score.low, score.high) == (pytest.approx(0.4 - margin), pytest.approx(0.4 + margin))
    assert score.interval_by == "Student"


@pytest.mark.parametrize(
    ("right", "tasks", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_evaluate_interval_of_share_equals_newcombe(right: int, tasks: int, low: float, high: float) -> None:
    """Newcombe 1998, Two-sided confidence intervals for the single proportion: comparison of seven methods, table I."""
    score = evaluate([group(1.0)] * right + [group(0.0)] * (tasks - right))
    assert (score.low, score.high) == (pytest.approx(low, abs=0.6e-4), pytest.approx(high, abs=0.6e-4))
    assert score.interval_by == "Wilson"
    mirrored = evaluate([group(0.0)] * right + [group(1.0)] * (tasks - right))
    assert (mirrored.low, mirrored.high) == (pytest.approx(1 - score.high), pytest.approx(1 - score.low))


def test_evaluate_two_of_four_is_a_share() -> None:
    score = evaluate([group(1.0), group(0.0), group(0.0), group(1.0)])
    assert (score.low, score.high) == (pytest.approx(0.15, abs=5e-4), pytest.approx(0.85, abs=5e-4))


counts = st.integers(1, 8).flatmap(lambda size: st.tuples(st.integers(0, size), st.just(size)))


def shares(tasks: Sequence[tuple[int, int]]) -> list[Group]:
    """Of each task so many episodes right of so many."""
    return [group(*[1.0] * right, *[0.0] * (size - right)) for right, size in tasks]


@given(st.lists(counts, min_size=1, max_size=30))
def test_evaluate_interval_of_share_is_within_0_and_1(
    tasks: list[tuple[int, int]],
) -> None:
    score = evaluate(shares(tasks))
    assert 0.0 <= score.low <= score.mean <= score.high <= 1.0
    assert score.interval_by == "Wilson"
    widest, narrowest = wilson_interval(score.mean, len(tasks)), wilson_interval(score.mean, sum(size for _, size in tasks))
    assert widest[0] - 1e-9 <= score.low <= narrowest[0] + 1e-9
    assert narrowest[1] - 1e-9 <= score.high <= widest[1] + 1e-9
    again = evaluate(shares(tasks * 4))
    assert again.high - again.low < score.high - score.low


@given(st.floats(0, 1), st.floats(1, 1e9), st.floats(1, 1e9))
def test_evaluate_wilson_interval_narrows_with_trials(share: float, some: float, more: float) -> None:
    narrow, wide = wilson_interval(share, max(some, more)), wilson_interval(share, min(some, more))
    assert 0.0 <= wide[0] <= narrow[0] + 1e-12 <= share + 2e-12
    assert share - 2e-12 <= narrow[1] - 1e-12 <= wide[1] <= 1.0


def test_effective_trials_exceed_tasks_if_episodes_vary_within() -> None:
    alike, unlike = [0.5, 0.25, 0.75, 0.5] * 25, [1.0, 0.0, 1.0, 0.0] * 25
    assert effective_trials(alike, [4] * 100) == 400
    assert effective_trials(unlike, [4] * 100) == 100
    assert effective_trials([0.5] * 100, [4] * 100) == 100  # of the spread nothing is known
    between = effective_trials([0.75, 0.25, 1.0, 0.0] * 25, [4] * 100)
    assert between == pytest.approx(0.25 / (0.15625 / 99) * (1.959964 / 1.984217) ** 2)
    assert effective_trials([1.0, 0.5, 0.0], [1, 2, 1]) == 3


@pytest.mark.parametrize("likeness", [0.0, 0.3, 1.0])
def test_evaluate_interval_of_share_covers_95_percent(likeness: float) -> None:
    draw, held, worlds = random.Random(1), 0, 2000
    for _ in range(worlds):
        tasks = []
        for _ in range(12):
            common = draw.random() < 0.7
            tasks.append((sum(common if draw.random() < likeness else draw.random() < 0.7 for _ in range(4)), 4))
        _, low, high, _ = bounds([[1.0] * right + [0.0] * (size - right) for right, size in tasks])
        held += low <= 0.7 <= high
    assert held / worlds > 0.93


def test_evaluate_interval_of_few_tasks_is_students() -> None:
    slept = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]  # hours more: Student 1908, Illustration I
    mean, margin = interval(slept)
    assert (mean, margin) == (pytest.approx(0.75), pytest.approx(1.279780))


def test_evaluate_one_task_is_unbounded_and_equal_tasks_exact() -> None:
    score = evaluate([group(0.75, 0.25)])
    assert (score.low, score.mean, score.high) == (-math.inf, 0.5, math.inf)
    share = evaluate([group(1.0, 0.0)])
    assert (
        (share.low, share.high) == wilson_interval(0.5, 1) == (pytest.approx(0.0546, abs=1e-4), pytest.approx(0.9454, abs=1e-4))
    )
    assert interval([0.5] * 5) == (0.5, 0.0)


PUBLISHED = {
    1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 6: 2.4469, 7: 2.3646, 8: 2.3060, 9: 2.2622, 10: 2.2281, 11: 2.2010,
    12: 2.1788, 13: 2.1604, 14: 2.1448, 15: 2.1314, 20: 2.0860, 25: 2.0595, 29: 2.0452, 30: 2.0423, 40: 2.0211, 60: 2.0003,
    100: 1.9840, 120: 1.9799, 10**9: 1.9600,
}  # fmt: skip


@pytest.mark.parametrize(("freedom", "quantile"), PUBLISHED.items())
def test_student_quantile_equals_published_table(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, abs=0.6e-4)  # of it half a digit is their rounding


def test_student_quantile_falls_with_degrees_of_freedom() -> None:
    found = [student_quantile(freedom) for freedom in range(1, 3000)]
    assert all(more > fewer > 1.96 for more, fewer in pairwise(found))


def test_evaluate_many_episodes_of_one_task_are_one_task() -> None:
    once = evaluate([group(1.0), group(0.0)])
    often = evaluate([group(*[1.0] * 50), group(*[0.0] * 50)])
    assert (once.low, once.high) == (often.low, often.high)


def test_evaluate_without_finished_episode_has_no_mean() -> None:
    score = evaluate([group(None)])
    assert math.isnan(score.mean)
    assert score.errors == 1


@given(st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=4), min_size=1, max_size=20))
def test_evaluate_interval_holds_mean_in_any_order(rewards: list[list[float]]) -> None:
    groups = [group(*values) for values in rewards]
    score = evaluate(groups)
    assert score.low <= score.mean <= score.high
    assert evaluate(groups[::-1]).mean == pytest.approx(score.mean)


def numbered(*tasks: Sequence[float | None]) -> tuple[list[Group], set[int]]:
    """Groups whose episodes have ids of their own, and the ids of those with reward 1."""
    groups, ids = [], iter(range(1, 1000))
    for rewards in tasks:
        made = group(*rewards)
        episodes = [Episode(e.task, e.sample, status=e.status, reward=e.reward, id=next(ids)) for e in made.episodes]
        groups.append(Group(made.task, tuple(episodes)))
    return groups, {e.id for made in groups for e in made.episodes if e.reward == 1}


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_share_of_draws_with_right_one(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(combinations(range(n), k))
    assert pass_at(n, c, k) == pytest.approx(sum(min(draw) < c for draw in draws) / len(draws))


def test_accuracy_is_pass_at_1_and_k_ends_at_group_size() -> None:
    groups, right = numbered([1.0, 0.5, 0.0, 0.0, 0.0, 0.0], [1.0] * 6, [0.0] * 6)
    score = evaluate(groups, right)
    assert score.accuracy == pytest.approx((1 / 6 + 1 + 0) / 3)
    assert score.pass_at == {
        1: pytest.approx(7 / 18),
        2: pytest.approx((1 / 3 + 1) / 3),
        4: pytest.approx((2 / 3 + 1) / 3),
        6: pytest.approx(2 / 3),
    }


def test_pass_at_k_counts_tasks_with_k_done_episodes() -> None:
    groups, right = numbered([1.0, None], [0.0, 1.0], [None, None])
    score = evaluate(groups, right)
    assert (score.tasks, score.errors) == (2, 3)
    assert score.pass_at == {1: pytest.approx(0.75), 2: 1.0}


def test_accuracy_is_missing_without_correctness() -> None:
    score = evaluate([group(1.0)])
    assert (score.accuracy, score.pass_at) == (None, {})


@pytest.mark.parametrize(
    ("parts", "weights", "correct", "right"),
    [
        ({"numeric_answer": 1.0, "format": 0.5}, {"numeric_answer": 1.0, "format": 0.1}, (), True),
        ({"numeric_answer": 0.0, "format": 1.0}, {"numeric_answer": 1.0, "format": 0.1}, (), False),
        ({"tests_passed": 0.999, "progress": 1.0}, {"tests_passed": 1.0, "progress": 0.1}, (), False),
        ({"tests_passed": 1 - 1e-12, "progress": 0.0}, {"tests_passed": 1.0, "progress": 0.1}, (), True),
        ({"echoed": 1.0, "text_answer": 0.0}, {"echoed": 0.5, "text_answer": 0.5}, (), False),
        ({"echoed": 1.0, "text_answer": 1.0}, {"echoed": 0.5, "text_answer": 0.5}, (), True),
        ({"numeric_answer": 1.0, "luck": 0.0}, {"numeric_answer": 1.0}, (), True),  # a hook's part beside a whole one
        ({"numeric_answer": 1.0, "overlong": -1.0}, {"numeric_answer": 0.5}, (), True),  # a run's penalty beside half a one
        ({"speed": 1.0, "answer": 0.0}, {"speed": 2.0, "answer": 1.0}, ("answer",), False),
        ({"speed": 0.0, "answer": 1.0}, {"speed": 2.0, "answer": 1.0}, ("answer",), True),
        ({"format": 1.0}, {"format": 0.0}, (), None),
        ({}, {"format": 0.0}, (), None),
        ({}, {}, (), None),
    ],
)  # fmt: skip
def test_correctness_needs_full_value_of_correct_part(
    parts: dict[str, float], weights: dict[str, float], correct: tuple[str, ...], right: bool | None
) -> None:
    assert is_right(parts, weights, correct) is right


@pytest.mark.parametrize(
    ("parts", "weights", "right"),
    [
        ({"format": 1.0, "guessed": 0.5}, {"format": 0.1}, False),
        ({"format": 0.0, "guessed": 1.0, "luck": 0.0}, {"format": 0.1}, True),
        ({"numeric_answer": 1.0, "guessed": 0.5}, {"numeric_answer": 1.0, "format": 0.1}, False),
        ({"numeric_answer": 0.0, "guessed": 1.0}, {"numeric_answer": 1.0}, False),
        ({"numeric_answer": 1.0, "guessed": 1.0, "format": 0.0}, {"numeric_answer": 1.0, "format": 0.1}, True),
        ({"numeric_answer": 1.0, "guessed": 0.5}, {"numeric_answer": 2.0}, True),
    ],
)
def test_correctness_takes_env_part_if_none_is_heavier(parts: dict[str, float], weights: dict[str, float], right: bool) -> None:
    assert is_right(parts, weights, (), {"guessed"}) is right
