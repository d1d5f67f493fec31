"""Who is there: which queues have a worker, whether a control loop runs, and what to start where nobody does."""

from workers.app import QUEUES, app
from workflow.store import observe
from workflow.store.connect import Database

ANSWER_SECONDS = 1.5


def served_queues() -> dict[str, int]:
    """Queue -> how many workers answered that they serve it, asked once."""
    served = dict.fromkeys(QUEUES, 0)
    for queues in _answers().values():
        for queue in queues:
            served[queue] = served.get(queue, 0) + 1
    return served


def some_worker_shares() -> bool:
    """Whether a worker answered that it both rolls out and trains."""
    return any({"rollout", "train"} <= queues for queues in _answers().values())


def _answers() -> dict[str, set[str]]:
    """Worker -> the queues that it serves."""
    answers = app.control.inspect(timeout=ANSWER_SECONDS).active_queues() or {}
    return {worker: {queue["name"] for queue in queues} for worker, queues in answers.items()}


def missing_workers(db: Database) -> list[str]:
    """One sentence for each queue without a worker, and for a missing control loop, with what to start."""
    lines = [
        f"No worker serves the queue {queue!r}. Start one: agentrl worker {queue}"
        for queue, workers in served_queues().items()
        if not workers and queue in QUEUES
    ]
    if observe.service_holder(db, "control") is None:
        lines.append("No control loop runs. Start one: agentrl worker control")
    return lines
