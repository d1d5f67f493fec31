"""A worker process: `python -m agentrl.workers.stack.worker rollout,train`. `agentrl worker` runs this module too."""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from logging import getLogger
from types import FrameType
from typing import TYPE_CHECKING, Any

from agentrl import __version__
from agentrl.workers.stack.readiness import follow_celery, readiness
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.runtime.gc_pause import pause_gc
from agentrl.workflow.runtime.log_fields import JsonFormatter
from agentrl.workflow.settings import Settings, settings

if TYPE_CHECKING:
    from celery.apps.worker import Worker

SHARED_ROLES = {"rollout", "train"}
ROLES = ("rollout", "tools", "train", "control", "agents", "endpoint", "ranks")
WITHOUT_AGENTS = ROLES[:4]
"""The roles that every run needs."""
FOR_AGENTS = ("endpoint", "agents")
"""The additional roles for a run with an agent."""
MODULES = {
    "rollout": "agentrl.workers.jobs.rollout",
    "tools": "agentrl.workers.jobs.tool_call",
    "train": "agentrl.workers.jobs.train",
    "control": "agentrl.workers.stack.control_loop",
    "agents": "agentrl.workers.agents.agents_job",
    "endpoint": "agentrl.workers.serving.endpoint",
    "ranks": "agentrl.workers.ranks.rank_host",
    "fit": "agentrl.workers.requests.requirements",
}
"""The module with the job of each role. The entry `fit` is not a role: its module checks whether this worker can run a run,
before the run is written.
"""

SUPERVISOR = "AGENTRL_SUPERVISOR"
"""The environment variable with the pid of the supervisor. The supervisor's workers end after that process has ended."""

ORPHAN_SECONDS = 40.0
"""The time that a worker has to release its claims after its supervisor has ended, in seconds."""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The environment variables that configure torch's allocator: the name since torch 2.9 first, then the older names. If an older
name is set, torch uses its value.
"""

SWITCH_SECONDS = 0.0005
"""The switch interval of the interpreter, in seconds; Python's default is 5 ms. The sampler needs the GIL after each operation
of the model, a hundred times per token. At the default and with one other busy thread, sampling took five times as long as
without that thread. A tool call took five times as long too.
"""

CONCURRENCY = {"rollout": 16, "tools": 64, "train": 1}
"""The number of threads for each queue. A process with the queue `tools` runs at most as many tool calls at once as it has
threads. The numbers are high because a rollout job mostly waits for the engine, and a tool call for its tool. For agents, the
number is a setting.
"""


def run(roles: list[str], concurrency: int | None = None, **listening: Any) -> None:
    """Serve the roles in this process until SIGTERM. `concurrency` is the number of threads; None for the sum of the roles'
    defaults. `listening` is the `host` and `port` of an endpoint. Raise ConfigError if a role is unknown, or the roles cannot
    share a process.
    """
    unknown = [role for role in roles if role not in ROLES]
    if unknown or not roles:
        raise ConfigError(f"Unknown worker role: {', '.join(unknown) or 'none given'}.", f"Known: {', '.join(ROLES)}.")
    if len(roles) > 1 and not set(roles) <= SHARED_ROLES:
        raise ConfigError(
            f"The roles {', '.join(roles)} cannot run in one process.",
            "Start an `agentrl worker` for each. Only rollout and train can share one.",
        )
    set_up_logging()
    where = settings()
    getLogger("agentrl.worker").info("starting %s: version %s, %s", ",".join(roles), __version__, _describe_servers(where))
    readiness()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if SHARED_ROLES.intersection(roles):
        _let_segments_grow()
    if SUPERVISOR in os.environ:
        threading.Thread(
            target=_end_with_supervisor, args=[int(os.environ[SUPERVISOR]), roles], name="supervised", daemon=True
        ).start()
    _serve_metrics(where, roles)
    if roles == ["control"]:
        _run_control()
    elif roles == ["ranks"]:
        _run_ranks()
    elif roles == ["endpoint"]:
        import_module(MODULES["endpoint"]).run(**listening)
    else:
        if SHARED_ROLES.intersection(roles):
            _record_load()
        _run_queues(roles, concurrency or sum(CONCURRENCY.get(role, settings().agents) for role in roles))


def _serve_metrics(where: Settings, roles: list[str]) -> None:
    if where.metrics_port:
        from agentrl.workers.stack.metrics import serve_metrics
        from agentrl.workers.stack.process import database

        serve_metrics(where, roles, database)


def _record_load() -> None:
    from agentrl.workers.stack.machine import MachineRecorder

    MachineRecorder().start()


def _describe_servers(where: Settings) -> str:
    from agentrl.workers.stack.broker import shown_url
    from agentrl.workflow.store.connect import database_url

    return f"database {database_url(where.database).render_as_string(hide_password=True)}, broker {shown_url(where)}"


def _let_segments_grow() -> None:
    """Let the memory segments of torch's CUDA allocator grow, unless the environment configures the allocator. Call this before
    torch is imported.

    The sampler's KV cache grows by copies, and each copy is a little larger than the one before. With segments of fixed size,
    the next copy would not fit.
    """
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def set_up_logging() -> None:
    """Log agentrl from level INFO on, other libraries from WARNING on. AGENTRL_LOG selects text or JSON."""
    handler = logging.StreamHandler(sys.stderr)
    as_text = logging.Formatter("%(asctime)s %(levelname).1s %(name)s %(message)s")
    handler.setFormatter(JsonFormatter() if settings().log == "json" else as_text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("agentrl").setLevel(logging.INFO)
    logging.getLogger("celery.app.trace").setLevel(logging.ERROR)  # without warnings of messages that go to another worker


def _end_with_supervisor(supervisor: int, roles: list[str]) -> None:
    """Wait until the supervisor has ended, then end this process. The control worker also stops the private Redis."""
    while os.getppid() == supervisor:
        time.sleep(1.0)
    logging.getLogger("agentrl").warning("the supervisor is gone")
    if roles == ["control"]:
        from agentrl.workers.stack.embedded import end_orphaned_redis

        end_orphaned_redis(settings())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)  # no supervisor is left to do it


def _run_control() -> None:
    from agentrl.workers.stack import control_loop

    _run_without_queue("control", control_loop.run)


def _run_ranks() -> None:
    from agentrl.workers.stack.process import database, stopping

    serve = import_module(MODULES["ranks"]).serve
    _run_without_queue("ranks", lambda: serve(database(), stopping, readiness().confirm, readiness().lose))


def _run_without_queue(name: str, work: Callable[[], None]) -> None:
    """Run `work` until `stopping` is set, which SIGTERM and SIGINT do. Raise what `work` raises."""
    from agentrl.workers.stack.process import database, stopping

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    database()
    # In a thread, because a signal might interrupt this one while it holds the lock that `stop` needs.
    with ThreadPoolExecutor(1, name) as threads:
        threads.submit(work).result()


def _run_queues(roles: list[str], concurrency: int) -> None:
    from celery.signals import worker_shutting_down

    from agentrl.workers.stack.process import database, shared, stopping

    if set(roles) >= SHARED_ROLES:
        shared.set()

    def stop(**kwargs: object) -> None:
        stopping.set()

    worker_shutting_down.connect(stop, weak=False)
    follow_celery()
    sys.setswitchinterval(SWITCH_SECONDS)
    database()  # a database that is not ready is reported now, not in the first job
    worker = make_worker(roles, concurrency)
    worker.start()
    sys.exit(worker.exitcode or 0)


def make_worker(roles: list[str], concurrency: int, kind: str = "Worker", **more: Any) -> "Worker":
    """Return a Celery worker for these roles. The worker uses threads, because one engine and one base serve all jobs. With the
    class `WorkController`, the worker leaves the process's signals, output and logging unchanged.
    """
    from kombu import Queue

    from agentrl.workers.stack.celery_app import app, own_queue

    with pause_gc():
        for name in (*roles, "fit"):
            import_module(MODULES[name])  # registers its job, or its command, with the app
    own = [own_queue()] if "tools" in roles else []
    if own:
        import_module(MODULES["tools"]).limit_calls(concurrency)
    for name in own:
        app.amqp.queues.add(Queue(name, routing_key=name))
    return getattr(app, kind)(
        queues=[*roles, *own],
        pool="threads",
        concurrency=concurrency,
        hostname=f"{'-'.join(roles)}-{os.getpid()}@{socket.gethostname()}",  # %h is expanded on Celery's command line only
        loglevel="WARNING",
        without_mingle=True,
        without_gossip=True,
        without_heartbeat=True,  # it would wait for a lost broker for ever, in the thread that handles SIGTERM
        quiet=True,
        **more,
    )


def run_together(idle: Callable[[], bool], tend: Callable[[], bool]) -> None:
    """Run all roles in this process, with a broker in memory, until `idle()` returns True. Only the endpoint is a separate
    process, because it needs no broker.

    Tools and agents have workers with threads of their own, because rollouts wait for them and could occupy all threads.
    `tend()` is called every second. When it returns True, a run has an agent, and the worker of agents starts.
    """
    from celery.app.trace import setup_worker_optimizations

    from agentrl.workers.stack import control_loop
    from agentrl.workers.stack.celery_app import app
    from agentrl.workers.stack.process import stopping

    setup_worker_optimizations(app)
    _serve_metrics(settings(), ["control"])
    _let_segments_grow()
    with pause_gc():
        for role in WITHOUT_AGENTS:
            import_module(MODULES[role])  # before any worker starts: each reads the list of jobs only once
    tools = make_worker(["tools"], CONCURRENCY["tools"])
    for name, work in (("tools", tools.start), ("control", control_loop.run)):
        threading.Thread(target=work, name=name, daemon=True).start()

    def watch() -> None:
        agents = None
        while not stopping.wait(1.0):
            if tend() and agents is None:
                agents = threading.Thread(target=_run_agents_beside, name="agents", daemon=True)
                agents.start()
            if idle():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    threading.Thread(target=watch, name="idle", daemon=True).start()
    _run_queues(["rollout", "train"], CONCURRENCY["rollout"] + 1)


def _run_agents_beside() -> None:
    make_worker(["agents"], settings().agents).start()


if __name__ == "__main__":
    settings()
    run(sys.argv[1].split(","))
