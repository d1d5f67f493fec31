"""Ranks: an update by several processes is the update of one, and they die together."""

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from agentrl.workers.ranks import rank_group
from agentrl.workers.ranks.rank import RankReplies
from agentrl.workers.ranks.rank_group import Rank, RankGroup, close_group, group_for
from agentrl.workers.ranks.rank_messages import RankCommand, decode_groups, encode_error, encode_groups
from agentrl.workers.ranks.ranked_trainer import RankedTrainer
from agentrl.workflow import checkpoints, trainers
from agentrl.workflow.checkpoints import sha256_file
from agentrl.workflow.config import RunConfig, build
from agentrl.workflow.errors import BrokenCheckpoint, ConfigError, InfraError, RankLost
from agentrl.workflow.models.devices import devices_of_ranks
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import settings
from agentrl.workflow.training.ranks import Ranks
from agentrl.workflow.training.trainer import Trainer
from agentrl.workflow.training.training_rows import TokenLayout, row_tokens
from agentrl.workflow.trajectory import ROOT, Group, Message
from tests.support import rank_plugins
from tests.support.counted_checks import LOG
from tests.support.small_models import quantised
from tests.training.test_trainer import folder as folder
from tests.training.test_trainer import groups_of

MODES: dict[str, dict[str, Any]] = {
    "LoRA": {"model.lora_r": 4},
    "all weights": {"model.lora_r": 0},
    "critic": {"algorithm.name": "ppo", "update.epochs": 2, "update.batch_size": 3, "model.lora_r": 4},
    "KL in the loss": {"algorithm.kl_coef": 0.1, "model.lora_r": 0, "update.weight_decay": 0.1},
    "KL in the reward": {"algorithm.kl_coef": 0.1, "algorithm.kl_in": "reward", "algorithm.kl_estimator": "k1"},
    "limits": {"update.epochs": 3, "update.max_kl": 1e-9, "update.max_sampler_difference": 5.0},
}

FULL = {"model.lora_r": 0}
"""All weights train: for tests that need no LoRA, because ranks import peft in seconds."""


def config(**values: Any) -> RunConfig:
    return build({"model.numerics": "exact", "update.learning_rate": 1e-3, "model.lora_r": 4} | values)


@pytest.fixture(autouse=True)
def free_choice_of_algorithms() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def warm_ranks(forked_programs_of_module: None) -> Iterator[None]:
    """The ranks of this file's tests. They keep running from one test to the next."""
    yield
    close_group()


@pytest.fixture
def group(warm_ranks: None) -> RankGroup:
    """Four ranks. They are started again if the test before has ended them."""
    return group_for(["cpu"] * 4)


@pytest.fixture
def doomed(warm_ranks: None) -> Iterator[RankGroup]:
    """Two ranks of this test's own."""
    close_group()
    made = RankGroup.start(["cpu"] * 2)
    yield made
    made.close()


def ranked(group: RankGroup, folder: Path, run: RunConfig) -> RankedTrainer:
    return RankedTrainer(group, Policy.load(run.model, str(folder), "cpu", weights=False), run, 0)


def hashes(folder: Path) -> dict[str, str]:
    """The hash of each file of a checkpoint."""
    return {file.name: sha256_file(file) for file in folder.iterdir() if file.is_file()}


def saved(trainer: Trainer | RankedTrainer, folder: Path) -> dict[str, Tensor]:
    """All tensors of the trainer's checkpoint."""
    checkpoints.write(str(folder), trainer.save)
    return {
        f"{file.name} {name}": tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.mark.slow
def test_ranks_make_the_update_of_one_process(group: RankGroup, folder: Path, tmp_path: Path) -> None:
    """In every mode, twice in a row; with four ranks and three rows, one rank has none."""
    for mode, values in MODES.items():
        run = config(**values)
        alone = Trainer(Policy.load(run.model, str(folder), "cpu"), run)
        together = ranked(group, folder, run)
        for trainer in (alone, together):
            trainer.load(None)
        for iteration, groups in enumerate((groups_of(3, 3), groups_of(1, 3))):
            expected, found = (trainer.update(groups, iteration) for trainer in (alone, together))
            assert expected.skipped is None, mode
            assert (found.dropped, len(found.steps)) == (expected.dropped, len(expected.steps)), mode
            assert found.advantages == pytest.approx(expected.advantages, abs=1e-10), mode
            for name in expected.metrics.keys() - {"seconds"}:
                assert found.metrics[name] == pytest.approx(expected.metrics[name], abs=1e-10), (mode, name)
            one, other = (saved(trainer, tmp_path / f"{mode} {iteration} {i}") for i, trainer in enumerate((alone, together)))
            assert largest_difference(one, other) < 1e-10, mode


@pytest.mark.slow
def test_ranks_write_the_same_bytes_again_and_go_on_alone(group: RankGroup, folder: Path, tmp_path: Path) -> None:
    """With dropout, whose masks differ between ranks. One process can load what two have written."""
    run = config(**{"model.lora_dropout": 0.3})
    for name in ("first", "second"):
        together = ranked(group, folder, run)
        together.load(None)
        assert together.update(groups_of(), 0).skipped is None
        saved(together, tmp_path / name)
    assert hashes(tmp_path / "first") == hashes(tmp_path / "second")
    run = config()
    alone, together = Trainer(Policy.load(run.model, str(folder), "cpu"), run), ranked(group, folder, run)
    for trainer in (alone, together):
        trainer.load(tmp_path / "first")
        trainer.update(groups_of(seed=1), 1)
    assert largest_difference(saved(alone, tmp_path / "alone"), saved(together, tmp_path / "together")) < 1e-10


@pytest.mark.slow
@quantised
def test_ranks_train_lora_on_a_base_in_four_bits(group: RankGroup, folder: Path, tmp_path: Path) -> None:
    """In float32, where sums in another order differ by more."""
    run = config(**{"model.numerics": "fast", "model.load_in_4bit": True})
    alone, together = Trainer(Policy.load(run.model, str(folder), "cpu"), run), ranked(group, folder, run)
    moments = []
    for trainer in (alone, together):
        trainer.load(None)
        trainer.update(groups_of(), 0)
        tensors = saved(trainer, tmp_path / type(trainer).__name__)
        moments.append(torch.cat([tensors[name].flatten() for name in sorted(tensors) if name.endswith(":exp_avg")]))
    assert float(moments[0].norm()) > 0
    assert float((moments[0] - moments[1]).norm() / moments[0].norm()) < 1e-3


@pytest.mark.slow
def test_rank_out_of_memory_cuts_its_own_microbatches(group: RankGroup, folder: Path, tmp_path: Path) -> None:
    found = []
    for name in ("grpo", f"{rank_plugins.__name__}:short_of_memory"):
        together = ranked(group, folder, config(**{"algorithm.name": name}))
        together.load(None)
        together.update(groups_of(), 0)
        found.append(saved(together, tmp_path / str(len(found))))
    group.close()  # rank 1 stays short of memory
    assert largest_difference(*found) < 1e-10


@pytest.mark.slow
def test_ranks_that_hang_are_killed(doomed: RankGroup, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for a sum, and rank 1 runs without an end: both processes still report that they run."""
    trainer = ranked(doomed, folder, config(**FULL, **{"algorithm.name": f"{rank_plugins.__name__}:endless"}))
    trainer.load(None)
    monkeypatch.setattr(rank_group, "LEASES_WITHOUT_PROGRESS", 2 / settings().lease_seconds)
    with pytest.raises(InfraError, match=r"In the last \d+ s, none of 2 ranks began a microbatch"):
        trainer.update(groups_of(), 0)
    assert not doomed.is_alive


def test_rank_that_uses_files_may_begin_no_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large checkpoint may take longer than the time after which a rank counts as hanging; nothing else may."""
    monkeypatch.setattr(rank_group, "LEASES_WITHOUT_PROGRESS", 0.3 / settings().lease_seconds)
    ours, theirs = socket.socketpair()
    replies, group = RankReplies(theirs), RankGroup(["cpu"], None, [Rank(None, ours)])
    ranks = Ranks(0, 2, replies.count_microbatch, replies.report_files)
    ranks.report_progress()
    with ours.dup(), theirs, ThreadPoolExecutor(1) as thread:  # the copy: if the worker is gone, a rank ends its process
        with ranks.using_files():
            results = thread.submit(group.call, RankCommand("training"), threading.Event())
            time.sleep(0.8)
        replies.send({"result": "trained"})
        assert results.result(10) == ["trained"]
        with pytest.raises(RankLost, match="none of 1 ranks began a microbatch"):
            group.call(RankCommand("training"), threading.Event())


@pytest.mark.parametrize(
    ("script", "has_ended", "reason"),
    [
        ("exit 3", True, "Rank 1 of 2 ended in the update with exit code 3"),
        ("sleep 0.2; kill -9 $$", False, "Rank 1 of 2 ended in the update with signal 9"),
        ("sleep 0.2; exit 3", False, "Rank 0 failed: RuntimeError: Connection closed by peer"),
    ],
)
def test_rank_error_is_explained_by_another_lost_rank(script: str, has_ended: bool, reason: str) -> None:
    """Rank 0 has reported an error and ended with 1. Only a rank that ended before that, or is killed, explains the error."""
    pairs = [socket.socketpair() for _ in range(2)]
    processes = [subprocess.Popen(["sh", "-c", each], start_new_session=True) for each in ("exit 1", script)]
    for process in processes[: 1 + has_ended]:
        process.wait()
    group = RankGroup(["cpu"] * 2, None, [Rank(process, ours) for process, (ours, _) in zip(processes, pairs, strict=True)])
    with pairs[0][1] as link, pairs[1][1]:
        RankReplies(link).send({"error": encode_error(RuntimeError("Connection closed by peer"))})
        with pytest.raises(RankLost, match=reason):
            group.call(RankCommand("update"), threading.Event())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gone_astray", "The 2 ranks have different updates"),
        ("out_of_memory", r"Memory does not suffice for one row of \d+ tokens"),
    ],
)
def test_ranks_that_differ_or_fail_are_killed(doomed: RankGroup, folder: Path, name: str, reason: str) -> None:
    trainer = ranked(doomed, folder, config(**FULL, **{"algorithm.name": f"{rank_plugins.__name__}:{name}"}))
    trainer.load(None)
    with pytest.raises(InfraError, match=reason):
        trainer.update(groups_of(), 0)
    assert not doomed.is_alive


@pytest.mark.slow
def test_first_rank_of_a_host_checks_a_checkpoint(home: Path, doomed: RankGroup, folder: Path, tmp_path: Path) -> None:
    """Each byte is read for a check once, when it is fetched or found; each rank reports a broken checkpoint as it is."""
    trainer = ranked(doomed, folder, config(**FULL, **{"algorithm.name": "tests.support.counted_checks:counted"}))
    trainer.load(None)
    (tmp_path / "runs").mkdir()
    for path in (f"file://{tmp_path}/runs/stored", str(tmp_path / "runs" / "plain")):
        sha256 = checkpoints.write(path, trainer.save)
        for _ in range(2):
            home.mkdir(exist_ok=True)
            (home / LOG).write_text("")
            trainer.load(path, sha256)
            checks = (home / LOG).read_text().splitlines()
            assert len(checks) == len(set(checks)) > 2
            assert {check.split()[0] for check in checks} == {"0"}
    with pytest.raises(BrokenCheckpoint):
        trainer.load(f"file://{tmp_path}/runs/none", "")
    assert not doomed.is_alive


def test_groups_reach_ranks_with_all_that_trains() -> None:
    """Forks, turns that were not delivered, chains and their shared tokens."""
    (whole, *others) = groups_of()
    episode = whole.episodes[0]
    first, second = episode.steps
    branch = replace(second, index=2, parent=ROOT, chain=1, new_row="other", delivered=False, message=Message("assistant", "a"))
    third = replace(second, index=3, parent=0, shared=3, chain=2, reward=0.5)
    changed = replace(episode, steps=(first, second, branch, third), fork_step=1, inherited=1, stop_reason="max_tokens")
    failed = replace(episode, status="failed", reward=None, id=99)
    groups = [Group(whole.task, (changed, failed, *whole.episodes[1:]), 5), *others]
    encoded, tensors = encode_groups(groups)
    decoded = decode_groups(json.loads(json.dumps(encoded)), tensors)
    assert [(group.slot, group.task.key, len(group.episodes)) for group in decoded] == [
        (group.slot, group.task.key, len(group.episodes)) for group in groups
    ]
    for one, other in zip(groups, decoded, strict=True):
        assert TokenLayout.of(one.episodes).rows == TokenLayout.of(other.episodes).rows
        for mine, theirs in zip(one.episodes, other.episodes, strict=True):
            assert (mine.id, mine.trainable, mine.reward, mine.stop_reason) == (
                *(theirs.id, theirs.trainable, theirs.reward, theirs.stop_reason),
            )


@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_ranks_deal_each_row_once_by_tokens(count: int) -> None:
    rows = TokenLayout.of([episode for group in groups_of(4, 4) for episode in group.episodes]).rows
    dealt = [Ranks(rank, count).deal(rows, row_tokens) for rank in range(count)]
    assert sorted(row.key for some in dealt for row in some) == [row.key for row in rows]
    tokens = [sum(len(row.input_ids) for row in some) for some in dealt]
    assert max(tokens) - min(tokens) <= max(len(row.input_ids) for row in rows)
    assert dealt[0]


def test_devices_of_ranks_refuse_more_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices_of_ranks(1, "auto", "fast") == ["auto"]
    assert devices_of_ranks("auto", "cuda", "fast") == devices_of_ranks(2, "auto", "fast") == ["cuda:0", "cuda:1"]
    assert devices_of_ranks(3, "cpu", "fast") == devices_of_ranks(3, "auto", "exact") == ["cpu"] * 3
    assert devices_of_ranks("auto", "cpu", "fast") == ["cpu"]
    assert devices_of_ranks("auto", "cuda:1", "fast") == ["cuda:1"]
    with pytest.raises(ConfigError, match="needs 3 GPUs, and torch can use 2 on this machine"):
        devices_of_ranks(3, "auto", "fast")
    with pytest.raises(ConfigError, match=r"^--devices 3 needs 3 GPUs, .*\. Pass --devices 2\.$"):
        devices_of_ranks(3, "auto", "fast", option="--devices ")
    with pytest.raises(ConfigError, match="AGENTRL_DEVICE=cuda:1 names one"):
        devices_of_ranks(2, "cuda:1", "fast")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert devices_of_ranks("auto", "auto", "fast") == ["auto"]
    with pytest.raises(ConfigError, match=r"can use none on this machine\. Set AGENTRL_DEVICE=cpu"):
        devices_of_ranks(2, "auto", "fast")


def test_config_refuses_devices_that_cannot_be() -> None:
    assert build({"update.devices": "2"}).update.devices == 2
    for value in (0, 65, True, 1.5, "all"):
        with pytest.raises(ConfigError, match=r"update\.devices"):
            build({"update.devices": value})
    with pytest.raises(ConfigError, match="numerics: exact needs a fixed number of devices"):
        build({"update.devices": "auto", "model.numerics": "exact"})
    with pytest.raises(ConfigError, match=r"The trainer trl updates on one device, and update\.devices is 2"):
        trainers.check(build({"update.devices": 2, "update.trainer": "trl"}))
