"""TRL as a second trainer: the same gradient as ours in its convention, the same checkpoints, and a run through the stack."""

import json
import random
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import text
from torch import Tensor

from agentrl.workers.requests.submit import prepare
from agentrl.workflow import trainers
from agentrl.workflow.algorithms import resolve_run
from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.config import RunConfig, build
from agentrl.workflow.errors import ConfigError, InfraError
from agentrl.workflow.installation import install_command
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.resolve import resolve
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import run_rows
from agentrl.workflow.training.training_rows import rows_of
from agentrl.workflow.training.trl_options import grpo_options
from agentrl.workflow.trajectory import ROOT, Group
from bench.faults.fork_server import Nursery
from tests.conftest import missing
from tests.support.forked_stack import forked_stack
from tests.support.real_stack import SMALL
from tests.support.small_models import quantised
from tests.training.test_trainer import (
    KINDS,
    assert_same_files,
    config,
    go_on,
    gradient,
    groups_of,
    saved,
    trainer_of,
    unchanged,
)
from tests.training.test_trainer import folder as folder
from tests.training.test_trainer import free_choice_of_algorithms as free_choice_of_algorithms

pytestmark = pytest.mark.filterwarnings(
    # TRL 1.16 turns the recomputation of layers off and on by the names of transformers 4.
    "ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning"
)


@pytest.fixture
def trl() -> None:
    """Skips the test where TRL is not installed."""
    if find_spec("trl") is None:
        missing("trl")


def asked(lora_r: int = 0, exact: bool = True, **values: Any) -> RunConfig:
    """A run of groups of four by TRL; microbatches of four of the rows below."""
    defaults = {"update__trainer": "trl", "rollout__group_size": 4, "update__microbatch_tokens": 4 * 45}
    return config(lora_r, exact, **{"update__max_grad_norm": 1e9, **defaults, **values})


def trl_trainer(folder: Path, run: RunConfig) -> tuple[Policy, Any]:
    from agentrl.workflow.training.trl_trainer import TrlTrainer

    policy, _ = trainer_of(folder, run)
    return policy, TrlTrainer(policy, run)


def some_alike() -> list[Group]:
    """Two turns with a tool's words between them, lengths of all sorts; the episodes of the second group earn the same."""
    groups = groups_of()
    alike = Group(groups[1].task, tuple(replace(e, reward=0.1) for e in groups[1].episodes))
    return [replace(group, slot=slot) for slot, group in enumerate([groups[0], alike, *groups[2:]])]


def both(folder: Path, tmp_path: Path, run: RunConfig) -> tuple[tuple[Tensor, Any], tuple[Tensor, Any]]:
    """Gradient and update of the same groups, ours and TRL's."""
    _, ours = trainer_of(folder, run)
    _, theirs = trl_trainer(folder, run)
    mine, other = ours.update(some_alike(), 0), theirs.update(some_alike(), 0)
    return (gradient(ours, tmp_path / "ours"), mine), (gradient(theirs, tmp_path / "theirs"), other)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Far closer than the promised 0.9999: what is left is TRL's head, which sums in float32."""
    assert ours.norm() > 0
    assert float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0)) > 0.9999999
    assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5 * float(ours.abs().max()))


# --- the same gradient --------------------------------------------------------------------------------------------------------

NAMES = pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo", "sapo", "gspo"])
OPTIONS = {
    "scaled by the batch": {"algorithm__scale": "batch"},
    "token mean": {"algorithm__aggregation": "token-mean"},
    "sums": {"algorithm__aggregation": "seq-mean-token-sum"},
    "temperature": {"rollout__temperature": 0.7},
    "layers computed again": {"update__gradient_checkpointing": True},
    "KL": {"algorithm__kl_coef": 0.5},
    "KL, LoRA": {"algorithm__kl_coef": 0.5, "lora_r": 4},
    "KL times ratio": {"algorithm__kl_coef": 0.5, "algorithm__kl_estimator": "k3-corrected"},
    "entropy": {"algorithm__aggregation": "token-mean", "algorithm__entropy_coef": 0.1, "update__microbatch_tokens": 10**6},
}


@KINDS
@NAMES
@pytest.mark.slow
def test_trl_update_has_our_gradient(trl: None, folder: Path, tmp_path: Path, name: str, lora_r: int) -> None:
    assert_same_update(folder, tmp_path, asked(lora_r, algorithm__name=name))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.slow
def test_trl_update_has_our_gradient_with_every_option(
    trl: None, folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    assert_same_update(folder, tmp_path, asked(**options))


def assert_same_update(folder: Path, tmp_path: Path, run: RunConfig) -> None:
    """The same gradient, and the same said of it: TRL's means over tokens are those of its microbatches' means."""
    (ours, mine), (theirs, other) = both(folder, tmp_path, run)
    assert_same(ours, theirs)
    assert other.advantages == mine.advantages
    for name, tolerance in {"loss": 1e-4, "grad_norm": 1e-4, "tokens": 0, "rows": 0, "entropy": 0.01, "kl": 0.01}.items():
        assert other.metrics.get(name, 0) == pytest.approx(mine.metrics.get(name, 0), rel=tolerance, abs=1e-5), name


@NAMES
@pytest.mark.slow
def test_trl_update_has_our_gradient_in_float32(trl: None, folder: Path, tmp_path: Path, name: str) -> None:
    (ours, _), (theirs, _) = both(folder, tmp_path, asked(4, exact=False, algorithm__name=name))
    assert float(torch.nn.functional.cosine_similarity(ours.double(), theirs.double(), dim=0)) > 0.99999


LATER: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "gspo")),
    ("grpo", {"algorithm__clip_high": 1e-3, "algorithm__dual_clip": 1.002}),
    ("grpo", {"algorithm__kl_coef": 0.5, "algorithm__kl_estimator": "k3-corrected"}),
]


@pytest.mark.parametrize(("name", "more"), LATER)
@pytest.mark.slow
def test_trl_later_epochs_have_our_ratios_and_clips(
    trl: None, folder: Path, tmp_path: Path, name: str, more: dict[str, Any]
) -> None:
    """Three steps on one batch at a rate at which clips are active: the weights after them."""
    rates = {"update__epochs": 3, "update__learning_rate": 1e-3, "update__max_grad_norm": 1.0}
    run = asked(0, algorithm__name=name, **rates, **more)
    _, ours = trainer_of(folder, run)
    _, theirs = trl_trainer(folder, run)
    before = saved(ours, tmp_path / "before")[0]
    mine, other = ours.update(some_alike(), 0), theirs.update(some_alike(), 0)
    assert len(mine.steps) == len(other.steps) == 3
    for step, theirs_step in zip(mine.steps, other.steps, strict=True):
        assert theirs_step["loss"] == pytest.approx(step["loss"], rel=1e-2, abs=1e-4)
        assert theirs_step["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-2)
    moved = [
        torch.cat([(tensors[key] - before[key]).flatten() for key in sorted(before)])
        for tensors in (saved(ours, tmp_path / "ours")[0], saved(theirs, tmp_path / "theirs")[0])
    ]
    assert float(torch.nn.functional.cosine_similarity(*moved, dim=0)) > 0.999


@pytest.mark.slow
def test_trl_masks_tool_text_but_reads_it(trl: None, folder: Path, tmp_path: Path) -> None:
    """Only TRL's `env_mask` keeps it out. With other words of the tool the gradient is another, and still ours."""
    run = asked()
    _, (before, _) = both(folder, tmp_path / "before", run)
    assert all(False in row.loss_mask[row.prefix + 1 :] for row in rows_of(some_alike()[0].episodes))
    changed = [
        Group(g.task, tuple(replace(e, steps=(e.steps[0], replace(e.steps[1], prompt_ids=(5, 6)))) for e in g.episodes), g.slot)
        for g in some_alike()
    ]
    _, ours = trainer_of(folder, run)
    _, theirs = trl_trainer(folder, run)
    ours.update(changed, 0)
    theirs.update(changed, 0)
    mine, other = gradient(ours, tmp_path / "ours"), gradient(theirs, tmp_path / "theirs")
    assert_same(mine, other)
    assert not torch.allclose(before, other, rtol=1e-3)


# --- as ours ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("adamw_8bit", marks=quantised)])
@KINDS
@pytest.mark.slow
def test_trl_resumes_from_checkpoint_exactly(trl: None, folder: Path, tmp_path: Path, lora_r: int, optimizer: str) -> None:
    more = {"model__lora_dropout": 0.2} if lora_r else {"update__epochs": 2}
    run = asked(lora_r, algorithm__kl_coef=0.1, update__warmup=3, update__optimizer=optimizer, **more)
    _, through = trl_trainer(folder, run)
    go_on(tmp_path, through, trl_trainer(folder, run)[1])
    assert_same_files(tmp_path)
    assert through.learning_rate == pytest.approx(1e-3 * 2 / 4)


@pytest.mark.slow
def test_trl_checkpoint_resumes_in_our_trainer(trl: None, folder: Path, tmp_path: Path) -> None:
    run = asked()
    _, theirs = trl_trainer(folder, run)
    theirs.update(groups_of(), 0)
    sealed_folder.write(tmp_path / "v1", theirs.save)
    _, ours = trainer_of(folder, run)
    ours.load(tmp_path / "v1")
    assert ours.updates == 1
    assert ours.update(groups_of(seed=1), 1).skipped is None


@KINDS
def test_trl_returns_policy_unchanged(trl: None, folder: Path, lora_r: int) -> None:
    """TRL replaces the model's forward, its special tokens, and seeds every generator of the process."""
    policy, trainer = trl_trainer(folder, asked(lora_r, algorithm__kl_coef=0.1))
    with policy.training() as model:
        before = str(vars(model).keys()), model.config.to_dict()  # type: ignore[operator,union-attr]
    random.seed(1)
    torch.manual_seed(1)
    drawn = random.getstate(), torch.random.get_rng_state()
    trainer.update(groups_of(), 0)
    assert random.getstate() == drawn[0]
    assert torch.equal(torch.random.get_rng_state(), drawn[1])
    with policy.training() as model:
        assert (str(vars(model).keys()), model.config.to_dict()) == before  # type: ignore[operator,union-attr]
        assert not any("forward" in vars(module) for module in model.modules())


@KINDS
@pytest.mark.slow
def test_trl_resumes_from_checkpoint_after_infinite_gradient(trl: None, folder: Path, tmp_path: Path, lora_r: int) -> None:
    run = asked(lora_r, exact=False, algorithm__scale="none")
    _, trainer = trl_trainer(folder, run)
    trainer.update(groups_of(), 0)
    sealed_folder.write(tmp_path / "v1", trainer.save)
    far = [Group(g.task, tuple(replace(e, reward=1e30 * (e.reward or 0)) for e in g.episodes)) for g in groups_of()]
    update = trainer.update(far, 1)
    assert update.bad
    assert "the gradient's norm is inf" in (update.skipped or "")
    assert (trainer.iteration, trainer.updates) == (0, 1)
    trainer.load(tmp_path / "v1")
    trainer.update(groups_of(seed=2), 2)
    _, without = trl_trainer(folder, run)
    without.update(groups_of(), 0)
    without.update(groups_of(seed=2), 2)
    assert unchanged(trainer, tmp_path / "next", saved(without, tmp_path / "without"))


def test_trl_skips_update_without_signal(trl: None, folder: Path) -> None:
    _, trainer = trl_trainer(folder, asked())
    update = trainer.update(groups_of(equal=True), 0)
    assert update.skipped == "no advantage differs from 0"
    assert set(update.advantages.values()) == {0.0}


def test_trl_drops_incomplete_group_with_reason(trl: None, folder: Path) -> None:
    _, trainer = trl_trainer(folder, asked())
    groups = some_alike()
    lost = replace(groups[0].episodes[0], status="infra_error")
    first = replace(groups[0], episodes=(lost, *groups[0].episodes[1:]))
    e = groups[2].episodes[0]
    cut = replace(e, steps=(e.steps[0], replace(e.steps[1], new_row="the template could not go on", parent=ROOT)))
    third = replace(groups[2], episodes=(cut, *groups[2].episodes[1:]))
    update = trainer.update([first, groups[1], third, groups[3]], 0)
    assert update.dropped == {
        0: "3 of 4 episodes can train: TRL takes whole groups",
        2: "3 of 4 episodes are one training row: TRL takes whole groups",
    }
    assert (update.skipped, update.metrics["rows"]) == (None, 8)
    assert trainer.update([first], 1).skipped == "no group is whole"


def test_trl_microbatches_fill_token_limit() -> None:
    from agentrl.workflow.training.trl_trainer import rows_at_once

    rows = rows_of([episode for group in groups_of() for episode in group.episodes])
    width = max(row.prefix + 1 for row in rows) + max(len(row.input_ids) - row.prefix - 1 for row in rows)
    assert [rows_at_once(rows, tokens * width, 1) for tokens in (0, 1, 3, 5, 100)] == [1, 1, 2, 4, 16]
    assert [rows_at_once(rows, 10**6, at_least) for at_least in (2, 3, 100)] == [8, 4, 1]


def test_trl_without_memory_is_reported(trl: None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.workflow.training import trl_trainer as module

    def exhausted(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    _, trainer = trl_trainer(folder, asked())
    monkeypatch.setattr(module, "_set_kl_anchor", exhausted)
    with pytest.raises(InfraError, match=r"Lower update\.microbatch_tokens"):
        trainer.update(groups_of(), 0)


# --- what is refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"algorithm.name": "ppo"}, "the algorithm ppo, where TRL's GRPOTrainer has cispo, dapo, dr_grpo, grpo, gspo, sapo"),
        ({"algorithm.name": "rloo"}, "the algorithm rloo"),
        ({"algorithm.name": "opo"}, "the algorithm opo"),
        (
            {"algorithm.name": "cispo", "algorithm.aggregation": "seq-mean-token-mean"},
            "aggregation=seq-mean-token-mean of cispo, where TRL has tok",
        ),
        ({"algorithm.kl_coef": 0.1, "algorithm.kl_in": "reward"}, "algorithm.kl_in=reward with k3"),
        ({"algorithm.kl_coef": 0.1, "algorithm.kl_estimator": "k2"}, "algorithm.kl_in=loss with k2"),
        ({"algorithm.kl_coef": 0.1, "algorithm.kl_target": 0.1}, "algorithm.kl_target"),
        (
            {"algorithm.name": "gspo", "algorithm.kl_coef": 0.1, "algorithm.kl_estimator": "k3-corrected"},
            "algorithm.kl_estimator=k3-corrected with gspo, where TRL multiplies it by the ratio of the whole row",
        ),
        ({"algorithm.entropy_coef": 0.1}, "algorithm.entropy_coef with aggregation=seq-mean-token-mean, where TRL's bonus is"),
        ({"update.epochs": 2, "model.lora_dropout": 0.1}, "update.epochs above 1 with model.lora_dropout"),
        ({"source.runs": ["first"]}, "stored episodes"),
        ({"rollout.max_staleness": 1}, "rollout.max_staleness above 0"),
        ({"update.batch_size": 8}, "update.batch_size"),
        ({"update.epochs": 2, "update.max_kl": 0.1}, "update.max_kl"),
        ({"update.max_sampler_difference": 0.1}, "update.max_sampler_difference"),
        ({"update.mask_truncated": True}, "update.mask_truncated"),
        ({"model.load_in_4bit": True}, "a quantised base"),
    ],
)
def test_trl_refuses_unsupported_options(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match="The trainer trl cannot do this: ") as found:
        trainers.check(resolve_run(build({"update.trainer": "trl", **values})))
    assert said in found.value.message


def test_trl_convention_is_default_and_verl_is_refused() -> None:
    config, origins = resolve(flags={"update.trainer": "trl"})
    assert (config.algorithm.convention, origins["algorithm.convention"]) == ("trl", "flag")
    assert resolve()[0].algorithm.convention == "verl"
    assert RunConfig.model_validate(config.model_dump()) == config
    verl, _ = resolve(assignments=("update.trainer=trl", "algorithm.convention=verl"))
    with pytest.raises(ConfigError, match=r"algorithm\.convention=verl, since TRL supports only the convention trl"):
        trainers.check(resolve_run(verl))


def test_submit_refuses_run_that_trl_cannot_train(own_database: Database, folder: Path) -> None:
    values = {"dataset.name": "arithmetic", "model.path": str(folder), "update.trainer": "trl", "algorithm.name": "ppo"}
    with pytest.raises(ConfigError, match="The trainer trl cannot do this: the algorithm ppo"):
        prepare(own_database, build(values))


def test_trl_loss_type_follows_algorithm() -> None:
    def words(**values: Any) -> tuple[str, str, float]:
        found = grpo_options(resolve_run(asked(**values)))
        return found["loss_type"], found["importance_sampling_level"], found.get("epsilon_high", 0.0)

    assert words() == ("grpo", "token", 0.2)
    assert words(algorithm__name="gspo") == ("grpo", "sequence", 4e-4)
    assert words(algorithm__name="cispo") == ("cispo", "token", 5.0)
    assert words(algorithm__name="sapo") == ("sapo", "token", 0.0)


@pytest.mark.slow
def test_trl_missing_is_one_sentence_with_install_command() -> None:
    """In a process that cannot see TRL: the check says so, and nothing else needed it."""
    program = (
        "import importlib.metadata as metadata, sys\n"
        "def gone(name, real=metadata.version):\n"
        "    if name == 'trl': raise metadata.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "metadata.version = gone\n"
        "sys.modules['trl'] = None\n"
        "import agentrl.workflow.training.trl_trainer\n"
        "from agentrl.workflow.training.trl_options import require_trl\n"
        "try: require_trl()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    hint = install_command("trl")
    assert done.stdout == f"ConfigError The trainer trl needs TRL, which is not installed here. {hint}\n", done


# --- a run --------------------------------------------------------------------------------------------------------------------


def published(database: Database, run: str) -> list[tuple[int, str]]:
    query = "SELECT version, sha256 FROM policies WHERE run_id = (SELECT id FROM runs WHERE name = :run) ORDER BY 1"
    with database.read() as tx:
        return [(version, sha256) for version, sha256 in tx.execute(text(query), {"run": run})]


@pytest.mark.slow
def test_trl_run_killed_before_commit_ends_as_undisturbed(
    trl: None, short_folder: Path, forks: Nursery, migrated_file: Path, folder: Path, tmp_path: Path
) -> None:
    fault = {"AGENTRL_FAULT_DIR": str(tmp_path), "AGENTRL_FAULT": "update.after:3:kill"}
    asked = ("submit", "--dataset", "arithmetic", "--model", str(folder), "--max-tasks", "8", *SMALL, "--trainer", "trl")
    asked = (*asked, "-s", "model.numerics=exact", "--name")
    with forked_stack(short_folder, forks, migrated_file, **fault) as stack:
        stack.agentrl(*asked, "alone", "--wait")
        stack.agentrl(*asked, "killed")
        stack.fork_after("rollout,train", -signal.SIGKILL)
        stack.wait_for("killed")
        assert (tmp_path / "update.after").stat().st_size == 5, "two updates, and two of which one was made again"
        assert [run_rows.describe_run(stack.database, run)["status"] for run in ("alone", "killed")] == ["done", "done"]
        versions = published(stack.database, "alone")
        assert len({sha256 for _, sha256 in versions}) == 3
        assert published(stack.database, "killed") == versions
        query = "SELECT iteration, policy_version, loss, entropy FROM v_iterations WHERE run = 'killed' ORDER BY 1"
        rows = json.loads(stack.agentrl("sql", query, "--json"))
        assert [(row["iteration"], row["policy_version"]) for row in rows] == [(1, 0), (2, 1)]
        assert all(row["entropy"] > 0 for row in rows)
        with stack.database.read() as tx:
            assert tx.execute(text("SELECT count(*) FROM consumptions")).scalar_one() == 64
