"""The Celery app: three queues, JSON only, late acknowledgement; a lost or doubled message changes nothing.

`rollout` jobs sample episodes, `tools` jobs run one tool call each, `train` jobs run one update. A router admits these
queues and `tools.<host>`, and refuses the rest.
"""

import re
from typing import Any

from celery import Celery
from kombu import Queue

from workers.broker import SOCKET_SCHEME, broker_url, in_memory
from workflow.errors import ServiceError
from workflow.settings import Settings, settings

QUEUES = ("rollout", "tools", "train")
_HOST_QUEUE = re.compile(r"tools\.[a-z0-9][a-z0-9.-]{0,63}")
_DAY = 86400


def route(name: str, args: Any, kwargs: Any, options: Any, task: Any = None, **kw: Any) -> dict[str, Any]:
    """The queue of a job: that of its name, unless a host's own tools queue was asked for."""
    asked = options.get("queue")
    asked = getattr(asked, "name", asked)
    if asked and _HOST_QUEUE.fullmatch(asked):
        return {"queue": Queue(asked, routing_key=asked)}
    queue = {"agentrl.rollout": "rollout", "agentrl.call": "tools", "agentrl.train": "train"}.get(name, asked)
    if name.startswith("celery."):
        return {}
    if queue not in QUEUES:
        raise ServiceError(f"There is no queue {queue!r}.", f"Queues: {', '.join(QUEUES)}, tools.<host>.")
    return {"queue": queue}


def make_app(where: Settings) -> Celery:
    """The app for these settings. Every option below was measured against a fault that breaks chords without it."""
    broker = broker_url(where)
    app = Celery("agentrl", broker=broker, backend="cache+memory://" if in_memory(where) else broker)
    app.conf.update(
        task_queues=[Queue(name, routing_key=name) for name in QUEUES],
        task_create_missing_queues=False,
        task_default_queue="rollout",
        task_routes=(route,),
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
        task_publish_retry_policy={"max_retries": 3, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.5},
        broker_transport_options={
            "visibility_timeout": 6 * 3600,
            "unacked_restore_interval": 5,
            "unacked_restore_throttle": 1,
            "socket_timeout": 10,
            "socket_keepalive": not broker.startswith(SOCKET_SCHEME),
            "health_check_interval": 25,
            "global_keyprefix": "agentrl.",
        }
        if not in_memory(where)
        else {"polling_interval": 0.01},
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        worker_soft_shutdown_timeout=30,
        worker_hijack_root_logger=False,
        worker_pool_start_method="spawn",
    )
    return app


app = make_app(settings())
