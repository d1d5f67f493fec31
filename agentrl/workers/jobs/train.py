"""The `train` job: claim a complete iteration, update the policy with its episodes, write the checkpoint, and commit everything
in one transaction.

The checkpoint's folder is complete before the commit. Without the commit, no job uses the folder. The trainer reuses the state
in memory only if it is exactly the published checkpoint. Otherwise, it loads that checkpoint first.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import cache, partial
from logging import getLogger

from agentrl.workers.jobs import broken_checkpoints, search_step
from agentrl.workers.jobs.lost_device import end_if_device_lost
from agentrl.workers.jobs.model_slot import LoadedModel, models
from agentrl.workers.ranks.rank_group import close_group, group_for
from agentrl.workers.ranks.ranked_trainer import RankedTrainer
from agentrl.workers.ranks.rendezvous import Rendezvous, check_hosts
from agentrl.workers.stack.celery_app import app, row_id
from agentrl.workers.stack.dispatch import dispatch, send_train
from agentrl.workers.stack.process import (
    claim_name,
    confirm_base,
    database,
    heartbeat,
    refuse_overlap,
    stopping,
    write_when_possible,
)
from agentrl.workflow import checkpoints, trainers
from agentrl.workflow.checkpoints import epoch_links as links
from agentrl.workflow.errors import AgentRLError, CheckpointError, ConfigError, Fenced, ModelError, ServiceError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.hooks import load_hooks
from agentrl.workflow.models.devices import devices_of_ranks
from agentrl.workflow.models.parameters import count_parameters
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.runtime.log_fields import log_fields
from agentrl.workflow.settings import is_url, settings
from agentrl.workflow.stats.evaluation import evaluate
from agentrl.workflow.stats.group_variance import NO_GROUP_VARIES, choose_groups
from agentrl.workflow.store import epoch_ends, repair, retention, run_names, train_claims, train_commits
from agentrl.workflow.store.iterations import staleness_of
from agentrl.workflow.store.reads import eval_results
from agentrl.workflow.store.repair import Rebuild
from agentrl.workflow.store.train_claims import IterationWork, MoreGroupsPlanned
from agentrl.workflow.store.train_commits import PublishedUpdate, UpdateRecord
from agentrl.workflow.training.reports import Update
from agentrl.workflow.training.trainer import Trainer

log = getLogger("agentrl.train")


@app.task(name="agentrl.train", throws=(ServiceError,))
def train(iteration: int) -> None:
    """Claim the iteration and train on it. Do nothing if the iteration is not ready, is done, or is held by another trainer.

    If too few of the iteration's groups have reward variance, do not train. Instead, send rollout jobs for the groups that were
    added to the iteration.
    """
    work = train_claims.claim_iteration(database(), row_id(iteration), claim_name(), settings().lease_seconds)
    if work is None:
        return
    if isinstance(work, MoreGroupsPlanned):
        _dispatch_more_groups(work)
        return
    with log_fields(run=work.run, iteration=work.iteration, attempt=work.token):
        _train_claimed(work)


def _train_claimed(work: IterationWork) -> None:
    fenced = threading.Event()
    heartbeat().hold_iteration(work.id, work.token, fenced.set)
    try:
        work = train_claims.load_work(database(), work)
        published = _run_iteration(work, fenced)
    except Fenced as error:
        log.info("%s", error)
    except ServiceError as error:  # a service was away for long, or this worker ends: handing back costs no attempt
        log.warning("iteration %d of %s is released: %s", work.iteration, work.run, error)
        write_when_possible(partial(train_claims.hand_back_iteration, database(), work.id, work.token))
    except (ConfigError, ModelError, CheckpointError) as error:
        write_when_possible(partial(_fail_run, work, error))
        _notify_end(work)
    except Exception as error:
        if failure := end_if_device_lost(error, "train"):
            write_when_possible(partial(_fail_run, work, failure))
        else:
            log.exception("%s: iteration %d was not trained", work.run, work.iteration)
            message, attempts = f"{type(error).__name__}: {error}", work.config["rollout"]["max_attempts"]
            train_claims.fail_update(database(), work, message, attempts)
        _notify_end(work)
    else:
        _send_next(work, published)
        _notify_end(work)
        faultpoint("train.end")
    finally:
        heartbeat().drop_iteration(work.id, work.token)


def _notify_end(work: IterationWork) -> None:
    if not work.config["hooks"]:
        return
    try:
        status = run_names.find_run(database(), work.run)["status"]
        for hook in load_hooks(work.config["hooks"]) if status in ("done", "failed") else ():
            hook.on_run_end(work.run, status)
    except Exception:
        log.exception("%s: a hook failed at the end", work.run)


def _dispatch_more_groups(plan: MoreGroupsPlanned) -> None:
    log.info(
        "iteration %d: %d of %d groups have variance, sampling %d more", plan.iteration, plan.varied, plan.groups, plan.more
    )
    try:
        dispatch(database(), plan.iteration)
    except ServiceError as error:
        log.warning("the control loop will send the added groups of iteration %d: %s", plan.iteration, error)
    else:
        faultpoint("sampled_on.end")


@cache
def _update_thread() -> ThreadPoolExecutor:
    """Return the one thread that runs all updates. glibc keeps freed memory per thread: as much as all activations."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")


def _run_iteration(work: IterationWork, fenced: threading.Event) -> PublishedUpdate:
    if work.kind == "search":
        return PublishedUpdate(0, work.id if search_step.advance(work, fenced.is_set) else None)
    if work.kind != "train":
        return _finish_without_update(work)
    update = _rebuild_checkpoint if work.rebuilds else _train_iteration
    run = partial(update, work, Experiment.load(work.config), fenced)
    context = copy_context()  # with the fields of log records
    return _update_thread().submit(lambda: context.run(run)).result()


def _finish_without_update(work: IterationWork) -> PublishedUpdate:
    """End a run that updates no weights: an evaluation or a fork."""
    if work.kind == "eval":
        score = evaluate(work.groups, eval_results.find_right_episodes(database(), work.id))
        train_commits.finish_eval(database(), work, score)
        metrics = {"mean": score.mean, "low": score.low, "high": score.high, "episodes": score.episodes, "errors": score.errors}
        for hook in load_hooks(work.config["hooks"]):
            hook.on_eval_end(work.run, work.policy.version, metrics)
    else:
        train_commits.finish_fork(database(), work)
    return PublishedUpdate(0, None)


def _train_iteration(work: IterationWork, experiment: Experiment, fenced: threading.Event) -> PublishedUpdate:
    config, path = experiment.config, _checkpoint_path(work)
    refuse_overlap(config)
    devices = _devices(experiment)
    with models.use(experiment, work.policy.base, weights=not _has_ranks(experiment, devices)) as loaded:
        confirm_base(work.run_id, loaded.policy)
        loaded.release()  # frees the engine's memory for the update
        trainer = _load_trainer(work, experiment, loaded, devices, fenced)
        loaded.trainer_holds = None  # until the commit makes the state in memory the published one
        for hook in load_hooks(config.hooks):
            hook.on_update_start(work.run, work.iteration)
        started = time.perf_counter()
        faultpoint("update.before")
        update = _run_update(trainer, work)
        faultpoint("update.after")
        if fenced.is_set():
            raise Fenced(f"Iteration {work.iteration} of {work.run} was taken over by another worker.")
        sha256 = "" if update.skipped else checkpoints.write(path, trainer.save)
        record = UpdateRecord(
            metrics=[{**step, "learning_rate": trainer.learning_rate} for step in update.steps],
            advantages=update.advantages,
            dropped=update.dropped,
            path="" if update.skipped else path,
            sha256=sha256,
            skipped=update.skipped or "",
            bad=update.bad,
            seconds=time.perf_counter() - started,
            costs=update.costs,
        )
        try:
            published = train_commits.commit_update(database(), work, record, config.update.max_bad_updates)
        except Fenced:
            _discard_checkpoint(path)
            raise
        if not update.bad:
            loaded.trainer_holds = (work.run_id, record.path or work.policy.path)
    metrics = {"reward": _mean_reward(work), **update.metrics, **update.costs}
    for hook in load_hooks(config.hooks):
        hook.on_update_end(work.run, work.iteration, metrics)
    return published


def _run_update(trainer: Trainer | RankedTrainer, work: IterationWork) -> Update:
    """Run the update on the iteration's groups. With dynamic sampling, use only the chosen groups with variance."""
    if not work.max_groups:
        return trainer.update(work.groups, work.number)
    chosen, left_out = choose_groups(work.groups, work.max_groups)
    update = trainer.update(chosen, work.number) if chosen else Update(skipped=NO_GROUP_VARIES)
    return replace(update, dropped={**left_out, **update.dropped})


def _rebuild_checkpoint(work: IterationWork, experiment: Experiment, fenced: threading.Event) -> PublishedUpdate:
    """Rebuild the run's broken checkpoint by repeating its update. The iteration can then start from the rebuilt checkpoint."""
    rebuild = repair.load_rebuild(database(), work)
    broken = rebuild.broken
    if not checkpoints.find_fault(
        broken.path, broken.sha256, _checkpoint_part(work, broken.path)
    ):  # a person has put the files back
        repair.commit_rebuild(database(), work, broken, broken.path, broken.sha256)
        return PublishedUpdate(broken.version, work.id)
    if not rebuild.groups:
        raise broken_checkpoints.beyond_repair_error(work, rebuild, "it was copied from another run")
    devices = _devices(experiment)
    with models.use(experiment, work.policy.base, weights=not _has_ranks(experiment, devices)) as loaded:
        confirm_base(work.run_id, loaded.policy)
        loaded.release()
        _repeat_update(work, rebuild, experiment, loaded, fenced)
    log.warning("rebuilt checkpoint version %d of %s", broken.version, work.run)
    return PublishedUpdate(broken.version, work.id)


def _repeat_update(
    work: IterationWork, rebuild: Rebuild, experiment: Experiment, loaded: LoadedModel, fenced: threading.Event
) -> None:
    """Repeat the update that made the broken checkpoint, and write the result into a new folder."""
    source = replace(work, number=rebuild.broken.version - 1, policy=rebuild.start, groups=rebuild.groups)
    source = replace(source, max_groups=rebuild.max_groups)
    try:
        trainer = _load_trainer(source, experiment, loaded, _devices(experiment), fenced)
    except CheckpointError as error:
        raise broken_checkpoints.beyond_repair_error(work, rebuild, error.message.rstrip(".")) from error
    loaded.trainer_holds = None
    broken_checkpoints.check_same_update(work, experiment, rebuild, _run_update(trainer, source))
    if fenced.is_set():
        raise Fenced(f"Version {rebuild.broken.version} of {work.run} is being rebuilt by another trainer.")
    path = _checkpoint_path(source, "r")
    sha256 = checkpoints.write(path, trainer.save)
    try:
        repair.commit_rebuild(database(), work, rebuild.broken, path, sha256)
    except Fenced:
        _discard_checkpoint(path)
        raise
    loaded.trainer_holds = (work.run_id, path)


def _fail_run(work: IterationWork, error: Exception) -> None:
    """Fail the run, because every repetition would fail too."""
    reported = isinstance(error, CheckpointError) and not work.rebuilds
    waiting = (
        broken_checkpoints.report_broken(work.run_id, work.policy, _checkpoint_part(work, work.policy.path))
        if reported
        else None
    )
    if waiting is None:
        log.error("%s: %s", work.run, error)
        train_claims.fail_update(database(), work, str(error), max_attempts=1)
        return
    train_claims.hand_back_iteration(database(), work.id, work.token)
    broken_checkpoints.send_rebuild(waiting)


def _devices(experiment: Experiment) -> list[str]:
    """Return the devices of this host on which the run is updated; with several devices or hosts, each has a rank."""
    update = experiment.config.update
    return devices_of_ranks(update.devices, settings().device, experiment.config.model.numerics, update.hosts > 1)


def _has_ranks(experiment: Experiment, devices: Sequence[str]) -> bool:
    return len(devices) > 1 or experiment.config.update.hosts > 1


def _load_trainer(
    work: IterationWork, experiment: Experiment, loaded: LoadedModel, devices: Sequence[str], fenced: threading.Event
) -> Trainer | RankedTrainer:
    """Return a trainer with exactly the state from which this update starts. If it is not in memory, load the checkpoint.

    Ranks are killed when `fenced` is set.
    """
    path, part = work.policy.path, _checkpoint_part(work, work.policy.path)
    key, ready = (work.run_id, path), loaded.trainer
    if ready is None or loaded.trainer_holds != key or (isinstance(ready, RankedTrainer) and not ready.is_alive):
        loaded.trainer, loaded.trainer_holds = None, None  # the trainer holds no state until one is loaded whole
        ready = _start_trainer(work, experiment, loaded.policy, devices, fenced)
        if isinstance(ready, RankedTrainer):
            ready.fenced = fenced
            ready.load(path or None, work.policy.sha256, part)
        elif path:
            checkpoints.read(path, work.policy.sha256, part, partial(ready.load, fresh=part == "start"))
        else:
            ready.load(None)
        if isinstance(ready, RankedTrainer):
            log.info("%s: %s, on each of its ranks", work.run, ready.parameters)
        loaded.trainer = ready
    if isinstance(ready, RankedTrainer):
        ready.fenced = fenced
    return ready


def _start_trainer(
    work: IterationWork, experiment: Experiment, policy: Policy, devices: Sequence[str], fenced: threading.Event
) -> Trainer | RankedTrainer:
    config = experiment.config
    if config.update.hosts > 1:
        check_hosts(config.update.hosts)
        wanted = (config.update.hosts, str(config.update.devices), config.model.numerics)
        group = group_for(devices, Rendezvous(*wanted, database(), fenced, stopping))
        return RankedTrainer(group, policy, config, work.iterations, work.policy.base)
    if len(devices) > 1:
        return RankedTrainer(group_for(devices), policy, config, work.iterations)
    close_group()  # ranks of an earlier run take memory
    trainer = trainers.start(experiment.trainer, policy, config, work.iterations)
    with policy.training() as module:
        log.info("%s: %s", work.run, count_parameters(module))
    return trainer


def _checkpoint_part(work: IterationWork, path: str) -> checkpoints.Part:
    """Return `all` for a checkpoint of this run; `start`, without the optimizer, for one of another run."""
    return "all" if path.endswith(work.key) else "start"


def _discard_checkpoint(path: str) -> None:
    """Delete the checkpoint of a fenced trainer, unless a row names it: then only the commit's reply was lost."""
    if not repair.is_checkpoint_named(database(), path):
        checkpoints.remove(path)


def _mean_reward(work: IterationWork) -> float:
    rewards = [e.reward for group in work.groups for e in group.episodes if e.reward is not None]
    return sum(rewards) / len(rewards) if rewards else 0.0


def _checkpoint_path(work: IterationWork, mark: str = "t") -> str:
    """Return the checkpoint's path. `mark` is `t`, or `r` for a rebuilt one, whose token is a later iteration's."""
    return f"{work.output_dir.rstrip('/')}/v{work.iteration:05d}.{mark}{work.token}.{work.key}"


def _send_next(work: IterationWork, published: PublishedUpdate) -> None:
    try:
        if published.trains is not None:
            send_train(database(), published.trains)
        if published.next_iteration is not None:
            dispatch(database(), published.next_iteration)
        for iteration in published.measured_by:
            dispatch(database(), iteration)
    except ServiceError as error:
        log.warning("the control loop will start what follows iteration %d: %s", work.iteration, error)
    try:
        if not work.rebuilds:
            _remove_leftovers(work)
        _link_epoch(work, published.version)
    except (AgentRLError, OSError) as error:  # the update is committed
        log.warning("files of iteration %d of %s could not be removed, until `agentrl gc`: %s", work.iteration, work.run, error)


def _link_epoch(work: IterationWork, version: int) -> None:
    if work.kind == "train" and not is_url(work.output_dir) and epoch_ends.may_end_epoch(database(), work.run_id, version):
        links.link_epochs(epoch_ends.load_epoch_ends(database(), work.run_id))


def _remove_leftovers(work: IterationWork) -> None:
    checkpoints.remove_rivals(_checkpoint_path(work))
    faultpoint("rivals.removed")
    stale = train_commits.find_optimizer_to_drop(database(), work.run_id, staleness_of(work.config))
    if stale:
        checkpoints.drop_optimizer(stale)
        faultpoint("optimizer.dropped")
    if work.config["update"].get("save_every"):  # runs older than this option lack it
        for path in retention.drop_unsaved(database(), work.run_id):
            checkpoints.remove(path)
