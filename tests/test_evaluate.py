"""evaluate: the mean is over tasks, its interval comes from their spread, and errors are counted, never scored."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflow.evaluate import evaluate
from workflow.trajectory import Episode, Group, Status, Task


def group(*rewards: float | None) -> Group:
    """One task's episodes; None is one that the system failed."""
    task = Task(str(id(rewards)), (), "")
    ends: list[tuple[Status, float | None]] = [("infra_error" if r is None else "done", r) for r in rewards]
    return Group(task, tuple(Episode(task, number, status=s, reward=r) for number, (s, r) in enumerate(ends)))


def test_errors_are_counted_apart_and_do_not_lower_the_mean() -> None:
    score = evaluate([group(1.0, None), group(0.0, 1.0), group(None)])
    assert (score.mean, score.episodes, score.errors) == (0.75, 3, 2)


def test_the_interval_is_that_of_a_mean_of_independent_tasks() -> None:
    score = evaluate([group(1.0)] * 60 + [group(0.0)] * 40)
    margin = 1.959964 * math.sqrt(0.6 * 0.4 / 99)
    assert (score.low, score.high) == (pytest.approx(0.6 - margin), pytest.approx(0.6 + margin))


def test_many_episodes_of_one_task_are_not_many_tasks() -> None:
    once = evaluate([group(1.0), group(0.0)])
    often = evaluate([group(*[1.0] * 50), group(*[0.0] * 50)])
    assert (once.low, once.high) == (often.low, often.high)


def test_without_one_finished_episode_there_is_no_mean() -> None:
    score = evaluate([group(None)])
    assert math.isnan(score.mean)
    assert score.errors == 1


@given(st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=4), min_size=1, max_size=20))
def test_the_interval_holds_the_mean_and_the_order_of_tasks_changes_nothing(rewards: list[list[float]]) -> None:
    groups = [group(*values) for values in rewards]
    score = evaluate(groups)
    assert score.low <= score.mean <= score.high
    assert evaluate(groups[::-1]).mean == pytest.approx(score.mean)
