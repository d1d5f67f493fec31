"""The `rollout` job: claim groups, drive their episodes to the end, and release groups that cannot be finished.

One job drives all episodes of its groups from one inbox. The engine and the tools put their results into the inbox. The loop
commits the results and asks `next_action` for the next action. While some episodes wait for tools, others continue to sample.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from logging import getLogger
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from celery.exceptions import Ignore, Reject

from agentrl.workers.jobs import broken_checkpoints
from agentrl.workers.jobs.episode_loop import GroupRollout
from agentrl.workers.jobs.inbox import POLL_SECONDS, Inbox, take_events
from agentrl.workers.jobs.lost_device import end_if_device_lost
from agentrl.workers.jobs.model_slot import LoadedModel, models
from agentrl.workers.stack.celery_app import app, row_id
from agentrl.workers.stack.dispatch import send_first_train
from agentrl.workers.stack.process import (
    claim_name,
    confirm_base,
    database,
    heartbeat,
    refuse_overlap,
    stopping,
    worker_name,
    write_when_possible,
)
from agentrl.workflow import checkpoints, engines
from agentrl.workflow.errors import AgentRLError, CheckpointError, ConfigError, DeviceLost, Fenced, ModelError, ServiceError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.runtime.log_fields import log_fields
from agentrl.workflow.settings import settings
from agentrl.workflow.store import blocked_runs, repair, train_commits
from agentrl.workflow.store import rollout_claims as store
from agentrl.workflow.store.rollout_claims import Fence, GroupWork

if TYPE_CHECKING:
    from agentrl.workers.jobs.agent_rollout import AgentRollout

log = getLogger("agentrl.rollout")
Driver: TypeAlias = "GroupRollout | AgentRollout"


@app.task(name="agentrl.rollout", throws=(ServiceError,))
def rollout(groups: list[int]) -> int:
    """Roll out the groups; return their number if all are finished.

    A group that a live worker holds is left to that worker. If a group is not finished at the end, the job's message is
    acknowledged, but the job does not count as a result for its chord.
    """
    groups = [row_id(group) for group in groups]
    batches = _group_by_run(_claim_groups(groups))
    for batch in batches:
        with log_fields(run=batch[0].run, iteration=batch[0].iteration + 1, attempt=batch[0].fence.attempt):
            _roll_out_groups(batch)
    faultpoint("rollout.end")
    if not store.are_all_closed(database(), groups):
        raise Ignore()
    for run in {batch[0].run_id for batch in batches}:
        if blocked_runs.find_wait_reason(database(), run):
            blocked_runs.wait_no_more(database(), run)
    return len(groups)


def _claim_groups(groups: Sequence[int]) -> list[GroupWork]:
    """Claim the groups that no other worker holds. Raise Reject, which requeues the message, if the process is stopping."""
    works: list[GroupWork] = []
    try:
        for group in groups:
            if stopping.is_set():
                raise Reject("this worker is stopping", requeue=True)
            work = store.claim_group(database(), group, claim_name(), settings().lease_seconds)
            works += [work] if work is not None else []
    except (ServiceError, Reject):
        _hand_back_groups(works)
        raise
    return works


def _group_by_run(works: Sequence[GroupWork]) -> list[list[GroupWork]]:
    runs: dict[int, list[GroupWork]] = {}
    for work in works:
        runs.setdefault(work.run_id, []).append(work)
    return list(runs.values())


def _roll_out_groups(works: Sequence[GroupWork]) -> None:
    """Drive the groups of one run. A failure of one group does not affect the others."""
    lost: set[Fence] = set()
    for work in works:  # begins now: loading a model may take longer than a lease
        heartbeat().hold_group(work.fence, partial(lost.add, work.fence))
    try:
        experiment = Experiment.load(works[0].config, works[0].weights)
        refuse_overlap(experiment.config)
        _fetch_weights(works)
        with models.use(experiment, works[0].policy.base) as loaded:
            confirm_base(works[0].run_id, loaded.policy)
            trained = works[0].kind == "train" or any(work.policy.path for work in works)
            engines.check_weights(loaded.backend, loaded.policy.kind, trained)
            inbox: Inbox = SimpleQueue()
            rollouts = {work.fence.group: _make_driver(work, experiment, loaded, inbox, lost) for work in works}
            _check_code(works[0], experiment)
            try:
                _drive_rollouts(rollouts, inbox)
            finally:  # however a group was lost, or left
                for driver in rollouts.values():
                    driver.close()
    except (ConfigError, ModelError, CheckpointError) as error:
        _fail_run(works, error)
    except ServiceError as error:
        log.warning("%s: cannot roll out now: %s", works[0].run, error)
        _report_wait(works[0].run_id, error)
        _hand_back_groups(works)
    except Exception as error:
        if failure := end_if_device_lost(error, "rollout"):
            _fail_run(works, failure)
            return
        log.exception("%s: no rollout", works[0].run)
        for work in works:
            _count_failure(work, error)
    finally:
        for work in works:
            heartbeat().drop_group(work.fence)


def _make_driver(work: GroupWork, experiment: Experiment, loaded: LoadedModel, inbox: Inbox, lost: set[Fence]) -> Driver:
    chat, engine = loaded.policy.chat.at(work.clock), loaded.engine
    if experiment.config.agent is None:
        return GroupRollout(database(), work, experiment.reading(work.resources), engine, chat, inbox, lost)
    from agentrl.workers.jobs.agent_rollout import AgentRollout  # and with it a web server, which few runs need

    room = engines.window(engine, loaded.policy.max_context)
    return AgentRollout(database(), work, experiment, engine, chat, inbox, lost, room)


def _check_code(work: GroupWork, experiment: Experiment) -> None:
    """Check that this process computes rewards with the code that the run was submitted with."""
    held = _scoring_hash(experiment, anew=False)
    if held in (work.code_hash, ""):
        return
    if _scoring_hash(experiment, anew=True) == work.code_hash:
        message = f"A file of the rewards of {work.run} has changed since the running workers read it."
        raise ConfigError(message, "Restart the workers: agentrl down")
    store.note_code(database(), work.run_id, held)


def _scoring_hash(experiment: Experiment, anew: bool) -> str:
    try:
        return experiment.scoring_hash(anew)
    except OSError:  # a file of the code is gone
        return ""


def _fail_run(works: Sequence[GroupWork], error: AgentRLError) -> None:
    """Fail the run, because every repetition would fail too."""
    broken = {work.policy for work in works} if isinstance(error, CheckpointError) else set()
    waiting: list[int] = []
    try:
        reported = {broken_checkpoints.report_broken(works[0].run_id, policy, "weights") for policy in broken}
        waiting += [iteration for iteration in reported if iteration is not None]
        if not waiting:
            log.error("%s: %s", works[0].run, error)
            train_commits.fail_run(database(), works[0].run_id, _failure_reason(works[0], error))
    except ServiceError as away:  # the checkpoint's state is unknown, so the run does not end: the next worker checks again
        log.warning("%s: %s", works[0].run, away)
    finally:
        _hand_back_groups(works)
    for iteration in waiting:
        broken_checkpoints.send_rebuild(iteration)


def _failure_reason(work: GroupWork, error: AgentRLError) -> str:
    if isinstance(error, ConfigError):  # another worker may differ in its modules or its settings
        return f"The rollout worker {worker_name()} reports: {error}"
    if work.kind == "train" or not work.policy.path or not isinstance(error, CheckpointError):
        return str(error)
    return f"{error.message} {repair.recovery_hint(database(), work.run, work.policy.path)}"


def _report_wait(run_id: int, error: ServiceError) -> None:
    try:
        blocked_runs.wait_for(database(), run_id, str(error))
    except ServiceError as away:  # the service that is away is the database itself
        log.warning("no event was written: %s", away)


def _fetch_weights(works: Sequence[GroupWork]) -> None:
    """Download the weights to this host. All jobs share the sampler, so the sampler itself must not wait for a network."""
    for policy in {work.policy for work in works if work.policy.path}:
        checkpoints.local_part(policy.path, policy.sha256)


def _count_failure(work: GroupWork, error: Exception) -> None:
    attempts = work.config["rollout"]["max_attempts"]
    if store.fail_attempt(database(), work.fence, type(error).__name__, str(error), attempts):
        _send_train_if_ready(work.fence.group)


def _drive_rollouts(rollouts: Mapping[int, Driver], inbox: Inbox) -> None:
    for driver in rollouts.values():
        _run_guarded(driver, driver.start)
    looked = time.monotonic()
    while any(driver.is_live for driver in rollouts.values()):
        if stopping.is_set():
            _hand_back_groups([driver.work for driver in rollouts.values() if driver.is_live])
            return
        events = take_events(inbox, gathers=len(rollouts) > 1 or any(driver.may_gather for driver in rollouts.values()))
        for group, driver in rollouts.items():
            mine = [event for event in events if event.group == group]
            if driver.is_live and mine:
                _run_guarded(driver, partial(driver.handle, mine))
        if time.monotonic() - looked > POLL_SECONDS:  # also while other episodes keep the inbox busy
            looked = time.monotonic()
            for driver in rollouts.values():
                if driver.is_live:
                    _run_guarded(driver, driver.poll_calls)


def _run_guarded(driver: Driver, act: Callable[[], None]) -> None:
    """Run an action of a driver, and handle its failure without affecting other groups.

    If the fence is lost, the group is dropped. If a service is away, the group is released. After any other failure of the
    system, the group loses an attempt.
    """
    try:
        act()
    except Fenced as error:
        log.info("%s", error)
        driver.lose()
    except (ConfigError, ModelError, CheckpointError, DeviceLost):
        raise
    except ServiceError as error:  # the database or the broker was away for long: this costs the group no attempt
        log.warning("group %d is released: %s", driver.work.fence.group, error)
        driver.lose()
        _report_wait(driver.work.run_id, error)
        _hand_back_groups([driver.work])
    except Exception as error:
        log.exception("group %d failed", driver.work.fence.group)
        driver.lose()
        _count_failure(driver.work, error)
    if driver.recorder.has_ended:
        driver.recorder.has_ended = False
        _send_train_if_ready(driver.work.fence.group)


def _send_train_if_ready(group: int) -> None:
    """Send the train job of an ended group's iteration if the iteration's other groups have ended too."""
    try:
        iteration = store.find_ready_iteration(database(), group)
        if iteration is not None:
            send_first_train(database(), iteration)
    except ServiceError as error:
        log.warning("the control loop will send the train job of group %d: %s", group, error)


def _hand_back_groups(works: Sequence[GroupWork]) -> None:
    for work in works:
        write_when_possible(partial(store.hand_back, database(), work.fence))
