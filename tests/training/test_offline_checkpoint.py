"""sft and dpo after a kill: the same command goes on at its last checkpoint and makes the very same weights."""

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.workflow.checkpoints.sealed_folder import RECORD
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.datasets.arithmetic import arithmetic
from agentrl.workflow.errors import CheckpointError, ConflictError, DeviceLost, ModelError, Stopped
from agentrl.workflow.models.lookup import base_hash, model_folder
from agentrl.workflow.models.parameters import Parameters
from agentrl.workflow.training.offline_checkpoint import catch_interrupt, rendering_clock
from agentrl.workflow.training.offline_training import Recipe, TrainedModel
from agentrl.workflow.training.preference import dpo
from agentrl.workflow.training.ranks import Ranks
from agentrl.workflow.training.supervised import sft, sft_on_episodes
from tests.chat.test_clock import DATED
from tests.support.learned_episodes import LearnedEpisode, start_of, two_turns
from tests.support.small_models import tiny_random

EPISODES = [two_turns(number + 1, seed=number) for number in range(6)]
PAIRS = list(zip(EPISODES[::2], EPISODES[1::2], strict=True))
RECIPE = Recipe(steps=9, batch_size=4, learning_rate=3e-3)

Training = Callable[..., TrainedModel]


class Interrupted(Exception):
    """Somebody pressed a key."""


class Breaking(LearnedEpisode):
    """Ends a training after that step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def step(self, done: int, steps: int, tokens: int, metrics: Mapping[str, float]) -> None:
        """After each."""
        if done == self._at:
            raise Interrupted


def trainings(base: Path) -> dict[str, Training]:
    """Each kind of training, with all that a step may draw or read: dropout, a held-out share."""
    config = ModelConfig.model_validate({"path": str(base), "lora_r": 4, "lora_dropout": 0.3})
    held = replace(RECIPE, held_out=0.2)
    start = start_of(base, 4)
    return {
        "demonstrations": partial(sft, arithmetic, str(base), recipe=held, max_tasks=20, config=config),
        "tiny": partial(sft, arithmetic, "tiny", recipe=RECIPE, max_tasks=20),
        "episodes": partial(sft_on_episodes, EPISODES, start, recipe=RECIPE),
        "pairs": partial(dpo, PAIRS, start, recipe=RECIPE),
    }


def learn(training: Training, target: Path, **more: Any) -> TrainedModel:
    return training(target=target, device="cpu", threads=1, **more)


def interrupted(training: Training, target: Path, at: int = 5) -> None:
    """Leaves the checkpoint after step 3."""
    with pytest.raises(Interrupted):
        learn(training, target, save_every=3, progress=Breaking(at))


def test_sft_resume_keeps_template_time_of_first_start(tmp_path: Path) -> None:
    config = ModelConfig(chat_template=DATED)
    training = partial(sft, arithmetic, "tiny", recipe=RECIPE, max_tasks=20, config=config)
    target = tmp_path / "model"
    interrupted(training, target)
    first = rendering_clock(target)
    progress = LearnedEpisode()
    learn(training, target, progress=progress)
    assert progress.done == 3, "the steps that the checkpoint has"
    assert rendering_clock(target) > first, "a training from the beginning has a new time"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["demonstrations", "tiny", "episodes", "pairs"])
def test_offline_training_resumes_to_same_weights(kind: str, tmp_path: Path) -> None:
    training, told = trainings(tiny_random(tmp_path / "base"))[kind], LearnedEpisode()
    whole = learn(training, tmp_path / "whole")
    target = tmp_path / "made"
    interrupted(training, target)
    assert not target.exists()
    with pytest.raises(ModelError):
        model_folder(str(tmp_path / ".made.training"))
    made = learn(training, target, save_every=3, progress=told)
    assert (told.done, len(told.metrics)) == (3, 6)
    assert base_hash(made.folder) == base_hash(whole.folder)
    assert (made.folder / RECORD).read_text() == (whole.folder / RECORD).read_text()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["base", "made", "whole"]


def test_offline_training_refuses_other_recipe_model_or_data(tmp_path: Path) -> None:
    base, told = tiny_random(tmp_path / "base"), LearnedEpisode()
    training, target = trainings(base)["episodes"], tmp_path / "made"
    interrupted(training, target)
    others = [
        partial(training, recipe=replace(RECIPE, learning_rate=1e-3)),
        partial(sft_on_episodes, EPISODES[1:], start_of(base, 4), recipe=RECIPE),
        partial(sft_on_episodes, EPISODES, start_of(base, 2), recipe=RECIPE),
        partial(sft_on_episodes, EPISODES, start_of(tiny_random(tmp_path / "other", seed=1), 4), recipe=RECIPE),
        trainings(base)["pairs"],
    ]
    for other in others:
        with pytest.raises(ConflictError, match=r"/made' with .* interrupted at step 3 of 9\. To continue that"):
            learn(other, target)
    assert (tmp_path / ".made.training" / "last").is_dir()
    learn(others[0], target, overwrite=True, progress=told)
    assert told.done == 0


def test_offline_training_checkpoints_by_the_clock_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, told = trainings(tiny_random(tmp_path / "base"))["episodes"], LearnedEpisode()
    monkeypatch.setattr("agentrl.workflow.training.offline_checkpoint.MIN_SECONDS_APART", 0.0)
    with pytest.raises(Interrupted):
        learn(training, tmp_path / "made", progress=Breaking(5))
    learn(training, tmp_path / "made", progress=told)
    assert 1 <= told.done <= 5


def test_offline_training_resumes_while_replacing_a_model(tmp_path: Path) -> None:
    training, told = trainings(tiny_random(tmp_path / "base"))["episodes"], LearnedEpisode()
    learn(training, tmp_path / "made")
    with pytest.raises(Interrupted):
        learn(training, tmp_path / "made", save_every=3, overwrite=True, progress=Breaking(7))
    learn(training, tmp_path / "made", overwrite=True, progress=told)
    assert told.done == 6


def test_offline_training_reports_when_it_uses_files(tmp_path: Path) -> None:
    """So several ranks do not count as hanging while one of them writes a large checkpoint or model."""
    target, seen = tmp_path / "made", list[tuple[bool, bool, bool]]()

    def note(uses_files: bool) -> None:
        seen.append((uses_files, (tmp_path / ".made.training" / "last").exists(), target.exists()))

    learn(trainings(tiny_random(tmp_path / "base"))["episodes"], target, save_every=8, ranks=Ranks(report_files=note))
    times = list(zip(seen[::2], seen[1::2], strict=True))
    assert ((True, False, False), (False, True, False)) in times, "the checkpoint is written meanwhile"
    assert times[-1] == ((True, True, False), (False, True, True)), "and so is the model"


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_offline_training_refuses_altered_checkpoint(name: str, tmp_path: Path) -> None:
    training, told = trainings(tiny_random(tmp_path / "base"))["episodes"], LearnedEpisode()
    interrupted(training, tmp_path / "made")
    file = tmp_path / ".made.training" / "last" / name
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"was changed\. Pass --force to start again"):
        learn(training, tmp_path / "made")
    learn(training, tmp_path / "made", overwrite=True, progress=told)
    assert told.done == 0


class Pressing(LearnedEpisode):
    """Presses ctrl-C during the third step."""

    def step(self, done: int, steps: int, tokens: int, metrics: Mapping[str, float]) -> None:
        """After each."""
        super().step(done, steps, tokens, metrics)
        if done == 2:
            signal.raise_signal(signal.SIGINT)


def test_offline_training_resumes_after_ctrl_c(tmp_path: Path) -> None:
    training, told = trainings(tiny_random(tmp_path / "base"))["episodes"], LearnedEpisode()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Stopped, match=r"Stopped after step 3 of 9; the same command goes on there\."):
        learn(training, tmp_path / "made", progress=Pressing())
    assert signal.getsignal(signal.SIGINT) is before
    learn(training, tmp_path / "made", progress=told)
    learn(training, tmp_path / "whole")
    assert told.done == 3
    assert base_hash(tmp_path / "made") == base_hash(tmp_path / "whole")


def test_offline_training_resumes_after_lost_device(tmp_path: Path) -> None:
    training, told = trainings(tiny_random(tmp_path / "base"))["episodes"], LearnedEpisode()

    class Failing(LearnedEpisode):
        """Its device fails after step 5."""

        def step(self, done: int, steps: int, tokens: int, metrics: Mapping[str, float]) -> None:
            if done == 5:
                raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    with pytest.raises(DeviceLost, match="unspecified launch failure"):
        learn(training, tmp_path / "made", save_every=3, progress=Failing())
    learn(training, tmp_path / "made", save_every=3, progress=told)
    learn(training, tmp_path / "whole")
    assert told.done == 3
    assert base_hash(tmp_path / "made") == base_hash(tmp_path / "whole")


def test_offline_training_ends_at_second_ctrl_c() -> None:
    with catch_interrupt() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_offline_training_without_output_leaves_no_checkpoint(tmp_path: Path) -> None:
    training = trainings(tiny_random(tmp_path / "base"))["episodes"]
    with pytest.raises(ModelError, match="lower --learning-rate"):
        learn(partial(training, recipe=Recipe(20, 4, 1e20)), tmp_path / "made", save_every=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["base"]


def test_offline_training_of_one_model_excludes_second_process(tmp_path: Path) -> None:
    training, target = trainings(tiny_random(tmp_path / "base"))["episodes"], tmp_path / "made"

    class Second(LearnedEpisode):
        def begins(self, parameters: Parameters, steps: int, done: int) -> None:
            with pytest.raises(ConflictError, match="Another process"):
                learn(training, target)

    learn(training, target, progress=Second(), save_every=3)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["base", "made"]


# where the disk refuses


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """What the system does where space runs out: it takes the first bytes of a file and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
def test_offline_training_keeps_last_checkpoint_on_full_disk(tmp_path: Path) -> None:
    training, target, told = trainings(tiny_random(tmp_path / "base"))["tiny"], tmp_path / "made", LearnedEpisode()
    interrupted(training, target)
    last = tmp_path / ".made.training" / "last"
    size = (last / "optimizer.safetensors").stat().st_size
    with no_file_above(size - 1), pytest.raises(CheckpointError, match=r"checkpoint .* type the same command again"):
        learn(training, target, save_every=3)
    assert [entry.name for entry in last.parent.iterdir()] == ["last"]
    learn(training, target, progress=told)
    assert told.done == 3


@pytest.mark.slow
def test_offline_training_leaves_no_half_model_on_full_disk(tmp_path: Path) -> None:
    training, target, told = trainings(tiny_random(tmp_path / "base"))["tiny"], tmp_path / "made", LearnedEpisode()
    interrupted(training, target)
    with no_file_above(100_000), pytest.raises(CheckpointError, match="Cannot write the model"):
        learn(training, target)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".made.training", "base"]
    learn(training, target, progress=told)
    assert told.done == 3


# real processes, killed


def start(folder: Path, **environment: str) -> "subprocess.Popen[str]":
    """The command, always the same, in a process of its own."""
    words = ["sft", "--dataset", "arithmetic", "--model", "tiny", "--steps", "40", "--batch-size", "4", "--save-every", "4"]
    command = [sys.executable, "-P", "-m", "agentrl.cli", *words, "--output-dir", str(folder / "made")]
    own = {"AGENTRL_HOME": str(folder / "home"), "AGENTRL_DEVICE": "cpu", "AGENTRL_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=os.environ | own | environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_offline_training_killed_twice_makes_same_model(tmp_path: Path) -> None:
    whole = start(tmp_path / "quiet")
    assert whole.communicate()[1]
    assert whole.returncode == 0
    killed = start(tmp_path / "loud", AGENTRL_FAULT_DIR=str(tmp_path), AGENTRL_FAULT="checkpoint.sealed:3:kill")
    assert "goes on" not in killed.communicate()[1]
    assert killed.returncode == -signal.SIGKILL
    struck = start(tmp_path / "loud")
    assert struck.stderr is not None
    begun = []
    for line in struck.stderr:
        begun += re.findall(r"resuming at step (\d+) of 40", line)
        if line.startswith("step 36/40"):  # the line itself follows the checkpoint
            struck.kill()
    assert struck.wait() == -signal.SIGKILL
    struck.stderr.close()
    last = start(tmp_path / "loud")
    begun += re.findall(r"resuming at step (\d+) of 40", last.communicate()[1])
    assert last.returncode == 0
    assert begun == ["8", "36"]
    assert base_hash(tmp_path / "loud" / "made") == base_hash(tmp_path / "quiet" / "made")
    assert [entry.name for entry in (tmp_path / "loud").iterdir()] == ["made"]
