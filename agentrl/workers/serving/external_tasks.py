"""The endpoint's routes for external agents. With these routes, a client (the poller) claims tasks and reports how they ended.

`POST /v1/tasks/next` claims the oldest waiting attempt for a lease. `POST /v1/tasks/ID/renew` renews the lease, `POST
/v1/tasks/ID/end` stores how the agent ended, and `POST /v1/tasks/ID/release` gives the attempt back. Each request needs the
operator's key for tasks. Rewards need a second secret, the key for rewards. The key of an attempt, with which the agent calls
its model, gives access to none of these routes.
"""

import asyncio
import hmac
import os
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.workers.http import api_errors
from agentrl.workers.http.api_errors import ApiError
from agentrl.workflow.agents import LLM, keys, read_result
from agentrl.workflow.emitters import emit_variables
from agentrl.workflow.errors import ConfigError, ServiceError
from agentrl.workflow.rewards import MAX_REWARD
from agentrl.workflow.settings import Settings, settings
from agentrl.workflow.store import agent_attempts
from agentrl.workflow.store.agent_attempts import AgentEnd, AgentWork
from agentrl.workflow.store.connect import Database

log = getLogger("agentrl.endpoint")

PATHS = ("/v1/tasks/next", "/v1/tasks/{id}/{action}")
ACTIONS = ("renew", "end", "release")
_ID = re.compile(r"(\d{1,18})-([\w-]{22})", re.ASCII)
REWARDS_KEY = "x-agentrl-rewards-key"
"""The header with the key for rewards."""
MAX_BODY_BYTES = 2**20
MAX_WAIT_SECONDS = 60.0
MAX_WAITING = 256
"""The most requests for a task that wait at once."""
LOOK_SECONDS = 0.5
"""The time between two searches for a waiting attempt, in seconds."""
MAX_ERROR, MAX_OUTPUT, MAX_CLASS = 2000, 8000, 100
_KEY = re.compile(rf"{keys.PREFIX}(?:emit-)?[\w-]{{43}}", re.ASCII)
HIDDEN = "[the attempt's key]"


Shape = TypeVar("Shape", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class NextBody(_Body):
    """The body of a request for a task: the run (empty: any), and how long the request waits for a task, in seconds."""

    run: str = Field("", max_length=200, pattern=r"^[^\x00]*$")
    wait_seconds: float = Field(0.0, ge=0, le=MAX_WAIT_SECONDS)


class EndBody(_Body):
    """The body of a request that ends a task: the agent's answer and rewards, or its error."""

    answer: str | None = None
    rewards: dict[str, float] | float | None = None
    error: str = ""
    error_class: str = ""
    exit_code: int | None = Field(None, ge=-256, le=256)
    output: str = ""


class ReleaseBody(_Body):
    """The body of a request that gives a task back. If it has an `error`, the attempt counts as lost."""

    error: str = ""


@dataclass
class ExternalTasks:
    """The handler of the routes. Use it only in the endpoint's event loop.

    Args:
        url: the URL at which agents reach the endpoint, without `/v1`.
        tasks_key: the key that each request must contain.
        rewards_key: the key for rewards; empty to refuse rewards.
        lease_seconds: the length of a lease, in seconds.
    """

    database: Database
    url: str
    tasks_key: str
    rewards_key: str
    lease_seconds: float
    _waiting: int = 0
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "tasks"))

    async def answer(self, task: str, action: str, rewards_key: str, body: bytes) -> dict[str, Any] | None:
        """Return the JSON response to a request; None for an empty response, because no task waits.

        Call `check_key` before the body is read. If the call is cancelled, a task that it has claimed is given back.

        Args:
            task: the id of the task; empty for `next`.
            action: `next` or one of `ACTIONS`.
            rewards_key: the key for rewards in the request; empty if there is none.
            body: the request's body.

        Raises:
            ApiError: the request is refused.
        """
        pays = self._may_pay(rewards_key)
        if not task:
            return await self._next(_read(NextBody, body), pays)
        match = _ID.fullmatch(task)
        if match is None or action not in ACTIONS:
            raise api_errors.no_route(", ".join(f"POST {path}" for path in PATHS))
        claim = int(match[1]), _worker(match[2])
        if action == "renew":
            _read(_Body, body)
            held = await self._run(agent_attempts.renew_external, *claim, self.lease_seconds)
        elif action == "release":
            error = _clean(_read(ReleaseBody, body).error, MAX_ERROR)
            reason = (error, "lost") if error else ("its poller gave it back", agent_attempts.STOPPED)
            held = await self._run(agent_attempts.give_up_agent, *claim, *reason)
        else:
            held = await self._run(agent_attempts.finish_agent, *claim, _read_end(body, pays))
        if not held:
            raise ApiError(409, "This task is no longer yours: it has ended, or its lease is over.", "task_over", final=True)
        return {"id": task, "lease_seconds": self.lease_seconds}

    def close(self) -> None:
        """End the thread after its current query."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def check_key(self, api_key: str) -> None:
        """Check the key for tasks.

        Raises:
            ApiError: the key is wrong or missing.
        """
        if not self.tasks_key or not _equal(api_key, self.tasks_key):
            message = "Wrong or missing key for tasks. Send AGENTRL_TASKS_KEY of the endpoint: Authorization: Bearer KEY."
            raise ApiError(401, message, "invalid_api_key", final=True)

    def _may_pay(self, key: str) -> bool:
        if key and not (self.rewards_key and _equal(key, self.rewards_key)):
            message = "Wrong key for rewards. Send AGENTRL_REWARDS_KEY of the endpoint as X-Agentrl-Rewards-Key."
            raise ApiError(401, message, "invalid_rewards_key", final=True)
        return bool(key)

    async def _next(self, request: NextBody, pays: bool) -> dict[str, Any] | None:
        if self._waiting >= MAX_WAITING:
            raise api_errors.too_many(f"{MAX_WAITING} requests for a task wait")
        self._waiting += 1
        try:
            deadline = asyncio.get_running_loop().time() + request.wait_seconds
            while True:
                waits = await self._run(agent_attempts.some_external_waits, request.run)
                if waits and (task := await self._claim(request.run, pays)):
                    return task
                if asyncio.get_running_loop().time() >= deadline:
                    return None
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._waiting -= 1

    async def _claim(self, run: str, pays: bool) -> dict[str, Any] | None:
        token, emit_key = secrets.token_urlsafe(16), keys.new_emit_key()
        key = keys.sampling_key(emit_key)
        claim = agent_attempts.claim_external, run, _worker(token), keys.key_hash(key), self.lease_seconds
        claiming = asyncio.ensure_future(self._run(*claim))
        try:
            work = await asyncio.shield(claiming)
        except asyncio.CancelledError:  # the client is gone
            claiming.add_done_callback(lambda done: self._give_back(done, _worker(token)))
            raise
        if work is None:
            return None
        return self._document(work, f"{work.id}-{token}", LLM(f"{self.url}/v1", key, work.run), emit_key if pays else "")

    def _give_back(self, claiming: "asyncio.Future[AgentWork | None]", worker: str) -> None:
        work = None if claiming.cancelled() or claiming.exception() else claiming.result()
        if work is not None:
            reason = "its poller left before it received the task"
            self._thread.submit(agent_attempts.give_up_agent, self.database, work.id, worker, reason)

    def _document(self, work: AgentWork, claim: str, llm: LLM, emit_key: str) -> dict[str, Any]:
        agent = work.agent
        messages = [{"role": message.role, "content": message.content} for message in work.messages]
        task = {"key": work.task, "messages": messages, "metadata": dict(work.metadata), "training": work.training}
        return {
            "id": claim,
            "run": work.run,
            "episode": work.episode,
            "attempt": work.attempt,
            "lease_seconds": self.lease_seconds,
            "limits": {
                "timeout_seconds": agent.timeout_seconds,
                "memory_mb": agent.memory_mb,
                "processes": agent.processes,
                "output_bytes": agent.output_bytes,
            },
            "task": {**task, "resources": dict(work.resources)},
            "base_url": llm.base_url,
            "api_key": llm.api_key,
            "emit_key": emit_key,
            "variables": {**llm.variables, **emit_variables(llm.base_url, emit_key)},
        }

    async def _run(self, query: Any, *args: Any) -> Any:
        """Run a query in the thread for queries.

        Raises:
            ApiError: the database does not answer.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, query, self.database, *args)
        except ServiceError as error:
            log.warning("%s", error)
            raise api_errors.broken(30) from None


def serve_tasks(database: Database, url: str) -> ExternalTasks | None:
    """Return the handler of the routes at an endpoint with this URL; None if the endpoint has no key for tasks."""
    where = settings()
    try:
        key = find_tasks_key(where, create=True)
    except ConfigError as error:
        log.warning("external agents are not served: %s", error)
        return None
    return ExternalTasks(database, url.rstrip("/"), key, where.rewards_key, where.lease_seconds)


def agent_of(task: str) -> int | None:
    """Return the id of the row in `agent_attempts` that the id of a task names; None if it names none."""
    match = _ID.fullmatch(task)
    return int(match[1]) if match else None


def _worker(token: str) -> str:
    return f"external:{token}"


def _equal(key: str, expected: str) -> bool:
    return hmac.compare_digest(key.encode(errors="surrogateescape"), expected.encode())


def _read(shape: type[Shape], body: bytes) -> Shape:
    try:
        return shape.model_validate_json(body.strip() or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:100]
        raise ApiError(400, f"Cannot read the body: {where or 'it'}: {first['msg'][:200]}.", "invalid_request") from None


def _read_end(body: bytes, pays: bool) -> AgentEnd:
    end = _read(EndBody, body)
    if end.rewards is not None and not pays:
        message = "Rewards need the key for rewards: send AGENTRL_REWARDS_KEY of the endpoint as X-Agentrl-Rewards-Key."
        raise ApiError(403, message, "rewards_refused", "permission_error", final=True)
    try:
        result = read_result({"text": end.answer, "rewards": end.rewards})
        if any(abs(reward) > MAX_REWARD for reward in (result.rewards or {}).values()):
            raise ValueError(f"a reward is between -{MAX_REWARD:g} and {MAX_REWARD:g}")
    except (TypeError, ValueError) as problem:
        raise ApiError(400, f"Cannot end the task: {str(problem)[:200]}.", "invalid_request") from None
    error_class = _clean(end.error_class, MAX_CLASS) or ("agent" if end.error else "")
    answer = None if result.answer is None else _KEY.sub(HIDDEN, result.answer)
    error, output = _clean(end.error, MAX_ERROR) or error_class, _clean(end.output, MAX_OUTPUT)
    return AgentEnd(end.exit_code, error_class, error, answer, result.rewards, output)


def _clean(text: str, max_chars: int) -> str:
    """Return the text, cut, and without keys of attempts."""
    return _KEY.sub(HIDDEN, text)[:max_chars].encode("utf-8", "replace").decode()


def find_tasks_key(where: Settings, create: bool) -> str:
    """Return the key for tasks: AGENTRL_TASKS_KEY, or else the random key of this data folder, which only its user can read.

    Args:
        where: the settings.
        create: True to write a random key if there is none.

    Raises:
        ConfigError: there is no key, the file of the key cannot be read or written, or a key has characters that no HTTP header
            can carry.
    """
    for name in ("tasks_key", "rewards_key"):
        if not all("!" <= letter <= "~" for letter in getattr(where, name)):
            message = (
                f"AGENTRL_{name.upper()} must be printable ASCII without spaces: HTTP headers cannot carry other characters."
            )
            raise ConfigError(message, "Set another key.")
    if where.tasks_key:
        return where.tasks_key
    path = where.stack_dir / "tasks.key"
    try:
        if create and not path.exists():
            _write_key(path)
        return path.read_text().strip()
    except OSError as error:
        message = f"There is no key for tasks: cannot use {str(path)!r}: {error.strerror}."
        raise ConfigError(message, "Set AGENTRL_TASKS_KEY to the same secret here and at the endpoint.") from error


def _write_key(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32))
    try:
        os.link(draft, path)  # of two endpoints that start at once, both use the first one's key
    except FileExistsError:
        pass
    finally:
        draft.unlink()
