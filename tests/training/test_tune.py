"""`agentrl sft --from-episodes` and `agentrl dpo`: what they take, what they make, and what they refuse with which code."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.workflow import checkpoints
from agentrl.workflow.config import RunConfig
from agentrl.workflow.models.lookup import base_hash
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import settings
from agentrl.workflow.store import steps, train_commits, training_groups
from agentrl.workflow.store.connect import Database
from agentrl.workflow.training.trainer import Trainer
from agentrl.workflow.trajectory import PolicyRef, StepRecord
from tests.support.learned_episodes import logprobs_of, two_turns
from tests.support.played_runs import claim, claim_training, finish, start, submission, update_of, values
from tests.support.small_models import tiny_random
from tests.support.typed import agentrl

REWARDS = ((1.0, 0.0, 0.5, 0.75), (0.0, 0.0, 0.0, 0.0))
"""Of the episodes of the run's two groups."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny_random(tmp_path / "base")


def played(db: Database, base: Path, name: str = "first", rewards: Sequence[Sequence[float]] = REWARDS) -> None:
    """A run of that model with an episode of two turns for each of the rewards; its config asks for full weights."""
    wanted = submission(name, tasks=len(rewards))
    config = {**wanted.config, "model": {**wanted.config["model"], "path": str(base), "lora_r": 0}}
    config["rollout"] = {**config["rollout"], "group_size": len(rewards[0])}
    config["update"] = {**config["update"], "learning_rate": 3e-3}
    wanted = replace(wanted, config=config, policy=PolicyRef(str(base), base_hash(base)), group_size=len(rewards[0]))
    for number, group in enumerate(start(db, wanted)):
        work = claim(db, group)
        for position, reward in enumerate(rewards[number]):
            turns = two_turns(0, seed=10 * number + position).steps
            for turn in turns:
                steps.commit_sampled(db, work.fence, [StepRecord(work.episodes[position].id, turn, work.policy_id, "", ())])
            finish(db, work, position, reward)


def test_sft_command_learns_best_episodes_and_counts_them(
    own_database: Database, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(own_database, base)
    words = ["sft", "--from-episodes", "first", "--min-reward", "0.5", "--best", "2", "--steps", "10", "--json"]
    out, err = agentrl(capsys, *words)
    told = json.loads(out)
    assert "first: 2 of 8 episodes taken, mean reward 0.875" in err
    assert "step 10/10  loss" in err
    assert (told["name"], told["steps"], told["examples"], told["of"]) == ("first-sft", 10, 2, 8)
    made = settings().models_dir / "first-sft"
    assert told["model"] == str(made)
    record = json.loads((made / "training.json").read_text())
    taken = training_groups.load_chosen_episodes(own_database, record["episodes"])
    assert [episode.reward for episode in taken] == [1.0, 0.75]
    gained = zip(logprobs_of(made, taken), logprobs_of(base, taken), strict=True)
    assert all(new > old + 1 for new, old in gained)
    assert values(own_database, "SELECT count(*) FROM consumptions") == [0]
    assert "already" in agentrl(capsys, *words, code=3)[1]
    agentrl(capsys, *words, "--force")


def test_sft_command_learns_all_episodes_three_times_by_default(
    own_database: Database, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(own_database, base)
    out, err = agentrl(capsys, "sft", "--from-episodes", "first", "--batch-size", "3", "--name", "all", "--json")
    assert "8 of 8 episodes taken" in err
    assert json.loads(out)["steps"] == 9
    record = json.loads((settings().models_dir / "all" / "training.json").read_text())
    recipe = {"steps": 9, "batch_size": 3, "learning_rate": 3e-3, "seed": 0}
    assert record["recipe"] == recipe | {"gradient_accumulation_steps": 1, "held_out": 0.0, "optimizer": "adamw"}


def test_dpo_command_learns_pairs_and_reports_metrics(
    own_database: Database, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(own_database, base)
    words = ["dpo", "--from-episodes", "first", "--pairs", "4", "--steps", "10", "--json"]
    out, err = agentrl(capsys, *words)
    told = json.loads(out)
    assert "first: 2 pairs from 1 of 2 groups; the other groups have equal rewards" in err
    assert "step 1/10  loss 0.693  accuracy " in err
    assert (told["accuracy"], told["examples"], told["of"]) == (1.0, 2, 2)
    assert told["margin"] > 0.1
    assert told["loss"] < 0.69
    made = settings().models_dir / "first-dpo"
    pairs = json.loads((made / "training.json").read_text())["pairs"]
    sides = [training_groups.load_chosen_episodes(own_database, [pair[side] for pair in pairs]) for side in (0, 1)]
    assert [[episode.reward for episode in side] for side in sides] == [[1.0, 0.75], [0.0, 0.5]]
    better, worse = ([n - o for n, o in zip(logprobs_of(made, s), logprobs_of(base, s), strict=True)] for s in sides)
    assert all(a > b + 1 for a, b in zip(better, worse, strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_tune_commands_train_on_two_devices(
    own_database: Database, base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    played(own_database, base)
    monkeypatch.setenv("AGENTRL_DEVICE", "cpu")
    settings.cache_clear()
    for command, key in (("sft", "episodes"), ("dpo", "pairs")):
        words = [command, "--from-episodes", "first", "--steps", "3", "--json", "--force"]
        told = [json.loads(agentrl(capsys, *words, "--devices", devices)[0]) for devices in ("1", "2")]
        read = Path(told[1]["model"], "training.json").read_text()
        assert told[0]["loss"] == pytest.approx(told[1]["loss"], rel=1e-4)
        assert told[0] | {"loss": 0, "margin": 0} == told[1] | {"loss": 0, "margin": 0}
        assert len(json.loads(read)[key]) == told[0]["examples"]


def test_sft_command_selects_over_runs_of_one_model(
    own_database: Database, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(own_database, base)
    played(own_database, base, "second")
    both = ["sft", "--from-episodes", "first", "--from-episodes", "second", "--steps", "1"]
    assert "2 of 16 episodes taken" in agentrl(capsys, *both, "--best", "1")[1]  # the runs' tasks are the same two
    played(own_database, tiny_random(tmp_path / "other", seed=1), "third")
    third = ["--from-episodes", "first", "--from-episodes", "third", "--name", "x"]
    assert "their base models differ" in agentrl(capsys, "sft", *third, code=2)[1]
    assert "their base models differ" in agentrl(capsys, "dpo", *third, code=2)[1]


def test_tune_commands_refuse_with_sentence_step_and_code(
    own_database: Database, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(own_database, base)
    played(own_database, base, "even", rewards=((0.5, 0.5),))
    refused = [
        (["sft", "--from-episodes", "first", "--min-reward", "2"], 6, "the highest is 1"),
        (["sft", "--from-episodes", "nobody"], 5, "nobody"),
        (["sft", "--from-episodes", "first", "--reward-set", "short"], 5, "agentrl rescore"),
        (["sft", "--from-episodes", "first", "--reward-set", "../x"], 2, "reward_set"),
        (["sft", "--from-episodes", "first", "--dataset", "arithmetic"], 2, "--dataset"),
        (["sft", "--from-episodes", "first", "--model", "tiny"], 2, "--model"),
        (["sft", "--from-episodes", "first", "--policy", "first@7"], 5, "version 7"),
        (["sft", "--from-episodes", "first", "--policy", str(base)], 2, "RUN@3"),
        (["sft", "--from-episodes", "first", "--learning-rate", "nan"], 2, "--learning-rate"),
        (["sft", "--best", "1"], 2, "--from-episodes"),
        (["sft", "--policy", "first"], 2, "--from-episodes"),
        (["dpo"], 2, "--from-episodes"),
        (["dpo", "--from-episodes", "even"], 6, "equal within the only group"),
        (["dpo", "--from-episodes", "first", "--beta", "0"], 2, "--beta"),
        (["dpo", "--from-episodes", "first", "--reference", "base"], 2, "Write --reference start or --reference sampler."),
        (["dpo", "--from-episodes", "first", "--name", "../x"], 2, "--name"),
    ]
    for words, code, hint in refused:
        out, said = agentrl(capsys, *words, code=code)
        assert hint in said
        assert out == ""
        assert len(said.splitlines()) <= 3
    assert not settings().models_dir.exists()


def test_sft_command_learns_gsm8k_solutions_as_calls(
    home: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENTRL_GSM8K_DIR", str(tmp_path))
    settings.cache_clear()
    rows = [f"Half of 48 is <<48/2={result}>>{result}.\n#### {result}" for result in (24, 25, 24, 24)]
    lines = [json.dumps({"question": f"Half of 48, row {n}?", "answer": answer}) for n, answer in enumerate(rows)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    words = ["sft", "--dataset", "gsm8k", "--model", str(base), "--steps", "2", "--batch-size", "2", "--json"]
    out, err = agentrl(capsys, *words)
    told = json.loads(out)
    assert "Learned from 3 demonstrations; left out 1: no demonstration." in err
    assert (told["name"], told["examples"], told["left_out"]) == ("base-gsm8k", 3, {"no demonstration": 1})
    assert base_hash(settings().models_dir / "base-gsm8k") != base_hash(base)


def test_sft_command_takes_usual_option_names(
    home: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"sft --model_path {base} --dataset arithmetic --num_epochs 2 --max_tasks 10 --batch_size 4 --lora_r 4 --json"
    pieces = ["--gradient_accumulation_steps", "2", "--learning_rate", "1e-3", "--held_out", "0.2"]
    target = tmp_path / "outputs" / "small" / "sft"
    out, err = agentrl(capsys, *words.split(), *pieces, "--output_dir", str(target))
    told = json.loads(out)
    assert (told["model"], told["steps"], told["examples"]) == (str(target), 4, 8)
    assert told["held_out"] > 0
    lines = err.splitlines()
    assert lines[0].startswith("trainable params: ")
    assert lines[0].split("trainable%: ")[1] < "50"
    assert "tokens/s" in lines[1]
    assert lines[-1] == f"Train it: agentrl submit --dataset arithmetic --model {target}"
    assert (target / "model.safetensors").is_file()
    assert not settings().models_dir.exists()


def test_tune_commands_name_output_elsewhere_by_folder(
    own_database: Database, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(own_database, base)
    for command in ("sft", "dpo"):
        target = tmp_path / "elsewhere" / command
        words = ("--from-episodes", "first", "--steps", "1", "--output-dir", str(target))
        assert f"agentrl eval --policy {target} --dataset" in agentrl(capsys, command, *words)[1]
    short = ("--dataset", "arithmetic", "--steps", "1", "--batch-size", "2")
    assert agentrl(capsys, "sft", *short)[1].endswith("--model tiny\n")
    assert agentrl(capsys, "sft", *short, "--name", "mine")[1].endswith("--model mine\n")


def test_sft_command_reads_options_from_yaml(
    home: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(f"model_path: {base}\nnum-epochs: 3\nmax_tasks: 8\nbatch_size: 4\nlearning_rate: 1e-3\nname: mine\n")
    out, _ = agentrl(capsys, "sft", "--config", str(file), "--epochs", "1", "--json")
    told = json.loads(out)
    assert (told["name"], told["steps"], told["examples"]) == ("mine", 2, 8)
    file.write_text("epoch: 3")
    assert "Did you mean 'epochs'" in agentrl(capsys, "sft", "--config", str(file), code=2)[1]
    file.write_text("epochs: many")
    assert "--epochs" in agentrl(capsys, "sft", "--config", str(file), code=2)[1]


def test_sft_command_refuses_before_learning(
    home: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").touch()
    refused = [
        (["--epochs", "1", "--steps", "1"], 2, "exclude each other"),
        (["--name", "a", "--output-dir", "b"], 2, "both set the model's folder"),
        (["--output-dir", str(mine), "--force"], 3, "not made by agentrl"),
        (["--output-dir", "/proc/nope/model"], 2, "Cannot create the folder"),
        (["--held-out", "1"], 2, "below 1"),
        (["--held-out", "nan"], 2, "below 1"),
        (["--lora-r", "4"], 2, "a new model trains all weights"),
        (["--model", str(base), "--load-in-4bit", "--lora-r", "0"], 2, "cannot train all weights"),
        (["--epochs", "0"], 2, "--epochs"),
    ]
    for words, code, said in refused:
        assert said in agentrl(capsys, "sft", *words, code=code)[1], words
    assert [path.name for path in mine.iterdir()] == ["thesis.tex"]
    assert not home.exists()


def test_tune_commands_without_database_find_no_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("sft", "dpo"):
        assert "no run exists" in agentrl(capsys, command, "--from-episodes", "first", code=5)[1]
    assert not home.exists()


def test_sft_starts_from_a_policy_of_a_run(
    own_database: Database, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(own_database, base)
    (iteration,) = values(own_database, "SELECT id FROM iterations")
    work = claim_training(own_database, iteration)
    config = RunConfig.model_validate(work.config)
    policy = Policy.load(config.model, str(base), "cpu")
    with policy.training() as module, torch.no_grad():
        next(module.parameters()).add_(0.25)
    checkpoint = tmp_path / "v1"
    sha256 = checkpoints.write(str(checkpoint), Trainer(policy, config, 1).save)
    train_commits.commit_update(own_database, work, update_of(work, path=str(checkpoint), sha256=sha256), 3)

    words = ["--dataset", "arithmetic", "--steps", "1", "--batch-size", "2", "--learning-rate", "1e-9"]
    agentrl(capsys, "sft", "--model", "first@1", *words)
    made = settings().models_dir / "first-v1-arithmetic"
    record = json.loads((made / "training.json").read_text())
    assert (record["path"], record["version"], record["base"]) == (str(checkpoint), 1, str(base))
    before, after = (load_file(folder / "model.safetensors") for folder in (base, made))
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0.24 < moved < 0.26, "it goes on from the policy, not from its base"

    assert "no policy version 9" in agentrl(capsys, "sft", "--model", "first@9", *words, code=5)[1]
