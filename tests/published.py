"""A run whose policies were really published: real checkpoints of a real model, disturbed instead of trained."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.stored import claim_training, play, submission, update_of
from workflow import mirror
from workflow.config import RunConfig
from workflow.models import base_hash
from workflow.policy import Policy
from workflow.store import planning, training
from workflow.store.connect import Database
from workflow.trainer import Trainer
from workflow.trajectory import PolicyRef


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
        training.commit_update(db, work, update_of(work, path=str(folder), sha256=mirror.write(str(folder), trainer.save)), 3)
        made.append(folder)
    return made


@torch.no_grad()
def disturb(policy: Policy, seed: int = 0) -> None:
    """Moves every trained weight by chance."""
    chance = torch.Generator().manual_seed(seed)
    for parameter in policy.trainable().values():
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=chance))
