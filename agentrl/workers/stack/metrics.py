"""The route `/metrics` of a process, in Prometheus' text format. The route shows the state of the process. In the control
loop's process, it also shows the state of all work.
"""

import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from logging import getLogger
from typing import Any

from agentrl.workflow.errors import AgentRLError
from agentrl.workflow.settings import Settings
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import open_work

log = getLogger("agentrl.metrics")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PORT_ORDER = ("control", "rollout", "train", "tools", "agents", "endpoint", "ranks")
"""The roles in the order of their ports. The control loop listens on AGENTRL_METRICS_PORT, and each further role on the next
higher port.
"""
REQUEST_SECONDS = 5.0
CONNECTION_SECONDS = 30.0
MAX_CONNECTIONS = 16
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class PrometheusMetric:
    """A metric with one value for each set of labels. It is a counter if its name ends in `_total`; otherwise a gauge."""

    name: str
    help: str
    values: Sequence[tuple[Mapping[str, str], float]]


Collect = Callable[[], Iterable[PrometheusMetric]]
_collectors: list[Collect] = []
"""The functions that other modules of this process have added with `add_collector`."""


def add_collector(collect: Collect) -> None:
    """Add the metrics that `collect` returns to `/metrics`. `collect` is called per request, from any thread."""
    _collectors.append(collect)


def render(metrics: Iterable[PrometheusMetric]) -> str:
    """Return the metrics as text in version 0.0.4 of Prometheus' format."""
    lines = []
    for metric in metrics:
        lines.append(f"# HELP agentrl_{metric.name} {metric.help}")
        lines.append(f"# TYPE agentrl_{metric.name} {'counter' if metric.name.endswith('_total') else 'gauge'}")
        lines += [f"agentrl_{metric.name}{_labels(labels)} {float(value)!r}" for labels, value in metric.values]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    escaped = {name: value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for name, value in labels.items()}
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}" if labels else ""


def collect_process() -> Iterable[PrometheusMetric]:
    """Yield metrics of this process and its machine."""
    usage, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = [
        ({"of": "process"}, usage.ru_utime + usage.ru_stime),
        ({"of": "children"}, children.ru_utime + children.ru_stime),
    ]
    yield PrometheusMetric("cpu_seconds_total", "Processor time of this process, and of its children that have ended.", seconds)
    yield PrometheusMetric("peak_memory_bytes", "Peak memory of this process.", [({}, usage.ru_maxrss * 1024)])
    yield PrometheusMetric("threads", "Threads of this process.", [({}, threading.active_count())])
    yield PrometheusMetric("machine_load", "Load average of the machine over one minute.", [({}, os.getloadavg()[0])])
    yield PrometheusMetric("machine_processors", "Processors of the machine.", [({}, os.cpu_count() or 1)])
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        yield PrometheusMetric(
            "gpu_peak_memory_bytes", "Peak GPU memory of this process.", [({}, torch.cuda.max_memory_reserved())]
        )


def collect_work(db: Database) -> Iterable[PrometheusMetric]:
    """Yield metrics of all work, from the rows: queues, leases, runs, tokens, seconds, failures."""
    counts = open_work.count_work(db)
    queues = [({"queue": row["queue"], "state": state}, row[state]) for row in counts.queues for state in ("held", "waiting")]
    yield PrometheusMetric("work", "Groups, updates and calls that wait for a worker or have a lease.", queues)
    resent = [({"queue": row["queue"]}, row["resent"]) for row in counts.queues]
    yield PrometheusMetric("work_resent", "Messages sent again for open work.", resent)
    yield PrometheusMetric("runs", "Runs by status.", [({"status": row["status"]}, row["n"]) for row in counts.runs])
    events = [({"kind": row["kind"]}, row["n"]) for row in counts.events]
    yield PrometheusMetric("failures_total", "Lost workers; failed updates, groups and reports.", events)
    for name, text, columns in _RUN_METRICS:
        labelled = [
            ({"run": row["run"], **({"of": of} if of else {})}, row[column]) for row in counts.running for of, column in columns
        ]
        yield PrometheusMetric(name, text, [(labels, value) for labels, value in labelled if value is not None])
    sandbox = [({"run": row["run"], "sandbox": row["sandbox"], "end": row["exit_status"]}, row["n"]) for row in counts.sandbox]
    yield PrometheusMetric("sandbox_calls_total", "Programs run in the sandbox, by result.", sandbox)


_RUN_METRICS = (
    ("iterations_done_total", "Iterations of a running run that are done.", (("", "iterations"),)),
    ("tokens_total", "Tokens of a running run's episodes.", (("prompt", "prompt_tokens"), ("sampled", "sampled_tokens"))),
    (
        "seconds_total",
        "Seconds of a running run: its episodes' sampling and tools, its updates.",
        (("generate", "generate_seconds"), ("tools", "tool_seconds"), ("update", "update_seconds")),
    ),
    ("reward", "Mean reward of the last iteration that is done.", (("", "reward"),)),
)


def port_of(where: Settings, roles: Sequence[str]) -> int:
    """Return the port of the metrics of a process with these roles; 0 if metrics are off."""
    return where.metrics_port and where.metrics_port + min(PORT_ORDER.index(role) for role in roles)


def serve_metrics(where: Settings, roles: Sequence[str], db: Callable[[], Database]) -> ThreadingHTTPServer | None:
    """Serve `/metrics` in threads of this process if a port is set. If the port is in use, log a warning and return None.
    `roles` are the roles of this process. `db` is a function that returns the database. Only the control loop's process
    calls `db`, because only its metrics come from the rows.
    """
    port = port_of(where, roles)
    if not port:
        return None
    collectors = [collect_process, *((lambda: collect_work(db()),) if "control" in roles else ())]

    class Handler(_Handler):
        """The HTTP handler for `/metrics` of this process."""

        def collect(self) -> str:
            return render(metric for collect in (*collectors, *_collectors) for metric in collect())

    try:
        server = _Server((where.metrics_host, port), Handler)
    except OSError as error:
        log.warning(
            "cannot serve /metrics at %s:%d: %s. Set AGENTRL_METRICS_PORT to another port.",
            where.metrics_host,
            port,
            error.strerror,
        )
        return None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    log.info("/metrics is at http://%s:%d/metrics", where.metrics_host, port)
    return server


class _Server(ThreadingHTTPServer):
    """A server that limits the number of connections and the duration of each connection."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._deadlines: dict[Any, float] = {}
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle the request in a thread. If there are too many connections, close this one instead."""
        if len(self._deadlines) >= MAX_CONNECTIONS:
            self.shutdown_request(request)
            return
        self._deadlines[request] = time.monotonic() + CONNECTION_SECONDS
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        self._deadlines.pop(request, None)
        super().close_request(request)

    def service_actions(self) -> None:
        """Close the connections that have exceeded CONNECTION_SECONDS. `serve_forever` calls this every half second."""
        for request, deadline in list(self._deadlines.items()):
            if time.monotonic() > deadline:
                with suppress(OSError):  # it was closed meanwhile
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of a request at DEBUG level, instead of a traceback on stderr."""
        log.debug("a request of /metrics failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """The handler of one request. A client that sends nothing for REQUEST_SECONDS is disconnected."""

    timeout = REQUEST_SECONDS
    _collecting = threading.Lock()

    def collect(self) -> str:
        raise NotImplementedError

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._answer(404, "The only path is /metrics.\n")
            return
        try:
            with self._collecting:  # one at a time, so that no client makes many queries at once
                text = self.collect()
        except AgentRLError as error:
            self._answer(503, f"{error}\n")
        else:
            self._answer(200, text)

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE if status == 200 else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: requests are not logged."""
