"""What `make learn` makes of its runs: kept between calls, summed up, judged."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.learning.curves import WINDOW, Curve, crossing, failures, load, remark, save, summed_up, table
from bench.learning.learn_algorithms import RECIPES, typed
from bench.learning.learn_examples import COMMANDS, EXAMPLES, FOLDER, PAGE


def climbing(algorithm: str, seed: int = 0, *, at: int = 40, end: float = 0.95, iterations: int = 96) -> Curve:
    """Half right until one iteration before `at`, and `end` from there on."""
    rewards = tuple(0.5 if iteration < at else end for iteration in range(1, iterations + 1))
    return Curve(algorithm, seed, "--epochs 3", "0123456789ab", rewards, tuple(1.0 + seed for _ in rewards))


def test_learn_runs_are_stored_and_loaded(tmp_path: Path) -> None:
    file = tmp_path / "learn.json"
    curves = [climbing("grpo"), climbing("grpo", 1), climbing("ppo", 1, at=50)]
    assert load(file) == []
    save(file, curves[::-1])
    assert load(file) == curves
    rows = json.loads(file.read_text())
    assert len(rows) == 3 * 96
    first = {key: rows[0][key] for key in ("algorithm", "seed", "iteration", "reward")}
    assert first == {"algorithm": "grpo", "seed": 0, "iteration": 1, "reward": 0.5}


def test_learn_crossing_needs_full_window_at_goal() -> None:
    assert crossing([0.9] * WINDOW) == WINDOW
    assert crossing([0.9] * (WINDOW - 1)) is None
    assert crossing([0.5] * 10 + [1.0] * 3 + [0.5] * 10) is None
    assert crossing([0.5] * 10 + [1.0] * 10) == 14  # 0.5 and four times 1


def test_learn_summary_puts_best_first() -> None:
    worse, better = summed_up([climbing("rloo", end=0.8), climbing("grpo"), climbing("grpo", 1, at=60, end=0.99)])[::-1]
    assert (worse.algorithm, better.algorithm) == ("rloo", "grpo")
    assert better.last == pytest.approx(0.97)
    assert better.ends == pytest.approx((0.95, 0.99))
    assert (better.crossings, better.crossed, worse.crossed) == ((44, 64), 63, None)
    assert (better.low[-1], better.mean[-1], better.high[-1]) == pytest.approx((0.95, 0.97, 0.99))
    assert better.seconds == 1.5
    assert "| grpo | 0.970 (0.950 to 0.990) | 63 (44, 64) | 1.50 |  |" in table([better, worse])


@pytest.mark.parametrize(
    ("curves", "wrong"),
    [
        ([climbing("grpo", at=40), climbing("ppo", at=80)], []),
        ([climbing("rloo", end=0.1)], []),
        ([climbing("grpo", end=0.89)], ["grpo's last 5 iterations average 0.890, less than 0.9"]),
        (
            [climbing("grpo", at=40), climbing("ppo", at=90)],
            ["ppo crosses 0.9 at 94, not within twice grpo's 44 iterations"],
        ),
        (
            [climbing("grpo", at=40), climbing("ppo", end=0.6)],
            ["ppo crosses 0.9 at never, not within twice grpo's 44 iterations"],
        ),
    ],
)  # fmt: skip
def test_learn_failures_name_broken_promises(curves: list[Curve], wrong: list[str]) -> None:
    assert failures(summed_up(curves)) == wrong


def test_learn_remark_names_low_or_falling_run() -> None:
    fell = replace(climbing("grpo"), rewards=(*[0.5] * 40, *[0.9] * 40, *[0.2] * 16))
    assert remark(summed_up([fell])[0]) == "fell from 0.90"
    assert remark(summed_up([climbing("grpo", end=0.65)])[0]) == "stays below 0.9: see its file"
    assert remark(summed_up([climbing("grpo")])[0]) == ""


def test_learn_command_ends_with_options_of_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert typed("ppo").endswith("--algorithm ppo")
    monkeypatch.setitem(RECIPES, "ppo", {"update.learning_rate": 5e-5, "critic.warmup": 2})
    assert typed("ppo").endswith("--algorithm ppo -s update.learning_rate=5e-05 -s critic.warmup=2")


def test_example_commands_have_page_result_and_small_picture() -> None:
    for name, command in COMMANDS.items():
        page = " ".join((EXAMPLES / name / "README.md").read_text().replace("\\\n", "").split())
        assert command in page or name == "notebook", name
        result = json.loads((FOLDER / f"{name}.json").read_text())
        assert (result["typed"], result["iterations"]) == (command, len(result["rewards"]))
        assert (FOLDER / f"{name}.svg").exists()
        assert result["held_out"]["after"]["low"] > result["held_out"]["before"]["mean"], f"{name} does not learn"
        assert f"examples/{name}.svg" in PAGE.read_text()
    assert sum(file.stat().st_size for file in FOLDER.glob("*.svg")) < 200_000
