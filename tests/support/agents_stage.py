"""A group that agents drive, without agents workers: the rollout in a thread of its own, its server over real HTTP.

The agents' rows are played by hand.
"""

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPResponse
from queue import SimpleQueue
from typing import Any

from sqlalchemy import text

from agentrl.workers.jobs.agent_rollout import AgentRollout
from agentrl.workers.jobs.rollout import _drive_rollouts
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.engines import Engine
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import episode_rows
from agentrl.workflow.store.rollout_claims import Fence
from agentrl.workflow.trajectory import Episode
from tests.support.played_runs import EXPIRED, claim, start, submission

AGENT = {"name": "tests.support.agents_stage:nobody"}
LONG_MS = 4_000_000_000_000
"""A moment that never comes."""


@dataclass
class Stage:
    """One claimed group on stage; a crash is `leave`, and the next stage of the same group goes on."""

    db: Database
    group: int
    engine: Engine
    chat: Chat
    max_context: int = 2048
    lost: set[Fence] = field(default_factory=set)

    def enter(self) -> "Stage":
        work = claim(self.db, self.group, lease=EXPIRED)
        experiment = Experiment.load(work.config, work.weights)
        inbox: Any = SimpleQueue()
        self.driver = AgentRollout(self.db, work, experiment, self.engine, self.chat, inbox, self.lost, self.max_context)
        self._thread = threading.Thread(target=_drive_rollouts, args=({self.group: self.driver}, inbox), daemon=True)
        self._thread.start()
        # Each is held, and given to an agent, or to the poller of an external agent.
        agents: Any = self.driver.agents
        wait_for(lambda: agents._expected if hasattr(agents, "_expected") else agents.load())
        return self

    def leave(self) -> None:
        """As if it were killed: nothing more is written."""
        self.driver.lose()
        self.driver.inbox.put(_NOTHING)
        self._thread.join(60)

    def over(self) -> None:
        """Waits until all episodes have ended."""
        self._thread.join(60)
        assert not self._thread.is_alive()


class _Nothing:
    group = completion = None


_NOTHING: Any = _Nothing()


def group_of(db: Database, size: int = 1, agent: Mapping[str, Any] = AGENT, **config: Any) -> int:
    """The only group, of so many episodes, of a new run of that agent."""
    wanted = submission(tasks=1)
    rollout = {**wanted.config["rollout"], "group_size": size, **config.pop("rollout", {})}
    made = replace(wanted, config={**wanted.config, "agent": dict(agent), "rollout": rollout, **config}, group_size=size)
    return start(db, made)[0]


@contextmanager
def staged(stage: Stage) -> Iterator[Stage]:
    """The stage, entered, until the test is done with it."""
    stage.enter()
    try:
        yield stage
    finally:
        stage.leave()


def wait_for(condition: Any, seconds: float = 120.0) -> Any:
    """What the condition gives once it gives anything."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)
    return found


def attempt_held(driver: Any, episode: int) -> int:
    """The attempt whose conversation the rollout has; -1 while it has none."""
    conversation = driver._conversations.get(episode)
    return -1 if conversation is None else int(conversation.attempt)


def run_agent(db: Database, episode: int, key: str = "") -> str:
    """An agents worker claims the newest attempt of the episode; its key."""
    key = key or f"key of {episode}/{time.monotonic_ns()}"
    write(
        db,
        "UPDATE agent_attempts SET status = 'running', key_hash = :hash, lease_until = :until "
        "WHERE episode_id = :episode AND status = 'pending'",
        hash=hashlib.sha256(key.encode()).hexdigest(),
        until=now_ms() + 60_000,
        episode=episode,
    )
    return key


def now_ms() -> int:
    return int(time.time() * 1000)


def end_agent(stage: Stage, episode: int, **said: Any) -> None:
    """The agent of the episode has ended, as its row then says; the rollout is woken."""
    said = {"exit_code": 0, "error_class": "", "error": "", "answer": None, "rewards": None} | said
    said["rewards"] = json.dumps(said["rewards"]) if said["rewards"] is not None else None
    write(
        stage.db,
        "UPDATE agent_attempts SET status = 'ended', exit_code = :exit_code, error_class = :error_class, error = :error, "
        "answer = :answer, rewards = :rewards WHERE episode_id = :episode AND status <> 'lost'",
        episode=episode,
        **said,
    )
    from agentrl.workers.jobs.inbox import InboxEvent

    stage.driver.inbox.put(InboxEvent(stage.group, episode, woken=True))


def write(db: Database, statement: str, **parameters: Any) -> None:
    with db.engine.begin() as tx:
        tx.execute(text(statement), parameters)


def episode_of(db: Database, number: int) -> Episode:
    return episode_rows.find_episode(db, number).episode


@dataclass(frozen=True)
class Reply:
    """What came back: the status, the body, and the names of what was not applied."""

    status: int
    body: bytes
    not_applied: str = field(default="", compare=False)

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def said(self) -> str:
        """What the first choice says."""
        found: str = self.document["choices"][0]["message"]["content"]
        return found

    @property
    def code(self) -> str:
        """The error's code."""
        found: str = self.document["error"]["code"]
        return found


def ask(
    stage: Stage,
    key: str,
    messages: Sequence[Mapping[str, Any]],
    request: str = "",
    retry: int = 0,
    side_call: bool = False,
    **body: Any,
) -> Reply:
    """A call of the model, as the endpoint forwards it."""
    with calling(stage, key, messages, request, retry, side_call, **body) as response:
        return Reply(response.status, response.read(), response.headers["x-agentrl-not-applied"] or "")


@contextmanager
def calling(
    stage: Stage,
    key: str,
    messages: Sequence[Mapping[str, Any]],
    request: str = "",
    retry: int = 0,
    side_call: bool = False,
    **body: Any,
) -> Iterator[HTTPResponse]:
    """The same, while it is being answered; left early it is hung up."""
    host, _, port = stage.driver.server.address.rpartition(":")
    connection = HTTPConnection(host, int(port), timeout=60)
    name = hashlib.sha256((request or str(time.monotonic_ns())).encode()).hexdigest()[:32]
    headers = {"Authorization": f"Bearer {key}", "X-Agentrl-Request": name, "X-Agentrl-Created": "1700000000"}
    if retry:
        headers["X-Agentrl-Retry"] = str(retry)
    if side_call:
        headers["X-Agentrl-Train"] = "0"
    connection.request("POST", "/v1/chat/completions", json.dumps({"model": "m", "messages": list(messages), **body}), headers)
    response = connection.getresponse()
    try:
        yield response
    finally:
        response.close()
        connection.close()


def user(content: str) -> dict[str, str]:
    """A user's message."""
    return {"role": "user", "content": content}
