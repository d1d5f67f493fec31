"""Presence of workers and of a control loop, and hints about what to start."""

from collections.abc import Iterable

from agentrl.workers.stack.celery_app import QUEUES, app
from agentrl.workflow.settings import settings
from agentrl.workflow.store import leases
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.endpoint_reads import ENDPOINT

ANSWER_SECONDS = 1.5


def count_workers_by_queue() -> dict[str, int]:
    """Queue -> number of workers that answered one request and serve it."""
    served = dict.fromkeys(QUEUES, 0)  # beside them, agents and queues of hosts where somebody serves them
    for queues in _ask_queues().values():
        for queue in queues:
            served[queue] = served.get(queue, 0) + 1
    return served


def has_shared_worker() -> bool:
    """Return whether some worker both rolls out and trains."""
    return any({"rollout", "train"} <= queues for queues in _ask_queues().values())


def _ask_queues() -> dict[str, set[str]]:
    """Worker -> the queues that it serves."""
    answers = app.control.inspect(timeout=ANSWER_SECONDS).active_queues() or {}
    return {worker: {queue["name"] for queue in queues} for worker, queues in answers.items()}


def start_command(role: str) -> str:
    """Return the command that starts a worker: on this host, or as a service of the compose stack."""
    return f"docker compose up -d {role}" if settings().image else f"agentrl worker {role}"


def missing_worker_hints(queues: Iterable[str]) -> list[str]:
    """Hints for queues that no worker serves."""
    return [f"No worker serves the queue {queue!r}. Start one: {start_command(queue)}" for queue in queues]


def missing_control_hints(db: Database) -> list[str]:
    """Return a hint if no control loop runs; else empty."""
    there = leases.service_holder(db, "control") is not None
    return [] if there else [f"No control loop is running. Start one: {start_command('control')}"]


def find_endpoint_url(db: Database) -> str | None:
    """Return where agents reach the endpoint, without /v1: AGENTRL_ENDPOINT_URL, or what a running one says; None if none
    runs.
    """
    return settings().endpoint_url.rstrip("/") or leases.service_holder(db, ENDPOINT)


def missing_endpoint_hints(db: Database) -> list[str]:
    """Return a hint if no endpoint runs; else empty."""
    there = find_endpoint_url(db) is not None
    return [] if there else [f"No endpoint runs. Start one: {start_command(ENDPOINT)}"]
