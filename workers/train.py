"""The `train` job: claim a finished iteration, update the policy on it, write the checkpoint, commit it all at once.

The checkpoint's folder is whole before the commit and means nothing without it. What is in memory is trusted only if it is
exactly the published checkpoint; after anything else the trainer loads that first.
"""

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from logging import getLogger
from pathlib import Path

from workers.app import app
from workers.dispatch import dispatch
from workers.models import Loaded, models
from workers.process import claim_name, confirm_base, database, heartbeat
from workflow import checkpoint
from workflow.config import RunConfig
from workflow.errors import CheckpointError, ConfigError, Fenced, ModelError, ServiceError
from workflow.evaluate import evaluate
from workflow.hooks import load_hooks
from workflow.settings import settings
from workflow.store import training
from workflow.store.training import IterationWork, Published, UpdateRecord
from workflow.trainer import Trainer, Update

log = getLogger("agentrl.train")


@app.task(name="agentrl.train")
def train(iteration: int) -> None:
    """Trains on the iteration, unless it is not ready, done already, or another trainer has it."""
    work = training.claim_iteration(database(), iteration, claim_name(), settings().lease_seconds)
    if work is None:
        return
    fenced = threading.Event()
    heartbeat().hold_iteration(work.id, work.token, fenced.set)
    try:
        published = _conclude(work) if work.kind == "eval" else _thread().submit(_train, work, fenced).result()
    except Fenced as error:
        log.info("%s", error)
    except ServiceError as error:  # the database was away for long: no attempt of the iteration's
        log.warning("iteration %d of %s is handed back: %s", work.number, work.run, error)
        training.hand_back_iteration(database(), work.id, work.token)
    except (ConfigError, ModelError, CheckpointError) as error:
        log.error("%s: %s", work.run, error)
        training.fail_update(database(), work, str(error), max_attempts=1)
    except Exception as error:
        log.exception("%s: iteration %d was not trained", work.run, work.number)
        training.fail_update(database(), work, f"{type(error).__name__}: {error}", work.config["rollout"]["max_attempts"])
    else:
        _go_on(work, published)
    finally:
        heartbeat().drop_iteration(work.id, work.token)


@cache
def _thread() -> ThreadPoolExecutor:
    """All updates run in one thread: glibc keeps what a thread freed for that thread, a copy of the activations in each."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")


def _conclude(work: IterationWork) -> Published:
    training.finish_eval(database(), work, evaluate(work.groups))
    return Published(0, None)


def _train(work: IterationWork, fenced: threading.Event) -> Published:
    config = RunConfig.model_validate(work.config)
    with models.use(config.model, work.policy.base) as loaded:
        confirm_base(work.run_id, loaded.policy)
        trainer = _at(work, config, loaded)
        loaded.trainer_holds = None  # until the commit says that what is in memory is what is published
        started = time.perf_counter()
        update = trainer.update(work.groups, work.number)
        if fenced.is_set():
            raise Fenced(f"Iteration {work.number} of {work.run} was taken over.")
        folder = Path(work.output_dir) / f"v{work.number + 1:05d}.t{work.token}.{work.key}"
        sha256 = "" if update.skipped else checkpoint.write(folder, trainer.save)
        record = _record(work, update, trainer, "" if update.skipped else str(folder), sha256, started)
        try:
            published = training.commit_update(database(), work, record, config.update.max_bad_updates)
        except Fenced:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if not update.bad:
            loaded.trainer_holds = (work.run_id, record.path or work.policy.path)
    metrics = {"reward": _mean_reward(work), **update.metrics}
    for hook in load_hooks(config.hooks):
        hook.on_update_end(work.run, work.number, metrics)
    return published


def _at(work: IterationWork, config: RunConfig, loaded: Loaded) -> Trainer:
    """The trainer at exactly the state that this update starts from."""
    wanted = (work.run_id, work.policy.path)
    if loaded.trainer is None or loaded.trainer_holds != wanted:
        loaded.trainer, loaded.trainer_holds = None, None  # nothing is held until it is loaded whole
        trainer = Trainer(loaded.policy, config)
        trainer.load(Path(work.policy.path) if work.policy.path else None)
        loaded.trainer = trainer
    return loaded.trainer


def _record(work: IterationWork, update: Update, trainer: Trainer, path: str, sha256: str, started: float) -> UpdateRecord:
    slots = {group.task.key: slot for slot, group in enumerate(work.groups)}
    return UpdateRecord(
        metrics=[{**step, "learning_rate": trainer.learning_rate} for step in update.steps],
        advantages=update.advantages,
        dropped={slots[key]: reason for key, reason in update.dropped.items()},
        path=path,
        sha256=sha256,
        skipped=update.skipped or "",
        bad=update.bad,
        seconds=time.perf_counter() - started,
    )


def _mean_reward(work: IterationWork) -> float:
    rewards = [e.reward for group in work.groups for e in group.episodes if e.reward is not None]
    return sum(rewards) / len(rewards) if rewards else 0.0


def _go_on(work: IterationWork, published: Published) -> None:
    stale = training.optimizer_to_drop(database(), work.run_id)
    if stale:
        checkpoint.drop_optimizer(Path(stale))
    if published.next_iteration is None:
        return
    try:
        dispatch(database(), published.next_iteration)
    except ServiceError as error:
        log.warning("the control loop will send iteration %d: %s", work.number + 1, error)
