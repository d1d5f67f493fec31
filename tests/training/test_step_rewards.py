"""What single steps earn: its rows, who reads them, and a run's own rewards beside its env's."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from agentrl.cli.main import main
from agentrl.workers.jobs.episode_loop import GroupRollout
from agentrl.workers.jobs.rollout import _check_code
from agentrl.workers.requests.rescoring import rescore
from agentrl.workers.requests.stored_groups import prepare_stored
from agentrl.workers.requests.submit import prepare
from agentrl.workflow.config import build
from agentrl.workflow.envs import Env
from agentrl.workflow.errors import ConfigError, RewardError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.hooks import Hook
from agentrl.workflow.resolve import resolve
from agentrl.workflow.store import planning, reward_sets, steps
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.forks import Fork
from agentrl.workflow.store.reads import episode_rows
from agentrl.workflow.store.reads.provenance import find_origin
from agentrl.workflow.store.train_claims import IterationWork
from agentrl.workflow.trajectory import Episode, Message
from tests.data.test_datasets import write
from tests.support.played_runs import CALL, answered, claim, claim_training, finish, sampled, start, submission, value, values
from tests.support.scripted_engine import ScriptedEngine
from tests.support.small_models import chat, tiny_random
from tests.workers.test_workers import in_memory as in_memory

HERE = __name__
PARTS = {"numeric_answer": 1.0, "format": (0.25, 0.5)}


def played(db: Database, parts: Mapping[str, Any] = PARTS) -> IterationWork:
    """An iteration of one group, whose first episode has two steps and earned those parts; claimed for training."""
    wanted = submission(tasks=1)
    (group,) = start(db, replace(wanted, weights={"numeric_answer": 1.0, "format": 2.0}))
    work = claim(db, group)
    steps.commit_sampled(db, work.fence, [sampled(work, calls=(CALL,)), sampled(work, position=1)])
    steps.commit_observed(db, work.fence, [(work.episodes[0].id, replace(sampled(work).step, results=(answered(),)))])
    steps.commit_sampled(db, work.fence, [sampled(work, index=1)])
    finish(db, work, 0, 2.5, parts)
    ended = finish(db, work, 1, 0.0)
    assert ended.iteration is not None
    return claim_training(db, ended.iteration)


def rows(db: Database, episode: int = 1) -> list[tuple[str, int | None, float]]:
    """Part, step and value of the episode's rewards."""
    return [(row["part"], row["step"], row["value"]) for row in episode_rows.find_episode(db, episode).rewards]


def earnings(work: IterationWork) -> list[tuple[float | None, list[float]]]:
    """Of each episode the reward, and what its steps earned of it."""
    return [(episode.reward, [step.reward for step in episode.steps]) for group in work.groups for episode in group.episodes]


# --- the rows -----------------------------------------------------------------------------------------------------------------


def test_step_reward_has_its_row_and_reaches_training(database: Database) -> None:
    work = played(database)
    assert rows(database) == [("numeric_answer", None, 1.0), ("format", 0, 0.25), ("format", 1, 0.5)]
    assert earnings(work) == [(2.5, [0.5, 1.0]), (0.0, [0.0])]
    assert find_origin(database, 1).reward_sets["default"].parts == PARTS


def test_step_reward_part_is_unique(database: Database) -> None:
    played(database)
    again = text("INSERT INTO rewards (reward_set_id, episode_id, part, step, value, weight, run) SELECT reward_set_id, "
                 "episode_id, part, step, value, weight, run FROM rewards WHERE episode_id = 1 AND part = :part")  # fmt: skip
    for part in PARTS:
        with pytest.raises(IntegrityError), database.engine.begin() as tx:
            tx.execute(again, {"part": part})


def test_rescored_step_rewards_train_in_place_of_first(database: Database) -> None:
    played(database)
    weights = {"length": 8.0, f"{HERE}:second": 1.0}
    told = rescore(database, "first", [f"{name}={weight}" for name, weight in weights.items()], "other")
    assert [part["mean"] for part in told["parts"]] == [-(4 + 2) / 1024 / 2, 0.5]
    assert rescore(database, "first", [f"{name}={weight}" for name, weight in weights.items()], "other") == told
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE runs SET reward_set = 'other'"))
        tx.execute(text("UPDATE iterations SET lease_until = NULL"))
    work = claim_training(database, 1)
    assert earnings(work) == [(1 - 32 / 1024, [-16 / 1024, -16 / 1024 + 1]), (-16 / 1024, [-16 / 1024])]


def second(episode: Episode) -> list[float]:
    """One for the second step."""
    return [float(step.index == 1) for step in episode.steps]


def test_fork_with_parent_includes_step_rewards_of_parent(database: Database) -> None:
    played(database)
    fork = Fork(1, 1, with_parent=True)
    planning.submit(database, replace(submission("fork"), kind="fork", tasks=[], fork=fork, group_size=1))
    stand_in = value(database, "SELECT max(id) FROM episodes")
    assert rows(database, stand_in) == rows(database)
    assert find_origin(database, stand_in).reward_sets["default"].parts == PARTS


# --- a run --------------------------------------------------------------------------------------------------------------------


class Bonus(Hook):
    """Adds a part of its own, for the episode and for its steps."""

    def on_rollout_end(self, episode: Episode) -> Mapping[str, Any]:
        """The reward so far, and what each step earned so far."""
        assert episode.reward is not None
        return {"doubled": episode.reward, "steps": [step.reward for step in episode.steps]}


class Turns(Env):
    """Gives a part by step itself."""

    def final_reward(self, episode: Episode) -> Mapping[str, Any]:
        """One for each turn."""
        return {"turns": [1.0] * len(episode.steps)}


turns = Turns(tools=("calculator",), rewards={"numeric_answer": 1.0, "format": 0.5})


def broken(episode: Episode) -> float:
    """Never works."""
    raise ValueError("no idea")


def nan(episode: Episode) -> list[float]:
    """No number, at any step."""
    return [float("nan")] * len(episode.steps)


async def awaited(episode: Episode) -> float:
    """Nobody awaits it."""
    return 1.0


def two_of_them(episode: Episode, other: Episode) -> float:
    """Wants more than there is."""
    return 1.0


SAID = [chat().turn(Message("assistant", "#### 0"))] * 2


@pytest.fixture
def asked(own_database: Database, in_memory: None, tmp_path: Path) -> dict[str, Any]:
    """A run of one task."""
    file = write(tmp_path / "numbers.jsonl", {"question": "?", "answer": "0"})
    limits = {"rollout.group_size": 2, "epochs": 1, "name": "mine", "rollout.max_new_tokens": 64}
    return {"dataset.name": str(file), "env": "math", "model.path": str(tiny_random(tmp_path / "model")), **limits}


def rolled_out(db: Database, asked: Mapping[str, Any]) -> None:
    """Submits the run and rolls its group out."""
    made = planning.submit(db, prepare(db, build(asked)).submission)
    (group,) = planning.start_iteration(db, planning.open_iterations(db, made.id)[0])
    work = claim(db, group)
    driver = GroupRollout(
        db, work, Experiment.load(work.config, work.weights), ScriptedEngine(SAID, workers=1), chat(), SimpleQueue(), set()
    )
    driver.start()
    for _ in SAID:
        driver.handle([driver.inbox.get(timeout=60)])
    assert not driver.is_live


WEIGHTED = "SELECT part || ' ' || coalesce(CAST(step AS TEXT), '-') || ' ' || value || ' x ' || weight FROM v_rewards " \
    "WHERE episode_id = 1 ORDER BY id"  # fmt: skip


def test_run_rewards_join_and_reweight_env_rewards(own_database: Database, asked: dict[str, Any]) -> None:
    mine = {"numeric_answer": 3.0, "format": 0.25, f"{HERE}:second": 0.0, "overlong": 1.0}
    rolled_out(own_database, asked | {"rewards": mine})
    found = values(own_database, WEIGHTED)
    assert found == ["numeric_answer - 1.0 x 3.0", "format - 1.0 x 0.25", f"{HERE}:second 0 0.0 x 0.0", "overlong 0 0.0 x 1.0"]
    assert values(own_database, "SELECT reward FROM episodes") == [3.25, 3.25]
    assert main(["replay", "1", "--verify", "rewards"]) == 0


def test_step_reward_of_hook_or_env_is_stored(
    own_database: Database, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rolled_out(own_database, asked | {"env": f"{HERE}:turns", "hooks": [f"{HERE}:Bonus"]})
    assert values(own_database, WEIGHTED) == [
        "numeric_answer - 1.0 x 1.0", "format - 1.0 x 0.5", "turns 0 1.0 x 1.0", "doubled - 2.5 x 1.0", "steps 0 1.0 x 1.0"
    ]  # fmt: skip
    assert values(own_database, "SELECT reward FROM episodes") == [6.0, 6.0]
    assert earnings(claim_training(own_database, 1)) == [(6.0, [2.0])] * 2
    assert main(["replay", "1"]) == 0
    shown = capsys.readouterr().out
    assert "earned turns: 1 x 1" in shown
    assert "turns: 1 x 1 (over 1 step)" in shown
    assert main(["replay", "1", "--verify", "rewards", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["rewards"]
    assert (report["parts"], report["hooks"], report["differences"]) == (3, ["doubled", "steps"], [])


def test_verify_names_step_with_other_reward(
    own_database: Database, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rolled_out(own_database, asked | {"env": f"{HERE}:turns"})
    with own_database.engine.begin() as tx:
        tx.execute(text("UPDATE rewards SET value = 0.75 WHERE part = 'turns' AND episode_id = 1"))
    assert main(["replay", "1", "--verify", "rewards"]) == 1
    assert "turns of step 0: recorded 0.75, now 1.0" in capsys.readouterr().out


def test_verify_reports_other_reward_sets_if_one_cannot_load(
    own_database: Database, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rolled_out(own_database, asked)
    gone = {"no_such_module:gone": 1.0}
    reward_sets.add_reward_set(own_database, 1, "gone", "0" * 32, gone, {1: gone})
    assert main(["replay", "1", "--verify", "rewards"]) == 1
    shown = capsys.readouterr().out
    assert "rewards  default: 2 parts recomputed, none differ" in shown
    assert "rewards  gone: cannot be recomputed: " in shown
    assert "no_such_module" in shown


@pytest.mark.parametrize(("name", "why"), [("broken", "raised ValueError: no idea"), ("nan", "returned nan at step 0")])
def test_reward_exception_or_non_number_fails_episode_by_name(
    own_database: Database, asked: dict[str, Any], name: str, why: str
) -> None:
    rolled_out(own_database, asked | {"rewards": {f"{HERE}:{name}": 0.0}})
    for number in values(own_database, "SELECT id FROM episodes"):
        row = episode_rows.find_episode(own_database, number).row
        assert (row["status"], row["error_class"], row["reward"]) == ("failed", "RewardError", None)
        assert row["error"] == f"reward '{HERE}:{name}' {why}"
    assert values(own_database, "SELECT id FROM rewards") == []


def test_reward_code_changed_on_worker_is_an_event(
    own_database: Database, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> list[str]:
        return values(own_database, "SELECT subject FROM events WHERE kind = 'code_changed'")

    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "altered_reward.py"
    file.write_text("def mine(episode): return 1.0\n")
    config = build(asked | {"rewards": {"altered_reward:mine": 1.0}})
    made = planning.submit(own_database, prepare(own_database, config).submission)
    (group,) = planning.start_iteration(own_database, planning.open_iterations(own_database, made.id)[0])
    work = claim(own_database, group)
    made = Experiment.load(work.config, work.weights)
    _check_code(work, made)
    file.write_text("def mine(episode): return 22.0\n")
    _check_code(work, made)  # what is loaded is what was submitted
    later = replace(work, code_hash=made.scoring_hash(anew=True))
    assert later.code_hash != work.code_hash
    with pytest.raises(ConfigError, match=r"A file of the rewards of mine has changed .* agentrl down"):
        _check_code(later, made)
    assert told() == []
    file.unlink()
    for _ in range(2):
        _check_code(later, made)  # nobody can score by that code any more
    assert told() == [work.code_hash]


def test_rescore_names_episode_with_non_number_reward(own_database: Database, asked: dict[str, Any]) -> None:
    rolled_out(own_database, asked)
    with pytest.raises(RewardError, match=f"Episode 1: reward '{HERE}:nan' returned nan at step 0"):
        rescore(own_database, "mine", [f"{HERE}:nan"], None)


def of_two_lines(episode: Episode) -> float:
    """Never works, and says more of it."""
    raise ValueError("no idea\n\nat all")


def test_rescore_with_failing_reward_names_cause_and_file(
    own_database: Database, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rolled_out(own_database, asked)
    assert main(["rescore", "mine", "--reward", f"{HERE}:of_two_lines"]) == RewardError.exit_code
    said, hint = capsys.readouterr().err.splitlines()
    assert said.endswith(f"Episode 1: reward '{HERE}:of_two_lines' raised ValueError: no idea at all")
    assert "in its file" in hint


# --- what is asked for --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such", "No reward is called"),
        (f"{HERE}:nothing", "cannot be found"),
        (f"{HERE}:SAID", "not callable"),
        (f"{HERE}:awaited", "is an async function, which is not supported"),
        (f"{HERE}:two_of_them", "cannot be called with an episode alone: missing a required argument: 'other'"),
    ],
)
def test_submit_refuses_invalid_reward_name(own_database: Database, asked: dict[str, Any], name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        prepare(own_database, build(asked | {"rewards": {name: 1.0}}))


@pytest.mark.parametrize("rewards", [{"format": float("nan")}, {"format": True}, {"format": "much"}, {"": 1.0}, ["format"], 1])
def test_reward_weights_are_finite_numbers(rewards: Any) -> None:
    with pytest.raises(ConfigError, match="rewards"):
        build({"rewards": rewards})


def test_reward_names_come_from_file_or_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rewards:\n  format: 0.5\n  mine.rewards:polite: 1\n")
    config, origins = resolve(file)
    assert (config.rewards, origins["rewards"]) == ({"format": 0.5, "mine.rewards:polite": 1.0}, str(file))
    assert resolve(file, assignments=("rewards={overlong: 1}",))[0].rewards == {"overlong": 1.0}
    assert build(config.flat()) == config
    assert main(["config", "show", "--config", str(file)]) == 0
    assert "rewards: {format: 0.5, 'mine.rewards:polite': 1.0}" in capsys.readouterr().out


def test_reward_weight_as_option_gets_correct_syntax() -> None:
    with pytest.raises(ConfigError, match=r"Write --reward format=0\.1, or in a file rewards: \{format: 0\.1\}\."):
        resolve(assignments=("rewards.format=0.1",))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_reward_flag_repeats_and_plan_shows_weights(
    own_database: Database, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--dataset", asked["dataset.name"], "--model", asked["model.path"], "--env", "math", "--dry-run", "--json"]
    assert main(["submit", *flags, "--reward", "format=0.5", "--reward", "tool_use"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["rewards"] == "numeric_answer x 0, format x 0.5, tool_use x 1"
    assert plan["config"]["rewards"] == {"format": 0.5, "tool_use": 1.0}
    long = f"{HERE}:a_reward_of_a_name_that_no_table_would_show_in_full_on_one_line_of_it"
    assert (
        main(["submit", *flags[:-1], "--reward", long, *(f"--reward={name}" for name in ("format", "tool_use", "length"))]) == 0
    )
    shown = capsys.readouterr()
    assert f"  numeric_answer x 0\n  format x 1\n  {long} x 1\n  tool_use x 1\n  length x 1\n" in shown.out
    assert "recorded but have weight 0: numeric_answer. To count them: --reward numeric_answer=1" in shown.err
    for wrong in ("format=much", "no_such_reward"):
        assert main(["submit", *flags, "--reward", wrong]) == 2


def a_reward_of_a_name_that_no_table_would_show_in_full_on_one_line_of_it(episode: Episode) -> float:
    return 1.0


def test_stored_episodes_take_no_reward_option(own_database: Database, asked: dict[str, Any]) -> None:
    rolled_out(own_database, asked)
    assert main(["submit", "--from-episodes", "mine", "--reward", "format=1", "--dry-run"]) == 2


def test_reward_weights_all_zero_are_remarked(own_database: Database, asked: dict[str, Any]) -> None:
    nothing = asked | {"rewards": {"numeric_answer": 0.0, "format": 0.0}}
    (remark,) = prepare(own_database, build(nothing)).remarks
    assert remark.startswith("No reward counts (numeric_answer=0, format=0): ")
    for other in ({"rewards": {"numeric_answer": 0.0, "format": 0.1}}, {"hooks": [f"{HERE}:Bonus"]}, {"env": f"{HERE}:turns"}):
        assert prepare(own_database, build(nothing | other)).remarks == ()
    assert prepare(own_database, build(nothing), "eval").remarks == ()


@pytest.mark.parametrize(("hooks", "remarked"), [([], True), ([f"{HERE}:Bonus"], False)])
def test_stored_episodes_without_reward_are_remarked(
    own_database: Database, asked: dict[str, Any], hooks: list[str], remarked: bool
) -> None:
    rolled_out(own_database, asked | {"rewards": {"numeric_answer": 0.0, "format": 0.0}, "hooks": hooks})
    remarks = prepare_stored(own_database, *resolve(flags={"source.runs": ["mine"]})).remarks
    assert [remark for remark in remarks if remark.startswith("No reward counts")] == list(remarks)
    assert bool(remarks) == remarked
