"""Finds out which workers, which control loop and which endpoint are running, and returns hints on what to start."""

from collections.abc import Iterable

from agentrl.workers.stack.celery_app import QUEUES, app
from agentrl.workflow.settings import settings
from agentrl.workflow.store import leases
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.endpoint_reads import ENDPOINT

ANSWER_SECONDS = 1.5


def count_workers_by_queue() -> dict[str, int]:
    """Return, for each queue, the number of workers that serve it. Only workers that respond within 1.5 s are counted."""
    served = dict.fromkeys(QUEUES, 0)  # beside them, agents and queues of hosts where somebody serves them
    for queues in _ask_queues().values():
        for queue in queues:
            served[queue] = served.get(queue, 0) + 1
    return served


def has_shared_worker() -> bool:
    """Return whether some worker process serves both rollout and train."""
    return any({"rollout", "train"} <= queues for queues in _ask_queues().values())


def _ask_queues() -> dict[str, set[str]]:
    answers = app.control.inspect(timeout=ANSWER_SECONDS).active_queues() or {}
    return {worker: {queue["name"] for queue in queues} for worker, queues in answers.items()}


def start_command(role: str) -> str:
    """Return the command that starts a worker of that role: on this host, or as a service of the compose stack."""
    return f"docker compose up -d {role}" if settings().image else f"agentrl worker {role}"


def missing_worker_hints(queues: Iterable[str]) -> list[str]:
    """Return, for each of these queues without a worker, a hint on what to start."""
    return [f"No worker serves the queue {queue!r}. Start one: {start_command(queue)}" for queue in queues]


def missing_control_hints(db: Database) -> list[str]:
    """Return a hint on what to start if no control loop is running; otherwise an empty list."""
    there = leases.service_holder(db, "control") is not None
    return [] if there else [f"No control loop is running. Start one: {start_command('control')}"]


def find_endpoint_url(db: Database) -> str | None:
    """Return the endpoint's URL for agents, without `/v1`; None if no endpoint runs. If AGENTRL_ENDPOINT_URL is set, return
    that URL.
    """
    return settings().endpoint_url.rstrip("/") or leases.service_holder(db, ENDPOINT)


def missing_endpoint_hints(db: Database) -> list[str]:
    """Return a hint on what to start if no endpoint is running; otherwise an empty list."""
    there = find_endpoint_url(db) is not None
    return [] if there else [f"No endpoint runs. Start one: {start_command(ENDPOINT)}"]
