"""`agentrl agent poll`: asks an endpoint for tasks, and runs a program for each of them.

The program runs like an agent program without a sandbox: in its own folder, with the variables of its model and its task, and
under the limits of the run. The program also gets the task as JSON on its standard input. It does not get the keys of the
poller's process.
"""

import json
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from logging import getLogger
from typing import Any, Self

import httpx2
from pydantic import BaseModel, Field, ValidationError, model_validator

from agentrl.workers.agents import agent_programs, processes
from agentrl.workers.agents.guardian import KILLED, AgentReport
from agentrl.workers.agents.kept_output import hide_keys
from agentrl.workers.agents.processes import AgentUnready
from agentrl.workflow.agents import LLM, AgentTask
from agentrl.workflow.agents.agent_limits import command_of
from agentrl.workflow.config import PROGRAM, AgentConfig
from agentrl.workflow.errors import AgentRLError, ConfigError, ServiceError
from agentrl.workflow.resources import Prompt
from agentrl.workflow.runtime.shown_text import format_count

log = getLogger("agentrl.agents")

WAIT_SECONDS = 20.0
"""How long a request waits at the endpoint for a task, in seconds."""
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 60.0
PATIENCE_SECONDS = 300.0
"""The longest time, in seconds, for which the poller keeps sending the end of a task while the endpoint is unavailable."""
FIRST_PAUSE, MAX_PAUSE = 0.5, 10.0
MAX_BYTES = 8 * 2**20
"""The largest response of the endpoint, in bytes."""
STOP_SECONDS = 30.0


def _program(command: Sequence[str], **limits: float) -> AgentConfig:
    return AgentConfig.model_validate({"name": f"{PROGRAM}{shlex.join(command)}", "unsafe": True, **limits})


class TaskLimits(BaseModel):
    """The limits of a program, as in the run's config."""

    timeout_seconds: float
    memory_mb: int
    processes: int
    output_bytes: int

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.config(["true"])
        return self

    def config(self, command: Sequence[str]) -> AgentConfig:
        """Return the config of a program under these limits."""
        return _program(command, **self.model_dump())


class TaskBody(BaseModel):
    """A task as an agent receives it, without its reference."""

    key: str
    messages: list[dict[str, Any]]
    metadata: dict[str, Any]
    training: bool
    resources: dict[str, str]


class PolledTask(BaseModel):
    """The response of the endpoint to a request for a task."""

    id: str = Field(pattern=r"^[\w-]{1,100}$")
    run: str
    lease_seconds: float = Field(gt=0, le=86_400)
    limits: TaskLimits
    task: TaskBody
    api_key: str
    emit_key: str


TASK_OVER = "the attempt reached its time limit, or was taken over after its lease expired"


class TaskOver(Exception):
    """The exception for a task that has ended, or that the endpoint has taken away from this poller."""


class TaskClient:
    """A client of the endpoint's routes for external agents. Thread-safe.

    Args:
        url: the endpoint's URL, with or without `/v1`.
        tasks_key: the key for tasks.
        rewards_key: the key for rewards; empty if this poller sends no rewards.
    """

    def __init__(self, url: str, tasks_key: str, rewards_key: str = "") -> None:
        self.url, self.pays = url.rstrip("/").removesuffix("/v1"), bool(rewards_key)
        headers = {"Authorization": f"Bearer {tasks_key}"}
        headers |= {"X-Agentrl-Rewards-Key": rewards_key} if rewards_key else {}
        timeout = httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        limits = httpx2.Limits(max_connections=None)
        self._client = httpx2.Client(headers=headers, timeout=timeout, follow_redirects=False, limits=limits)

    def next_task(self, run: str, wait_seconds: float) -> PolledTask | None:
        """Return a task; None if none came within `wait_seconds`. `run` is the name of the run; empty for any run.

        Raises:
            ServiceError: the endpoint is unavailable.
            ConfigError: the endpoint refuses the request, or is no endpoint of agentrl.
        """
        status, body = self._post("next", {"run": run, "wait_seconds": wait_seconds})
        if status == 204:
            return None
        try:
            return PolledTask.model_validate_json(body)
        except ValidationError:
            raise self._no_endpoint("its response is not a task") from None

    def send(self, task: str, action: str, body: Any) -> None:
        """Renew, end or release a task.

        Raises:
            TaskOver: the task is no longer this poller's.
            ServiceError, ConfigError: see `next_task`.
        """
        self._post(f"{task}/{action}", body)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Close the connections."""
        self._client.close()

    def _post(self, path: str, body: Any) -> tuple[int, bytes]:
        content = bytearray()
        try:
            with self._client.stream("POST", f"{self.url}/v1/tasks/{path}", json=body) as response:
                for piece in response.iter_bytes():
                    content += piece
                    if len(content) > MAX_BYTES:
                        raise self._no_endpoint(f"its response has more than {MAX_BYTES} bytes")
        except httpx2.HTTPError as error:
            raise ServiceError(
                f"The endpoint at {self.url} does not answer: {error}.",
                "Check the URL, and that the stack of the endpoint is running.",
            ) from error
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise ConfigError(f"Not a URL: {self.url!r:.200} ({error}).", "Write --url http://HOST:PORT") from error
        if response.status_code in (200, 204):
            return response.status_code, bytes(content)
        reason = _read_reason(bytes(content))
        if response.status_code == 409 and reason:
            raise TaskOver(reason)
        if response.status_code == 429 or response.status_code >= 500:
            raise ServiceError(f"The endpoint at {self.url} does not answer: {response.status_code} {reason}".rstrip())
        if not reason:
            raise self._no_endpoint(f"status {response.status_code}")
        raise ConfigError(f"The endpoint at {self.url} refuses the request: {reason}")

    def _no_endpoint(self, why: str) -> ConfigError:
        return ConfigError(
            f"There is no endpoint of agentrl at {self.url}: {why}.",
            "Write the URL that `agentrl doctor` shows as the endpoint.",
        )


def _read_reason(content: bytes) -> str:
    """Return the message of an error response; empty if it is none of the endpoint's."""
    try:
        return str(json.loads(content)["error"]["message"])[:500]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


@dataclass
class Poller:
    """Threads that ask for tasks, and run a program for each.

    Args:
        command: the program and its arguments.
        run: the name of the run whose tasks are asked for; empty for any run.
        parallel: the most tasks at once.
        max_tasks: the number of tasks after which the poller ends; None to ask until it is stopped.
        report: called with a line for each task that ends.
    """

    client: TaskClient
    command: Sequence[str]
    run: str
    parallel: int
    max_tasks: int | None = None
    report: Callable[[str], None] = print
    failure: Exception | None = None
    _stopping: threading.Event = field(default_factory=threading.Event)
    _at_work: set[str] = field(default_factory=set)
    _begun: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def poll(self) -> None:
        """Ask for tasks until `max_tasks` have ended, or until KeyboardInterrupt. Then give back the tasks whose programs still
        run.

        Raises:
            ConfigError: the endpoint refuses the requests, or the program is not found.
        """
        command_of(_program(self.command))
        threads = [threading.Thread(target=self._poll, name=f"poll-{n}", daemon=True) for n in range(self.parallel)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
        except KeyboardInterrupt:
            self.report(f"Giving back {format_count(len(self._at_work), 'task')}." if self._at_work else "Stopped.")
        finally:
            self._stopping.set()
            deadline = time.monotonic() + STOP_SECONDS
            while self._at_work and time.monotonic() < deadline:
                time.sleep(0.05)
        if self.failure is not None:
            raise self.failure

    def _poll(self) -> None:
        pause = 0.0
        try:
            while not self._stopping.wait(pause) and self._may_begin():
                try:
                    task, pause = self._next(), 0.0
                except ServiceError as error:
                    self._return_turn()
                    if not pause:
                        log.warning("%s", error)
                    pause = min(MAX_PAUSE, max(FIRST_PAUSE, 2 * pause))
                    continue
                if task is None:
                    self._return_turn()
                else:
                    self._work(task)
        except Exception as error:  # noqa: BLE001 - the thread that waits raises it
            self.failure = self.failure or error
            self._stopping.set()

    def _may_begin(self) -> bool:
        """Return whether another task may begin, and count it."""
        with self._lock:
            if self.max_tasks is not None and self._begun >= self.max_tasks:
                return False
            self._begun += 1
            return True

    def _return_turn(self) -> None:
        with self._lock:
            self._begun -= 1

    def _next(self) -> PolledTask | None:
        task = self.client.next_task(self.run, WAIT_SECONDS)
        if task is not None:
            self._at_work.add(task.id)
        return task

    def _work(self, task: PolledTask) -> None:
        try:
            action, body = self._run_task(task)
            self._send(task, action, body)
        finally:
            self._at_work.discard(task.id)

    def _run_task(self, task: PolledTask) -> tuple[str, dict[str, Any]]:
        """Run the program, and return the action and the body that tell the endpoint how it ended."""
        over, done = threading.Event(), threading.Event()
        renewing = threading.Thread(target=self._renew, args=(task, over, done), daemon=True)
        renewing.start()
        keys = [task.api_key, *([task.emit_key] if task.emit_key else [])]
        try:
            report = self._run_program(task, keys, lambda: over.is_set() or self._stopping.is_set())
        except (AgentUnready, ConfigError) as error:
            return "end", {"error_class": "AgentUnready", "error": str(error)}
        except AgentRLError as error:
            return "release", {} if self._stopping.is_set() else {"error": str(error)}
        finally:
            done.set()
        if report is None:
            return ("", {}) if over.is_set() else ("release", {})
        if report.error_class == KILLED:
            return "release", {"error": hide_keys(report.error, keys)}
        body = asdict(report) | {"error": hide_keys(report.error, keys)}
        body["answer"] = None if report.answer is None else hide_keys(report.answer, keys)
        if not self.client.pays:
            body["rewards"] = None
        return "end", body

    def _run_program(self, task: PolledTask, keys: list[str], is_stopped: Callable[[], bool]) -> AgentReport | None:
        agent, given = task.limits.config(self.command), task.task
        resources = {name: Prompt(text) for name, text in given.resources.items()}
        agent_task = AgentTask(given.key, given.messages, given.metadata, None, given.training, resources)
        llm = LLM(f"{self.client.url}/v1", task.api_key, task.run)
        with agent_programs.placed(agent, agent_task, llm, {}, task.emit_key) as launch:
            order = replace(launch.order(agent, agent_task, keys), stdin=f"{launch.files}/task.json")
            return processes.run(order, launch.spec(agent), is_stopped)

    def _renew(self, task: PolledTask, over: threading.Event, done: threading.Event) -> None:
        """Renew the task's lease until it is done. Set `over` if the task is no longer this poller's."""
        renewed = time.monotonic()
        while not done.wait(min(task.lease_seconds / 3, max(0.1, renewed + task.lease_seconds - time.monotonic()))):
            try:
                self.client.send(task.id, "renew", {})
                renewed = time.monotonic()
            except ServiceError:
                if time.monotonic() - renewed > task.lease_seconds:
                    over.set()
            except (TaskOver, ConfigError):
                over.set()
            if over.is_set():
                return

    def _send(self, task: PolledTask, action: str, body: dict[str, Any]) -> None:
        """Tell the endpoint how the task ended. While the endpoint is unavailable, send it again."""
        if not action:
            self.report(f"{task.run} {task.task.key}: {TASK_OVER}")
            return
        deadline, pause = time.monotonic() + PATIENCE_SECONDS, FIRST_PAUSE
        while True:
            try:
                self.client.send(task.id, action, body)
                break
            except TaskOver:
                self.report(f"{task.run} {task.task.key}: {TASK_OVER}")
                return
            except ServiceError as error:
                if self._stopping.is_set() or time.monotonic() > deadline:
                    log.warning("%s", error)
                    return
            time.sleep(pause)
            pause = min(MAX_PAUSE, 2 * pause)
        with suppress(KeyError):
            ended = body.get("error_class") or "ended"
            self.report(f"{task.run} {task.task.key}: {'given back' if action == 'release' else ended}")
