"""The strategy "threads": the normal workers of a store as threads of this process, with an in-memory broker. While the run
trains, the whole process has the settings, the database and the model of the run.
"""

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from celery.worker import state

from agentrl.api.store import StoreLocation
from agentrl.workers.jobs.model_slot import models
from agentrl.workers.requests import submit
from agentrl.workers.serving.attempt_keys import AttemptKeys
from agentrl.workers.serving.endpoint import make_server, publish, serve
from agentrl.workers.serving.endpoint_app import Endpoint, EndpointLimits
from agentrl.workers.stack import control_loop, process, worker
from agentrl.workers.stack.celery_app import use_broker
from agentrl.workers.stack.listening import LOOPBACK, bind, url_of
from agentrl.workflow.config import RunConfig
from agentrl.workflow.errors import ConfigError, ServiceError, StateError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.hooks import load_hooks
from agentrl.workflow.models.lookup import check_base
from agentrl.workflow.resolve import resolve
from agentrl.workflow.settings import settings
from agentrl.workflow.store import control_reads, endpoint_reads, leases, planning
from agentrl.workflow.store.connect import Database

IN_MEMORY = {"AGENTRL_BROKER_URL": "", "AGENTRL_REDIS_SERVER": "none"}
READY_SECONDS = 60.0
STOP_SECONDS = 60.0
ELSEWHERE = 'Stop them (agentrl down), or pass strategy="processes".'
_busy = threading.Lock()


@contextmanager
def at_work(place: StoreLocation, variables: Mapping[str, str]) -> Iterator[None]:
    """Run the workers for this store in threads until the `with` block ends. Raise StateError if this process runs such workers
    already, or workers of another process use this store.

    Args:
        variables: environment variables of the workers, added to those of the location.
    """
    if not _busy.acquire(blocking=False):
        raise StateError(
            "Another Trainer is training in threads of this process.", 'Wait for it, or pass strategy="processes".'
        )
    with ExitStack() as stack:
        stack.callback(_busy.release)
        stack.enter_context(_settings_of({**place.variables, **IN_MEMORY, **variables}))
        use_broker(settings())
        stack.enter_context(_control())
        stack.callback(models.close)
        stack.enter_context(_published_endpoint())
        stack.enter_context(_workers())
        yield


def submit_here(file: Path) -> str:
    """Submit the run of a config file, and return the run's name. The worker threads find the run in the database. Raise
    AgentRLError as in `agentrl submit`.
    """
    config, _ = resolve(file, {}, (), os.environ)
    if config.source.given:
        raise ConfigError("Threads cannot train on stored episodes.", 'Pass strategy="processes".')
    _refuse_overlap(config)
    db = process.database()
    prepared = submit.prepare(db, config)
    for remark in prepared.remarks:
        print(remark, file=sys.stderr)
    return submit.submit(db, prepared).name


def resume_here(name: str) -> None:
    """Resume a run that is paused or failed, or whose workers are gone. Raise AgentRLError if the run cannot continue, or this
    process cannot load a part that its config names.
    """
    db = process.database()
    row = control_reads.load_run_to_serve(db, name)
    planning.check_resumable(row)
    check_base(row["base"], row["base_hash"])
    experiment = Experiment.load(row["config"], row["weights"])
    _refuse_overlap(experiment.config)
    for part in ("env", "agent", "judges"):
        getattr(experiment, part)  # raises if it cannot be found here
    load_hooks(experiment.config.hooks)
    planning.resume(db, name)


def _refuse_overlap(config: RunConfig) -> None:
    if config.rollout.max_staleness:
        raise process.no_overlap_error('Pass strategy="processes".')


@contextmanager
def changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process until the `with` ends."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextmanager
def _settings_of(variables: Mapping[str, str]) -> Iterator[None]:
    """Give this process a worker's settings, database and thread switch interval until the `with` ends."""
    interval = sys.getswitchinterval()
    process.forget()
    try:
        with changed_environment(variables):
            sys.setswitchinterval(worker.SWITCH_SECONDS)
            yield
    finally:
        sys.setswitchinterval(interval)
        process.forget()


@contextmanager
def _control() -> Iterator[None]:
    """Hold the lease of the control loop until the `with` ends, so no other control loop sends messages for this store."""
    seconds = 3 * settings().tick_seconds + 2
    deadline = time.monotonic() + seconds + 1
    while not leases.take_service_lease(process.database(), "control", process.worker_name(), seconds):
        if time.monotonic() > deadline:
            raise StateError("Workers of another process are using this store.", ELSEWHERE)
        time.sleep(0.2)
    try:
        yield
    finally:
        with suppress(ServiceError):
            leases.take_service_lease(process.database(), "control", process.worker_name(), 0.0)


@contextmanager
def _workers() -> Iterator[None]:
    process.shared.set()
    process.threaded.set()
    state.should_stop = None
    started: list[threading.Thread] = []
    both, timeout = worker.CONCURRENCY["rollout"] + worker.CONCURRENCY["train"], socket.getdefaulttimeout()
    try:
        agents = settings().agents
        for roles, threads in ((["tools"], worker.CONCURRENCY["tools"]), (["rollout", "train"], both), (["agents"], agents)):
            started.append(_start_worker(roles, threads))  # in sequence: each reads the list of queues when it starts
        started.append(_thread("control", control_loop.run))
        yield
    finally:
        process.stopping.set()
        state.should_stop = os.EX_OK
        deadline = time.monotonic() + STOP_SECONDS
        for thread in started:
            thread.join(max(0.0, deadline - time.monotonic()))
        state.should_stop = None
        socket.setdefaulttimeout(timeout)  # each worker sets it when it stops


def _start_worker(roles: list[str], threads: int) -> threading.Thread:
    """Start a worker thread, and return it when the worker reads its queues."""
    ready = threading.Event()
    controller = worker.make_worker(roles, threads, "WorkController", ready_callback=lambda consumer: ready.set())
    thread = _thread("-".join(roles), controller.start)
    if not ready.wait(READY_SECONDS):
        raise ServiceError(f"The worker of {' and '.join(roles)} did not start.")
    return thread


def _thread(name: str, work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


@contextmanager
def endpoint_thread(db: Database, lease_seconds: float | None = None) -> Iterator[str]:
    """Serve the agents' endpoint in a separate thread, and yield its URL.

    Args:
        lease_seconds: the lease with which the URL is published in the database, in seconds; None: do not publish the URL.
    """
    where, listening = settings(), bind(LOOPBACK, 0)
    keys = AttemptKeys(partial(endpoint_reads.find_places, db))
    limits = EndpointLimits(open_calls=where.endpoint_calls, wait_seconds=where.endpoint_wait_seconds)
    app = Endpoint(keys, limits)
    server, url = make_server(app), url_of(listening)

    async def run() -> None:
        publishing = asyncio.create_task(publish(db, url, lease_seconds)) if lease_seconds else None
        try:
            await serve(app, listening, server)
        finally:
            if publishing:
                publishing.cancel()

    thread = _thread("endpoint", lambda: asyncio.run(run()))
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join(STOP_SECONDS)
        listening.close()


@contextmanager
def _published_endpoint() -> Iterator[None]:
    db, lease = process.database(), settings().lease_seconds
    with ExitStack() as stack:
        url = stack.enter_context(endpoint_thread(db, lease))
        leases.publish_service(db, endpoint_reads.ENDPOINT, url, lease)
        try:
            yield
        finally:
            stack.close()  # first, because its thread publishes
            with suppress(ServiceError):
                leases.publish_service(db, endpoint_reads.ENDPOINT, url, 0.0)
