"""A run whose policies were really published: real checkpoints of a real model, disturbed instead of trained."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from agentrl.workflow import checkpoints
from agentrl.workflow.config import RunConfig
from agentrl.workflow.models.lookup import base_hash
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.store import planning, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.training.trainer import Trainer
from agentrl.workflow.trajectory import PolicyRef
from tests.support.played_runs import claim_training, play, submission, update_of


def published(
    db: Database,
    base: Path,
    out: Path,
    model: dict[str, Any],
    versions: int = 1,
    epochs: int = 1,
    tasks: int = 2,
    name: str = "first",
) -> list[Path]:
    """Plays the run of `epochs` over `tasks`, two in an iteration, up to that version; its checkpoints, oldest first.

    Args:
        model: of the config's section, beside the path.
    """
    wanted = submission(name, tasks=tasks, epochs=epochs)
    section = {**wanted.config["model"], "path": str(base), **model}
    wanted = replace(wanted, config={**wanted.config, "model": section}, output_dir=str(out))
    run = planning.submit(db, replace(wanted, policy=PolicyRef(str(base), base_hash(base)))).id
    config = RunConfig.model_validate(wanted.config)
    policy = Policy.load(config.model, str(base), "cpu")
    trainer = Trainer(policy, config, wanted.iterations)
    made = []
    for version in range(versions):
        iteration = planning.open_iterations(db, run)[0]
        for group in planning.start_iteration(db, iteration):
            play(db, group)
        work = claim_training(db, iteration)
        disturb(policy, seed=version)
        folder = out / f"v{work.number + 1:05d}.t{work.token}.{work.key}"
        train_commits.commit_update(
            db, work, update_of(work, path=str(folder), sha256=checkpoints.write(str(folder), trainer.save)), 3
        )
        made.append(folder)
    return made


@torch.no_grad()
def disturb(policy: Policy, seed: int = 0) -> None:
    """Moves every trained weight by chance."""
    chance = torch.Generator().manual_seed(seed)
    for parameter in policy.trainable().values():
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=chance))
