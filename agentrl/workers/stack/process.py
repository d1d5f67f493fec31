"""The objects that a worker process has once: its name, its database, its heartbeat, and the request to stop."""

import json
import os
import socket
import threading
from collections.abc import Callable
from functools import cache
from logging import getLogger
from typing import TYPE_CHECKING
from uuid import uuid4

from agentrl.workers.stack.heartbeat import Heartbeat
from agentrl.workflow.config import RunConfig
from agentrl.workflow.errors import ConfigError, ServiceError
from agentrl.workflow.runtime.once_per_process import Once
from agentrl.workflow.settings import settings
from agentrl.workflow.store import train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.leases import record_cpu_after_loss
from agentrl.workflow.store.migrate import open_database

if TYPE_CHECKING:
    from agentrl.workflow.models.policy import Policy

log = getLogger("agentrl.process")
APART_HINT = (
    "Start `agentrl worker rollout` and `agentrl worker train` as separate processes "
    "(embedded: `agentrl down; agentrl up --separate`)"
)
"""The hint for a run that needs rollout and train in separate processes."""

stopping = threading.Event()
"""The event that is set when the process is asked to stop. Rollouts then release their claims.

The main thread handles signals and must never wait for this event: a waiting thread briefly holds the lock that `set` needs.
"""

shared = threading.Event()
"""The event that is set if this process both rolls out and trains."""


threaded = threading.Event()
"""The event that is set while all workers are threads of the user's own process. Such a process calls function agents itself.
"""


def worker_name() -> str:
    """Return the name of this process, `host:pid`."""
    return f"{socket.gethostname()}:{os.getpid()}"


def claim_name() -> str:
    """Return a new name for a claim of this process, `host:pid/N`. A claimed row stores this name as its holder."""
    return f"{worker_name()}/{uuid4().hex[:8]}"


def confirm_base(run: int, policy: "Policy") -> None:
    """Check that the base model in memory is the base model of the run. The first worker that loads the run's base records the
    base's hashes.

    If AGENTRL_DEVICE is `auto` and the model is on the CPU because a GPU failed earlier, write this to the run's events and the
    log. Raise ModelError if the run uses another base model.
    """
    _confirm_hashes(run, policy.base_hash, json.dumps(policy.trained_part), tuple(base_hashes(policy).items()))
    if settings().device == "auto" and policy.device.type == "cpu" and policy.config.numerics != "exact":
        _report_cpu(run)


def base_hashes(policy: "Policy") -> dict[str, str]:
    """Return the hashes of the base model's tokenizer and chat template, and of its own code if it has any."""
    hashes = {"tokenizer": policy.chat.tokenizer_hash, "template": policy.chat.template_hash}
    return hashes | ({"code": policy.code_hash} if policy.code_hash else {})


def refuse_overlap(config: RunConfig) -> None:
    """Check that this process can work for the run. If rollouts of the run continue during updates (`rollout.max_staleness`),
    rollout and train must be separate processes. Raise ConfigError if this process does both; the message says what to start
    instead.
    """
    if shared.is_set() and config.rollout.max_staleness:
        raise no_overlap_error(f"{APART_HINT}, then `agentrl resume {config.name}`.")


def no_overlap_error(hint: str) -> ConfigError:
    """Return the error for a run with `max_staleness` above 0 if one process both rolls out and trains."""
    return ConfigError(
        "rollout.max_staleness above 0 needs rollouts during updates, but here one worker process does both.",
        hint,
    )


@cache
def _confirm_hashes(run: int, base_hash: str, trained: str, hashes: tuple[tuple[str, str], ...]) -> None:
    # Cached per run and base: the record never changes, and each check takes the database's write lock.
    train_commits.confirm_base(database(), run, base_hash, dict(hashes), json.loads(trained))


@cache
def _report_cpu(run: int) -> None:
    if message := record_cpu_after_loss(database(), run, worker_name()):
        log.warning("run %d: %s", run, message)


def write_when_possible(write: Callable[[], object]) -> None:
    """Repeat a write until the database accepts the write or the process stops. If the write were given up earlier, a claim
    would count as lost.
    """
    while True:
        try:
            write()
        except ServiceError as error:
            log.warning("%s", error)
            if stopping.wait(1.0):
                return
        else:
            return


def forget() -> None:
    """Close the singletons of this process and clear its settings, so that the next use reads them again."""
    if heartbeat.made:
        heartbeat().stop()
    if database.made:
        database().close()
    heartbeat.forget()
    database.forget()
    _confirm_hashes.cache_clear()
    _report_cpu.cache_clear()
    for event in (stopping, shared, threaded):
        event.clear()
    settings.cache_clear()


@Once
def database() -> Database:
    return open_database(settings().database)


@Once
def heartbeat() -> Heartbeat:
    """Return the heartbeat of this process. The first call starts it."""
    beat = Heartbeat(database(), settings().lease_seconds)
    beat.start()
    return beat
