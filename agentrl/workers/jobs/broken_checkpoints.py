"""The handling of unreadable checkpoints: a job marks the checkpoint as broken in the run's rows, and the run's train job
rebuilds it (`train`).
"""

from logging import getLogger
from typing import TYPE_CHECKING

from agentrl.workers.stack.dispatch import send_train
from agentrl.workers.stack.process import database
from agentrl.workflow import checkpoints
from agentrl.workflow.algorithms import credits_alike
from agentrl.workflow.errors import CheckpointError, ConfigError, ServiceError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.store import repair
from agentrl.workflow.store.repair import Rebuild
from agentrl.workflow.store.train_claims import IterationWork
from agentrl.workflow.trajectory import PolicyRef

if TYPE_CHECKING:
    from agentrl.workflow.training.reports import Update

log = getLogger("agentrl.mend")


def report_broken(run_id: int, policy: PolicyRef, part: checkpoints.Part) -> int | None:
    """Verify the policy's checkpoint, and mark it as broken if it is damaged. Raise ServiceError if the checkpoint's state is
    unknown, because the store or the database does not answer or this host has no disk space.

    Returns:
        The id of the iteration whose train job rebuilds the checkpoint. None if the checkpoint is intact, if this host cannot
            read it, or if its run does not train.
    """
    try:
        fault = checkpoints.find_fault(policy.path, policy.sha256, part) if policy.path else ""
    except ConfigError as error:
        log.warning("version %d could not be checked: %s", policy.version, error)
        return None
    if not fault:
        return None
    log.warning("version %d is broken and not used until it is rebuilt: %s", policy.version, fault)
    return repair.mark_broken(database(), run_id, policy.path, fault)


def send_rebuild(iteration: int) -> None:
    """Send the train job of this iteration, which rebuilds the broken checkpoint."""
    try:
        send_train(database(), iteration)
    except ServiceError as error:
        log.warning("the control loop will send train(%d): %s", iteration, error)


def check_same_update(work: IterationWork, experiment: Experiment, rebuild: Rebuild, update: "Update") -> None:
    """Check that the repeated update equals the recorded one. Raise CheckpointError if the repeated update made no optimizer
    step, or its episodes or advantages differ from the recorded ones because code or rewards have changed.
    """
    if update.skipped:
        raise beyond_repair_error(work, rebuild, f"the repeated update makes no optimizer step: {update.skipped}")
    if not credits_alike(experiment.config.algorithm, update.advantages, rebuild.advantages):
        raise beyond_repair_error(
            work, rebuild, "its update cannot be repeated: the recomputed advantages differ from the recorded ones"
        )


def beyond_repair_error(work: IterationWork, rebuild: Rebuild, reason: str) -> CheckpointError:
    """Return the error for a broken checkpoint that cannot be rebuilt. The error's message names the last intact version."""
    broken = rebuild.broken.version
    versions = repair.list_versions_before(database(), work.run_id, broken)
    whole = next((version for version, path, sha256 in versions if not path or not checkpoints.find_fault(path, sha256)), None)
    intact = f"the last intact version is {whole}" if whole is not None else "no earlier version is intact"
    start = f", or train on its episodes: agentrl submit --from-episodes {work.run} --policy {work.run}@{whole}"
    return CheckpointError(
        f"Version {broken} of {work.run!r} is broken and cannot be rebuilt ({reason}); {intact}.",
        f"Put the files back and type `agentrl resume {work.run}`{start if whole is not None else ''}.",
    )
