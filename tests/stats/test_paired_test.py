"""paired: the mean difference over shared tasks, and a sign-flip test that is what counting all worlds by hand gives."""

import math
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.workflow.stats import paired_test as module
from agentrl.workflow.stats.paired_test import SAME_TOLERANCE, compare_paired, sign_flip

quarters = st.integers(-4, 4).map(lambda count: count / 4)


def enumerated_p_value(differences: list[float]) -> float:
    """The p-value as the module defines it, in whole numbers, from every world one by one."""
    steps = [round(difference / SAME_TOLERANCE) for difference in differences]
    least = abs(sum(steps)) - len(steps)  # a mean that is closer than one step counts as equal
    worlds = [
        abs(sum(sign * step for sign, step in zip(signs, steps, strict=True))) for signs in product((1, -1), repeat=len(steps))
    ]
    return sum(total >= least for total in worlds) / len(worlds)


@given(st.lists(quarters | st.floats(-1, 1), min_size=1, max_size=8))
@example([0.25, 1e-8])  # two worlds whose means differ by more than the tolerance, but not by much
@example([0.25, 1e-10])  # two worlds whose means differ by less
def test_sign_flip_equals_enumeration(differences: list[float]) -> None:
    p_value, method = sign_flip(differences)
    assert (p_value, method) == (pytest.approx(enumerated_p_value(differences)), "exact")


@pytest.mark.parametrize(("second", "p_value"), [(1e-8, 0.5), (1e-9, 1.0), (1e-10, 1.0)])
def test_sign_flip_counts_means_within_the_tolerance_as_equal(second: float, p_value: float) -> None:
    assert sign_flip([0.25, second]) == (p_value, "exact")


def test_sign_flip_of_ten_wins_equals_sign_test() -> None:
    found = compare_paired(dict.fromkeys(range(30), 0.0), {task: float(task < 10) for task in range(30)})
    assert (found.won, found.lost, found.tied) == (10, 0, 20)
    assert found.p_value == pytest.approx(2 / 2**10)
    assert (found.first, found.second, found.difference) == (0.0, pytest.approx(1 / 3), pytest.approx(1 / 3))
    margin = 2.0452296 * math.sqrt((10 / 30) * (20 / 30) / 29)
    assert (found.low, found.high) == (pytest.approx(1 / 3 - margin), pytest.approx(1 / 3 + margin))


def test_compare_paired_interval_agrees_with_p_value() -> None:
    found = compare_paired(dict.fromkeys(range(5), 0.0), dict(enumerate([0.0, 0.25, 0.25, 0.3125, 0.75])))
    assert (found.difference, found.p_value) == (0.3125, 0.125)
    assert found.low < 0.0 < found.high


def test_compare_paired_of_one_task_has_no_bounds() -> None:
    found = compare_paired({1: 0.0}, {1: 1.0})
    assert (found.low, found.difference, found.high, found.p_value) == (-math.inf, 1.0, math.inf, 1.0)


def test_sign_flip_of_a_thousand_binary_tasks_is_exact() -> None:
    p_value, method = sign_flip([1.0] * 560 + [-1.0] * 440)
    assert method == "exact"
    assert p_value == pytest.approx(2 * sum(math.comb(1000, k) for k in range(560, 1001)) / 2**1000)


def test_sign_flip_by_draws_approximates_exact_repeatably(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = [(i % 7 - 2.5) / 5 for i in range(60)]
    exact, counted_all = sign_flip(differences)
    monkeypatch.setattr(module, "MAX_STEPS", 0)
    drawn, method = sign_flip(differences, seed=3)
    assert (counted_all, method) == ("exact", "drawn")
    assert drawn == pytest.approx(exact, abs=0.02)
    assert sign_flip(differences, seed=3)[0] == drawn
    assert sign_flip(differences, seed=4)[0] != drawn


def test_sign_flip_draws_fewer_worlds_of_many_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DRAWN", 30_000)
    differences = [number / 3001 for number in range(1, 3001)]
    assert sign_flip(differences) == (pytest.approx(1 / 11), "drawn")


@given(st.lists(st.tuples(quarters, quarters), min_size=1, max_size=12))
def test_compare_paired_exchanged_changes_only_sign(pairs: list[tuple[float, float]]) -> None:
    a, b = (dict(enumerate(side)) for side in zip(*pairs, strict=True))
    forth, back = compare_paired(a, b), compare_paired(b, a)
    assert forth.difference == pytest.approx(-back.difference)
    assert forth.p_value == pytest.approx(back.p_value)
    assert (forth.won, forth.lost, forth.tied) == (back.lost, back.won, back.tied)
    assert forth.low <= forth.difference <= forth.high


def test_compare_paired_ignores_unshared_tasks() -> None:
    found = compare_paired({1: 1.0, 2: 0.0}, {2: 0.0, 3: 1.0})
    assert (found.tasks, found.tied, found.p_value) == (1, 1, 1.0)
    assert math.isnan(compare_paired({1: 1.0}, {3: 1.0}).p_value)
