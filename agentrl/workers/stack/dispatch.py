"""Sends all messages: an iteration as a chord, single rollout jobs, the train job, a few tool calls, an agent. After a message
was sent, the row of its work records the send. The control loop sends lost messages again.
"""

from collections.abc import Sequence

import redis
from celery import chord
from celery.backends.redis import RedisBackend
from celery.result import AsyncResult, GroupResult
from kombu import Queue
from kombu.exceptions import OperationalError

from agentrl.workers.stack.celery_app import app
from agentrl.workflow.control.scheduler import split_into_headers
from agentrl.workflow.errors import ServiceError
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.store import planning
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.tool_calls import lost_calls

NO_REPLY = ""
MAX_CALLS = 4
"""The most tool calls in a message. With more, one tools worker would take calls that others could run at once."""
MAX_SENDS = 5
"""The number of sends after which a tool call is not sent again. A call that was sent so often may be killing its workers. Its
rollout stops waiting for the call after a while.
"""


def dispatch(db: Database, iteration: int) -> None:
    """Send the iteration as a chord: first its rollout jobs, and after these its train job."""
    groups = planning.start_iteration(db, iteration)
    if not groups:
        send_train(db, iteration)
        return
    jobs = [app.signature("agentrl.rollout", args=[part], immutable=True) for part in split_into_headers(tuple(groups))]
    moment = planning.db_clock_ms(db)
    with _broker_errors("chord"):
        body = chord(jobs)(app.signature("agentrl.train", args=[iteration], immutable=True))
        _unsubscribe(body)
    planning.mark_groups_sent(db, groups, moment)


def _unsubscribe(body: AsyncResult) -> None:
    """End Celery's subscriptions to the results of a chord's jobs: the results are in the rows."""
    if not isinstance(app.backend, RedisBackend):
        return  # the in-memory result store subscribes to nothing
    header = body.parent.results if isinstance(body.parent, GroupResult) else [body.parent]
    for result in (body, *header):
        app.backend.on_result_fulfilled(result)


def send_rollouts(db: Database, groups: Sequence[int]) -> None:
    """Send the rollout jobs of these groups again, outside of a chord."""
    moment = planning.db_clock_ms(db)
    for part in split_into_headers(tuple(groups)):
        with _broker_errors("rollouts"):
            app.send_task("agentrl.rollout", args=[part], ignore_result=True)
    planning.mark_groups_sent(db, groups, moment)


def send_first_train(db: Database, iteration: int) -> None:
    """Send the train job of an iteration whose last groups have just ended. Of several groups that end together, one sends."""
    if not planning.mark_first_train_sent(db, iteration):
        return
    try:
        _send_train_job(iteration)
    except ServiceError:
        planning.forget_train_sent(db, iteration)  # so the control loop sends it as soon as the broker is back
        raise


def send_train(db: Database, iteration: int) -> None:
    moment = planning.db_clock_ms(db)
    _send_train_job(iteration)
    planning.mark_train_sent(db, iteration, moment)


def _send_train_job(iteration: int) -> None:
    with _broker_errors("train"):
        app.send_task("agentrl.train", args=[iteration], ignore_result=True)


def send_calls_again(db: Database) -> None:
    """Send the tool calls again that a lost tools worker may have received. The rollouts of these calls find the results in the
    rows.
    """
    for call in lost_calls(db, MAX_SENDS):
        send_calls([call], NO_REPLY)  # alone, because this call may have killed the worker, and others with it


def send_calls(calls: Sequence[int], reply_to: str, queue: str = "tools") -> None:
    """Send tool calls to a queue, up to MAX_CALLS in each message. When a result is recorded, the tools worker wakes the
    rollout process at `reply_to`. `reply_to` is the address of the rollout process's reply list; `NO_REPLY` if no process
    waits. `queue` is the queue of all tools workers, or that of the worker that has the episode's session.
    """
    for first in range(0, len(calls), MAX_CALLS):
        with _broker_errors("call"):
            _send_to(queue, "agentrl.calls", list(calls[first : first + MAX_CALLS]), reply_to)


def send_agent(episode: int, attempt: int, reply_to: str) -> None:
    """Send the job that runs an attempt's agent. At its end, the agents worker wakes the process at `reply_to`."""
    with _broker_errors("agent"):
        _send_to("agents", "agentrl.agent", episode, attempt, reply_to)


def _send_to(queue: str, job: str, *args: object) -> None:
    """Send a job to a queue. The queue is not declared at each send: on Redis a queue is a list, which needs no declaration."""
    app.send_task(job, args=args, ignore_result=True, queue=Queue(queue, routing_key=queue), declare=())


class _broker_errors:  # noqa: N801 - reads as a phrase: `with _broker_errors("train")`
    """A context manager around a send."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        faultpoint(f"send_{self._what}.before")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # Celery's result store gives up with a plain RuntimeError.
        gave_up = isinstance(error, RuntimeError) and "retry limit exceeded" in str(error).lower()
        if gave_up or isinstance(error, OperationalError | OSError | redis.RedisError):
            raise ServiceError(
                f"The broker does not accept messages: {' '.join(str(error).split())}.", "See `agentrl doctor`."
            ) from error
        if error is None:
            faultpoint(f"send_{self._what}.after")
