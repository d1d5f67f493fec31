"""Checks before a command sends work: a stack or broker is running, each queue has a worker, and each worker has what the run
needs.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from agentrl.cli.console import say, show, show_json
from agentrl.cli.probe_process import check_model, check_update
from agentrl.workflow.errors import AgentRLError, ServiceError, WorkerError
from agentrl.workflow.runtime.shown_text import format_count

if TYPE_CHECKING:
    from agentrl.workers.requests.requirements import Requirements, WorkerCheck
    from agentrl.workers.requests.submit import PreparedRun
    from agentrl.workflow.store.planning import Submission, SubmittedRun

UP_SECONDS = 10.0
"""The longest wait for the responses of the embedded stack's workers, which may still be starting, in seconds."""

START_SECONDS = 60.0
"""The longest wait for the broker in the settings and its services, which may still be starting, in seconds."""
PAUSE_SECONDS = 0.5
"""The pause between two checks for the services of the broker in the settings, in seconds."""

_UNDECIDED = "has not reported whether it can run this"
RESTART_HINT = "Type `agentrl down`. Unfinished runs continue in the new stack"


def start_run(prepared: "PreparedRun", required: bool) -> "tuple[SubmittedRun, list[str]]":
    """Start the services, write the run and send its first messages. Return the run, and remarks on its workers.

    `prepared` is the run. If `required` is True, an error is raised if a queue has no worker, or a worker lacks something that
    the run needs. Raise ServiceError if the broker or the database does not respond, the stack does not start, or a required
    worker is missing. Raise WorkerError if a required worker lacks something that the run needs. After a ServiceError of the
    services or a WorkerError, the run is stored as failed, with the reason; `agentrl resume` can start it later. Raise
    ConfigError if one worker has both the roles rollout and train, but the run does not allow it; the run is then not stored.
    """
    from agentrl.workers.requests import submit as submission
    from agentrl.workers.stack.process import database

    db = database()  # before any workers, which could not open it either
    try:
        missing = start_services(prepared.submission, required)
    except (ServiceError, WorkerError) as error:
        run = submission.write_failed_run(db, prepared, error.message)
        if run.status not in ("failed", "paused"):  # submitted before, and at work or over
            raise
        raise with_resume_hint(error, run.name) from error
    return submission.submit(db, prepared), missing


def with_resume_hint(error: AgentRLError, run: str, options: str = "") -> AgentRLError:
    """Return a copy of the error, for a run that is already stored. The hint of the copy ends with the command `agentrl resume`
    with the `options` that the user typed.
    """
    return type(error)(f"{run}: {error.message}", f"{error.hint.rstrip('.')}, then: agentrl resume {run}{options}")


def start_services(submission: "Submission", required: bool) -> list[str]:
    """Start the embedded stack, or check the broker of the settings. Return remarks on the workers. If `required` is True, an
    error is raised if a queue has no worker, or a worker lacks something that the run needs. Raise ServiceError if the broker
    or the database does not respond, the stack does not start, or a required worker is missing. Raise WorkerError if a required
    worker lacks something that the run needs. Raise ConfigError if one worker has both the roles rollout and train, but the run
    does not allow it.
    """
    from agentrl.workers.requests.requirements import requirements_of
    from agentrl.workflow.store.iterations import staleness_of

    needs = requirements_of(
        submission.config, submission.weights, submission.policy.base, submission.output_dir, rolls_out=not submission.groups
    )
    return ready_workers(submission.name, needs, staleness_of(submission.config) > 0, required, required)


def ready_workers(run: str, needs: "Requirements", separate: bool, there: bool, fit: bool) -> list[str]:
    """Start or check the services for a stored run, as `start_services` does.

    Args:
        separate: True if the roles rollout and train must be in separate processes.
        there, fit: True to raise an error if a queue has no worker, or if a worker lacks something.
    """
    from agentrl.workers.stack import broker, embedded
    from agentrl.workflow.settings import settings

    check_separate(separate)
    if settings().broker_url:
        broker.require_broker(settings())
        return _check_named_broker(needs, there, fit)
    if broker.is_in_memory(settings()):
        say("No Redis or Valkey server was found: all workers share one process, over an in-memory broker.")
        say(f"  {broker.server_hint()}")
    if embedded.find_supervisor(settings()) is not None:
        embedded.ensure_running(settings(), separate=separate)
        _renew_embedded(needs, separate, run)
    elif _start_embedded(needs, separate):
        say(f"Started the embedded stack; its logs are in {settings().stack_dir}.")
    embedded.ensure_running(settings(), separate=separate)  # once more: an idle stack may have ended while this was checked
    return []


def _start_embedded(needs: "Requirements", separate: bool) -> bool:
    """Start the embedded stack, and check the model, the optimizer and the number of devices meanwhile."""
    from agentrl.workers.stack import embedded
    from agentrl.workflow.settings import settings

    config = needs.experiment.config
    with ThreadPoolExecutor(2) as beside:
        looking: list[Future[Any]] = [beside.submit(check_model, config.model, needs.base)]
        looking.append(beside.submit(check_update, config))
        started = embedded.ensure_running(settings(), separate=separate)
        for look in looking:
            look.result()
    return started


def check_separate(separate: bool) -> None:
    """Raise ConfigError if `separate` is True and a worker has both the roles rollout and train."""
    from agentrl.workers.stack import broker, embedded, presence, process
    from agentrl.workflow.settings import settings

    if not settings().broker_url:
        embedded.check_separate(settings(), separate)
    elif separate and broker.is_answering(settings()) and presence.has_shared_worker():
        raise process.no_overlap_error(f"{process.APART_HINT}.")


def _check_named_broker(needs: "Requirements", there: bool, fit: bool) -> list[str]:
    workers, missing, remarks = _ask_named_broker(needs)
    deadline = time.monotonic() + START_SECONDS
    if there and missing:
        say(f"Waiting up to {START_SECONDS:.0f} s for services that may be starting.")
    while there and missing and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
        workers, missing, remarks = _ask_named_broker(needs)
    if there and missing:
        hint = "Start them, or pass --detach to submit the run without workers"
        raise ServiceError(_join_lines("No worker was started.", missing), hint)
    unfit = [line for worker in workers for line in _lack_lines(worker)]
    if fit and unfit:
        raise WorkerError(_join_lines("No worker was started.", unfit), "Add what is missing, and restart those workers")
    return [*missing, *unfit, *remarks, *(line for worker in workers for line in _difference_lines(worker))]


def _ask_named_broker(needs: "Requirements") -> "tuple[list[WorkerCheck], list[str], list[str]]":
    from agentrl.workers.requests.requirements import ask_workers
    from agentrl.workers.stack import presence
    from agentrl.workers.stack.process import database

    with ThreadPoolExecutor(1) as beside:  # both may wait for the slowest worker
        counting = beside.submit(presence.count_workers_by_queue)
        workers = ask_workers(needs)
    served = counting.result()
    silent = [queue for queue in needs.roles if not any(queue in worker.roles for worker in workers)]
    missing = presence.missing_worker_hints(queue for queue in silent if not served.get(queue))
    missing += presence.missing_control_hints(database())
    needs_endpoint = needs.experiment.config.agent is not None and "rollout" in needs.roles
    missing += presence.missing_endpoint_hints(database()) if needs_endpoint else []
    mute = f"{_UNDECIDED}: it is busy, or runs another version of agentrl."
    remarks = [f"The worker of the queue {queue!r} {mute}" for queue in silent if served.get(queue)]
    remarks += [f"{worker.label} {_UNDECIDED}: it is still checking." for worker in workers if not worker.found]
    return workers, missing, remarks


def _renew_embedded(needs: "Requirements", separate: bool, run: str) -> None:
    """Restart the stack with this command's environment if its workers lack something or have other settings."""
    from agentrl.workers.requests.requirements import list_lacks
    from agentrl.workers.stack import embedded
    from agentrl.workflow.settings import settings

    where = settings()
    unfit = list(_list_unfit(needs))
    if not unfit:
        return
    _refuse_beside(run, unfit)
    mine = list_lacks(needs, needs.roles)
    if mine:
        lines = [*unfit, *(f"This command {lack}" for lack in mine)]
        raise WorkerError(
            _join_lines("No worker was started: this command lacks something that the run needs, too.", lines), "Fix that first"
        )
    for line in unfit:
        say(line)
    say("Restarting the embedded stack with this command's environment; no other run uses it.")
    _refuse_beside(run, unfit)  # a run may have begun during the check, which imports plug-ins
    embedded.restart(where, separate)


def _refuse_beside(run: str, unfit: Sequence[str]) -> None:
    from agentrl.workers.stack.process import database
    from agentrl.workflow.store import control_reads

    others = control_reads.list_runs_beside(database(), run)
    if others:
        raise WorkerError(
            _join_lines(f"No worker was started. Other runs use the embedded stack: {', '.join(others)}.", unfit), RESTART_HINT
        )


def _list_unfit(needs: "Requirements") -> Iterator[str]:
    """Yield a sentence for each requirement that the running stack lacks, and for each setting that differs."""
    from agentrl.workers.stack import broker, embedded
    from agentrl.workflow.settings import settings

    other = embedded.changed_variables(settings(), [*needs.variables, *(embedded.PATH_VARIABLES if needs.own else ())])
    if other:
        yield f"The embedded stack differs from this command in: {' and '.join(other)}."
    if broker.is_in_memory(settings()):
        return  # there are no workers to ask
    for worker in _ask_embedded(needs):
        if not worker.found:
            say(f"{worker.label} {_UNDECIDED}; `agentrl watch` will show what is missing.")
        yield from _lack_lines(worker)
        yield from _difference_lines(worker)


def _ask_embedded(needs: "Requirements") -> "list[WorkerCheck]":
    """Return the responses of the embedded stack's workers. If the run has an agent, start an agents worker first. Wait up to
    UP_SECONDS for workers that are still starting.
    """
    from agentrl.workers.requests import requirements
    from agentrl.workers.stack import embedded
    from agentrl.workers.stack.celery_app import AGENTS
    from agentrl.workflow.settings import settings

    deadline = time.monotonic() + UP_SECONDS
    agents = AGENTS in needs.roles
    if agents:
        embedded.agents_file(settings()).touch()
    while True:
        workers = requirements.ask_workers(needs, workers=len(embedded.list_queues(settings())) + agents)
        silent = set(needs.roles) - {role for worker in workers for role in worker.roles}
        if not silent:
            return workers
        if time.monotonic() > deadline:
            say(f"The workers of {', '.join(sorted(silent))} have not started yet; `agentrl watch` will show what is missing.")
            return workers


def _lack_lines(worker: "WorkerCheck") -> Iterator[str]:
    for lack in worker.lacks:
        yield f"{worker.label} {lack}"


def _difference_lines(worker: "WorkerCheck") -> Iterator[str]:
    if worker.other and not worker.lacks:  # else `_lack_lines` has reported the worker
        yield f"{worker.label} differs from this command in: {', '.join(worker.other)}."


def _join_lines(first: str, rest: Sequence[str]) -> str:
    return "\n".join([first, *(f"  {line}" for line in rest)])


def send_run(prepared: Any, wait: bool | None, as_json: bool) -> None:
    """Start the services, write the run and, if `wait` is True, follow the run. If `wait` is False, workers may be missing."""
    from agentrl.cli.follow import follow_to_end
    from agentrl.workers.stack.process import database

    run, missing = start_run(prepared, required=wait is not False)
    if as_json:
        show_json({"run": run.name, "id": run.id, "created": run.created, "iterations": run.iterations})
    else:
        show(run.name)
    counted = format_count(run.iterations, "iteration")
    before = "already existed" + ("" if run.status == "running" else f" and is {run.status}")
    say(f"{run.name}: {'submitted' if run.created else before}, {counted}.")
    for line in missing:
        say(line)
    if wait:
        follow_to_end(database(), run.name)
    elif run.status in ("paused", "failed"):
        say(f"Resume it: agentrl resume {run.name}")
    else:
        say(f"Follow it: agentrl watch {run.name}")
