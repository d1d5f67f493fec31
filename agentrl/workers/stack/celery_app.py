"""The Celery app. It has four queues, accepts only JSON and acknowledges messages late. So a lost or duplicate message causes
no harm.

A `rollout` job samples episodes, a `tools` job runs a few tool calls, a `train` job runs one update, and an `agents` job runs
one agent. The router accepts these queues and the queues of single tools workers (`tools.<host>`), and refuses all others.
"""

import os
import re
import socket
import threading
from logging import getLogger
from typing import Any
from uuid import uuid4

from celery import Celery
from celery.signals import task_failure
from kombu import Queue
from kombu.transport import TRANSPORT_ALIASES

from agentrl.workers.stack.broker import SOCKET_SCHEME, broker_url, is_in_memory
from agentrl.workflow.errors import ConfigError, ServiceError
from agentrl.workflow.runtime.once_per_process import Once
from agentrl.workflow.settings import Settings, settings

QUEUES = ("rollout", "tools", "train")
"""The queues of every stack."""
AGENTS = "agents"
"""The queue of agents workers, which only runs with an agent need."""
ALL_QUEUES = (*QUEUES, AGENTS)
_HOST_QUEUE = re.compile(r"tools\.[a-z0-9][a-z0-9.-]{0,63}")
_QUEUE_OF_JOB = {"agentrl.rollout": "rollout", "agentrl.calls": "tools", "agentrl.train": "train", "agentrl.agent": AGENTS}
_DAY = 86400
TRANSPORT_ALIASES |= dict.fromkeys(("redis", "rediss"), "agentrl.workers.stack.transport:Transport")


def route_job(name: str, args: Any, kwargs: Any, options: Any, task: Any = None, **kw: Any) -> dict[str, Any]:
    """Return the queue of a job. It is the `tools.<host>` queue that the sender selected, or else the queue that belongs to the
    job's name. Raise ServiceError if the selected queue does not exist.
    """
    wanted_queue = options.get("queue")
    wanted_queue = getattr(wanted_queue, "name", wanted_queue)
    if wanted_queue and _HOST_QUEUE.fullmatch(wanted_queue):
        return {"queue": Queue(wanted_queue, routing_key=wanted_queue)}
    queue = _QUEUE_OF_JOB.get(name, wanted_queue)
    if name.startswith("celery."):
        return {}
    if queue not in ALL_QUEUES:
        raise ServiceError(f"There is no queue {queue!r}.", f"Queues: {', '.join(ALL_QUEUES)}, tools.<host>.")
    return {"queue": queue}


@Once
def own_queue() -> str:
    """Return the name of the queue that only this process reads. It is for tool calls in the sessions of this process."""
    host = re.sub(r"[^a-z0-9.-]", "-", socket.gethostname().lower()).strip(".-")[:32] or "host"
    return f"tools.{host}-{os.getpid()}-{uuid4().hex[:8]}"


def row_id(value: object) -> int:
    """Return the value if it can be a row's id, else raise ConfigError. The check is needed because anybody with access to the
    broker can send messages.
    """
    if type(value) is not int or not 0 < value < 2**63:
        raise ConfigError(f"The job's row id must be a number, not {value!r:.100}.")
    return value


def make_app(where: Settings) -> Celery:
    """Create the app for these settings. Each of the options is necessary: without it, a fault exists after which chords break.
    A test shows each of these faults.
    """
    app = Celery("agentrl")
    app.conf.update(
        **_broker_options(where),
        task_queues=[Queue(name, routing_key=name) for name in ALL_QUEUES],
        task_create_missing_queues=False,
        task_default_queue="rollout",
        task_routes=(route_job,),
        accept_content=["json"],
        task_serializer="json",
        result_serializer="json",
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        task_track_started=False,
        task_ignore_result=False,
        result_expires=3 * _DAY,
        result_chord_expires=14 * _DAY,
        result_backend_always_retry=True,
        result_backend_max_retries=60,
        result_backend_transport_options={
            "global_keyprefix": "agentrl.",
            "retry_policy": {"max_retries": 3, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.5},
        },
        # Celery's default of 120 s for a silent connection would be four leases.
        redis_socket_timeout=10.0,
        redis_socket_connect_timeout=5.0,
        redis_retry_on_timeout=True,
        task_publish_retry_policy={"max_retries": 3, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.5},
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        worker_soft_shutdown_timeout=30,
        worker_hijack_root_logger=False,
        worker_pool_start_method="spawn",
    )
    return app


def _broker_options(where: Settings) -> dict[str, Any]:
    broker = broker_url(where)
    if is_in_memory(where):
        options: dict[str, Any] = {"polling_interval": 0.01}
        return {"broker_url": f"{broker}localhost", "result_backend": "cache+memory://", "broker_transport_options": options}
    options = {
        "visibility_timeout": 6 * 3600,
        "unacked_restore_interval": 5,
        "unacked_restore_throttle": 1,
        "socket_timeout": 10,
        "socket_keepalive": not broker.startswith(SOCKET_SCHEME),
        "health_check_interval": 25,
        "global_keyprefix": "agentrl.",
    }
    return {"broker_url": broker, "result_backend": broker, "broker_transport_options": options}


def use_broker(where: Settings) -> None:
    """Switch the app to the broker of these settings. The caller ensures that no worker of this process is running."""
    app.conf.update(**_broker_options(where))
    app._after_fork()  # its connections are those of the broker before
    app._backend_cache, app._local = None, threading.local()


def log_service_loss(sender: Any = None, exception: BaseException | None = None, **context: Any) -> None:
    """If a job fails because a service does not answer, log one line. Celery logs no traceback: the jobs declare `throws`."""
    if isinstance(exception, ServiceError):
        getLogger("agentrl.app").warning("%s gave up: %s", getattr(sender, "name", "a job"), exception)


task_failure.connect(log_service_loss, weak=False)
app = make_app(settings())
