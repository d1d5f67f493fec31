"""sft and dpo on several ranks: the weights of one process, the same files, and one end for all."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from agentrl.workers.ranks import rank_group
from agentrl.workers.ranks.ranked_training import train_on_ranks
from agentrl.workers.ranks.training_command import decode_training, encode_training
from agentrl.workflow.checkpoints.sealed_folder import RECORD
from agentrl.workflow.config import DatasetConfig, ModelConfig
from agentrl.workflow.datasets.arithmetic import arithmetic
from agentrl.workflow.errors import DatasetError, RankLost
from agentrl.workflow.models.lookup import base_hash
from agentrl.workflow.settings import settings
from agentrl.workflow.training.offline_training import Recipe, Start, TrainedModel
from agentrl.workflow.training.preference import dpo
from agentrl.workflow.training.supervised import default_recipe, sft, sft_on_episodes
from tests.support import rank_plugins
from tests.support.learned_episodes import LearnedEpisode, start_of, two_turns
from tests.support.real_stack import children_of
from tests.support.small_models import tiny_random
from tests.workers.test_ranks import largest_difference

EPISODES = [two_turns(number + 1, seed=number) for number in range(6)]
PAIRS = list(zip(EPISODES[::2], EPISODES[1::2], strict=True))
RECIPE = Recipe(steps=4, batch_size=2, learning_rate=1e-3, gradient_accumulation_steps=2)
ARITHMETIC = DatasetConfig(name="arithmetic")
END_SECONDS = 5.0

Training = partial[TrainedModel]


@pytest.fixture(autouse=True)
def free_choice_of_algorithms() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def model_of(base: Path, **values: Any) -> ModelConfig:
    """The section `model`; without LoRA, because ranks import peft in seconds."""
    return ModelConfig(path=str(base), **{"numerics": "exact", "lora_r": 0} | values)


def start(base: Path, **values: Any) -> Start:
    return replace(start_of(base), model=model_of(base, **values))


def alone(training: Training, **more: Any) -> TrainedModel:
    """Run a training in this process."""
    examples = arithmetic if training.func is sft else training.args[0]
    return training.func(examples, **training.keywords, device="cpu", threads=1, **more)


def together(count: int, training: Training, progress: LearnedEpisode, **more: Any) -> TrainedModel:
    return train_on_ranks(["cpu"] * count, partial(training, **more), progress)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def assert_equal_weights(one: Path, other: Path) -> None:
    assert {tensor.dtype for tensor in weights(one).values()} == {torch.float64}
    assert largest_difference(weights(one), weights(other)) < 1e-10


def record(model: TrainedModel) -> dict[str, Any]:
    """What training.json says, except for metrics, which are rounded differently."""
    return {**json.loads((model.folder / RECORD).read_text()), "metrics": model.metrics.keys()}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_ranks_train_the_weights_of_one_process(tmp_path: Path) -> None:
    """With three ranks and two examples per step, a rank has none."""
    base = tiny_random(tmp_path / "base")
    held = replace(RECIPE, held_out=0.25)
    trainings: dict[str, tuple[int, Training]] = {
        "demonstrations": (3, partial(sft, ARITHMETIC, model=str(base), recipe=held, max_tasks=8, config=model_of(base))),
        "pairs with LoRA": (2, partial(dpo, PAIRS, start=start(base, lora_r=4), recipe=replace(RECIPE, batch_size=3))),
    }
    for kind, (count, training) in trainings.items():
        expected, found = LearnedEpisode(), LearnedEpisode()
        one = alone(training, target=tmp_path / f"{kind} alone", progress=expected)
        several = together(count, training, found, target=tmp_path / f"{kind} together")
        assert_equal_weights(one.folder, several.folder)
        assert largest_difference(weights(one.folder), weights(base)) > 1e-4, kind
        assert (found.parameters, found.tokens, found.done) == (expected.parameters, expected.tokens, 0), kind
        for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-10), kind
        assert record(several) == record(one), kind
        assert (several.metrics, several.examples) == (found.metrics[-1], one.examples), kind
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_killed_ranks_continue_on_any_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_random(tmp_path / "base")
    training = partial(sft_on_episodes, EPISODES, start=start(base), recipe=replace(RECIPE, steps=7), save_every=3)
    whole = alone(training, target=tmp_path / "whole")
    target = tmp_path / "made"
    monkeypatch.setenv("AGENTRL_FAULT_DIR", str(tmp_path))
    monkeypatch.setenv("AGENTRL_FAULT", "checkpoint.sealed:2:kill")  # the one after step 6
    with pytest.raises(RankLost, match=r"^Rank 0 of 2 ended in the training with signal 9\. To continue .* command again\.$"):
        together(2, training, LearnedEpisode(), target=target)
    monkeypatch.delenv("AGENTRL_FAULT")
    shutil.copytree(tmp_path / ".made.training", tmp_path / ".other.training")
    three, one = LearnedEpisode(), LearnedEpisode()
    together(3, training, three, target=target)
    alone(training, target=tmp_path / "other", progress=one)
    assert (three.done, one.done) == (3, 3)
    for name in ("made", "other"):
        assert_equal_weights(whole.folder, tmp_path / name)
    assert not list(tmp_path.glob(".*.training"))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_rank_out_of_memory_splits_its_own_examples(tmp_path: Path) -> None:
    base, recipe = tiny_random(tmp_path / "base"), Recipe(steps=2, batch_size=8, learning_rate=1e-3)
    training = partial(sft, ARITHMETIC, model=str(base), config=model_of(base), recipe=recipe, max_tasks=8)
    one = alone(training, target=tmp_path / "one")
    cramped = partial(sft, DatasetConfig(name=f"{rank_plugins.__name__}:cramped"), **training.keywords)
    several = together(2, cramped, LearnedEpisode(), target=tmp_path / "several")
    assert_equal_weights(one.folder, several.folder)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_ranks_that_differ_leave_an_equal_checkpoint(tmp_path: Path) -> None:
    base = tiny_random(tmp_path / "base")
    options = {"model": str(base), "config": model_of(base), "recipe": RECIPE, "max_tasks": 8, "save_every": 1}
    training, target = partial(sft, ARITHMETIC, **options), tmp_path / "made"
    whole, rest = alone(training, target=tmp_path / "whole"), LearnedEpisode()
    drifting = partial(sft, DatasetConfig(name=f"{rank_plugins.__name__}:drifting"), **options)
    with pytest.raises(RankLost, match=r"^The 2 ranks have different weights\. To continue from the last checkpoint"):
        together(2, drifting, LearnedEpisode(), target=target)
    several = together(2, training, rest, target=target)
    assert rest.done == 2
    assert_equal_weights(whole.folder, several.folder)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_hanging_or_unequal_ranks_end_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_random(tmp_path / "base")
    options = {"model": str(base), "recipe": RECIPE, "max_tasks": 8, "config": model_of(base), "target": tmp_path / "made"}
    hanging = partial(sft, DatasetConfig(name=f"{rank_plugins.__name__}:stuck"), **options)
    with pytest.raises(RankLost, match=r"In the last \d+ s, none of 2 ranks began a microbatch\. To continue"):
        together(2, hanging, ImpatientAfterTwoSteps(monkeypatch))
    unequal = partial(sft, DatasetConfig(name=f"{rank_plugins.__name__}:unequal"), **options)
    with pytest.raises(DatasetError, match=r"^The 2 ranks have different examples\. The dataset must yield the same rows"):
        together(2, unequal, LearnedEpisode())
    assert [entry.name for entry in tmp_path.iterdir()] == ["base"], "nothing is left of the trainings"


class ImpatientAfterTwoSteps(LearnedEpisode):
    """From then on, ranks that begin no microbatch for two seconds, in which they report twice that they run, hang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._monkeypatch = monkeypatch

    def step(self, done: int, steps: int, tokens: int, metrics: Mapping[str, float]) -> None:
        """After each."""
        if done == 2:
            self._monkeypatch.setattr(rank_group, "LEASES_WITHOUT_PROGRESS", 2 / settings().lease_seconds)


def test_training_reaches_ranks_with_all_arguments(tmp_path: Path) -> None:
    begun = replace(start(tmp_path, lora_targets=("q_proj",)), temperature=0.7, manifest={"tokenizer": "0f"})
    recipe = replace(RECIPE, learning_rate=1 / 3)
    options = {"target": tmp_path / "made", "recipe": recipe, "start": begun, "overwrite": True, "save_every": None}

    def sent(training: Training) -> Training:
        command = encode_training(training)
        received = decode_training(replace(command, arguments=json.loads(json.dumps(command.arguments))))
        assert received.func is training.func
        assert received.keywords == training.keywords
        return received

    (episodes,) = sent(partial(sft_on_episodes, EPISODES, **options)).args
    assert [(one.id, one.steps[1].sampled_ids) for one in episodes] == [(one.id, one.steps[1].sampled_ids) for one in EPISODES]
    (pairs,) = sent(partial(dpo, PAIRS, **options, beta=0.2, reference="sampler")).args
    assert [[one.id for one in pair] for pair in pairs] == [[1, 2], [3, 4], [5, 6]]
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "a", "answer": "b"}\n')
    rows = DatasetConfig(name=str(file), map={"question": "question"})
    more = {**options, "model": "tiny", "epochs": 2, "max_tasks": None, "config": model_of(tmp_path)}
    (read,) = sent(partial(sft, rows, **more)).args
    assert [message.content for message in read[0].messages] == ["a", "b"]


# real processes, killed


def begin(folder: Path) -> "subprocess.Popen[str]":
    """The command, always the same, in a process of its own. It trains the model `base` next to the folder."""
    words = ["sft", "--dataset", "arithmetic", "--max-tasks", "8", "--model", str(folder.parent / "base"), "--devices", "2"]
    words += ["--steps", "24", "--batch-size", "4", "--save-every", "4", "--output-dir", str(folder / "made")]
    command = [sys.executable, "-P", "-m", "agentrl.cli", *words]
    own = {"AGENTRL_HOME": str(folder / "home"), "AGENTRL_DEVICE": "cpu", "AGENTRL_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=os.environ | own, stderr=subprocess.PIPE, text=True)


def read_until(process: "subprocess.Popen[str]", text: str) -> tuple[str, list[int]]:
    """Read what the command says up to a line with the text; also return the command's ranks."""
    assert process.stderr is not None
    said = ""
    while text not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    return said, [pid for pid in children_of(process.pid) if os.getsid(pid) == pid]


def read_rest(process: "subprocess.Popen[str]", code: int) -> str:
    said = process.communicate()[1]
    assert process.returncode == code, said
    return said


def wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a rank outlives its command"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_ranks_and_command_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is killed, then a rank, and then somebody presses Ctrl-C; the model is that of an undisturbed training."""
    base, loud = tiny_random(tmp_path / "base"), tmp_path / "loud"
    recipe = replace(default_recipe(str(base), full=True), steps=24, batch_size=4)
    training = partial(sft, ARITHMETIC, model=str(base), max_tasks=8, config=ModelConfig(path=str(base)), recipe=recipe)
    monkeypatch.setenv("AGENTRL_THREADS", "1")
    quiet = together(2, training, LearnedEpisode(), target=tmp_path / "quiet")
    first = begin(loud)
    _, ranks = read_until(first, "step 6/24")
    assert len(ranks) == 2
    first.kill()
    wait_for_end(ranks)
    read_rest(first, -signal.SIGKILL)
    second = begin(loud)
    said, ranks = read_until(second, "step 10/24")
    assert "resuming at step 4 of 24" in said
    os.kill(ranks[1], signal.SIGKILL)
    said = read_rest(second, RankLost.exit_code)
    assert "Rank 1 of 2 ended in the training with signal 9.\n  To continue from the last checkpoint, type" in said
    wait_for_end(ranks)
    third = begin(loud)
    said, ranks = read_until(third, "step 14/24")
    assert "resuming at step 8 of 24" in said
    third.send_signal(signal.SIGINT)
    said = read_rest(third, 130)
    (stopped,) = re.findall(r"Stopped after step (\d+) of 24; the same command goes on there\.", said)
    wait_for_end(ranks)
    assert f"resuming at step {stopped} of 24" in read_rest(begin(loud), 0)
    assert base_hash(loud / "made") == base_hash(quiet.folder)
    assert [entry.name for entry in loud.iterdir()] == ["made"]
