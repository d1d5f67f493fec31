"""The episodes of a `serve` run, in the process that serves them: it opens them for clients, drives and ends them.

One thread does this work, like a rollout job. `AgentRollout` drives each episode, and the episode's client takes the place of
an agent. The serving threads queue their orders for this thread and wait for futures.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from logging import getLogger
from queue import SimpleQueue

from agentrl.workers.jobs.agent_rollout import AgentRollout
from agentrl.workers.jobs.inbox import POLL_SECONDS, Inbox, InboxEvent, take_events
from agentrl.workers.jobs.sampling_server import SamplingServer
from agentrl.workers.stack.heartbeat import Heartbeat
from agentrl.workflow import engines
from agentrl.workflow.agents.keys import key_hash, new_emit_key, sampling_key
from agentrl.workflow.errors import (
    AgentRLError,
    ConfigError,
    DeviceLost,
    Fenced,
    InfraError,
    ModelError,
    ServiceError,
    StateError,
)
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.inference.open_policy import OpenPolicy
from agentrl.workflow.settings import settings
from agentrl.workflow.store import agent_attempts, agent_holds, rollout_claims, served_runs
from agentrl.workflow.store.agent_attempts import AgentEnd
from agentrl.workflow.store.agent_holds import AgentState
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.rollout_claims import Fence
from agentrl.workflow.store.served_runs import ServedEpisode, ServedRun

log = getLogger("agentrl.serve")
FORGET_SECONDS = 3600.0
"""The time between two searches for episodes whose retention time is over, in seconds."""
REPEAT_SECONDS = 30.0
"""The time after which a warning with an unchanged reason is logged again, in seconds."""
MAX_REASON = 500
"""The most characters of a failure's reason."""


@dataclass(frozen=True, slots=True)
class OpenEpisode:
    """An episode that accepts requests, and the key with which its annotations are sent."""

    episode: ServedEpisode
    emit_key: str

    @property
    def id(self) -> int:
        """The id of the episode."""
        return self.episode.id

    @property
    def key(self) -> str:
        """The API key with which the episode's requests are forwarded."""
        return sampling_key(self.emit_key)


@dataclass(frozen=True, slots=True)
class _Clients:
    """The clients of a served group, in the place of agents. agentrl does not start clients; their rows say when they have
    ended.
    """

    db: Database
    fence: Fence

    def give(self, episodes: Sequence[int]) -> None:
        """Do nothing: the client has connected already."""

    def load(self, episodes: Collection[int] | None = None) -> dict[int, AgentState]:
        """Return the state of each episode's client.

        While this process serves a client, the client never counts as lost, even if its lease expired while the machine slept.
        """
        states = agent_holds.load_agents(self.db, self.fence.group, settings().lease_seconds, episodes)
        return {episode: replace(state, is_overdue=False) for episode, state in states.items()}

    def send_overdue(self, states: Collection[AgentState]) -> None:
        """Do nothing: clients are not started by messages."""

    def forget(self) -> None:
        """Do nothing: clients send no wake-up messages."""


@dataclass
class ServedEpisodes:
    """The driver of a `serve` run. Call `start` first, then `open` and `end` from any thread, and `close` at the end.

    Args:
        experiment: the run's config with its plug-ins.
        policy: the policy that samples.
        server: the server that receives the forwarded requests.
        forgets: True if episodes are deleted when they end.
        has_upstream: True if the user named the server that samples by `--upstream`.
    """

    db: Database
    run: ServedRun
    experiment: Experiment
    policy: OpenPolicy
    server: SamplingServer
    forgets: bool = False
    has_upstream: bool = False
    lost: threading.Event = field(default_factory=threading.Event)
    """The event that is set when this process must stop serving, because the run is over (for example by `agentrl cancel`) or
    the device is lost.
    """
    failure: DeviceLost | None = None
    """The device error because of which this process cannot sample and must end; None before."""
    count: int = 0
    """The number of episodes that this process has opened."""
    _inbox: Inbox = field(default_factory=SimpleQueue)
    _orders: deque[Callable[[], None]] = field(default_factory=deque)
    _rollouts: dict[int, AgentRollout] = field(default_factory=dict)
    _opened: dict[int, ServedEpisode] = field(default_factory=dict)
    _ending: dict[int, AgentEnd] = field(default_factory=dict)
    """How each client ended its open episode (answer and rewards), by episode. An entry is kept until all rows of the end are
    written.
    """
    _ended: dict[int, Future[None]] = field(default_factory=dict)
    _lost_groups: set[Fence] = field(default_factory=set)
    _lost_runs: Set[int] = frozenset()
    _closing: threading.Event = field(default_factory=threading.Event)
    _logged: tuple[str, float] = ("", 0.0)
    """The last warning that a service does not answer, and when it was logged, on the monotonic clock."""

    def __post_init__(self) -> None:
        self._heartbeat = Heartbeat(self.db, settings().lease_seconds)
        self._thread = threading.Thread(target=self._work, name="episodes")

    def start(self) -> None:
        """Start the thread. After that, episodes can be opened."""
        self._heartbeat.hold_iteration(self.run.iteration, self.run.token, self.lost.set)
        self._heartbeat.start()
        self._thread.start()

    def open(self, client: str) -> "Future[OpenEpisode]":
        """Open an episode for the client with that name.

        The future raises ServiceError if the database does not answer, and StateError if the run is over.
        """
        return self._order(partial(self._open, client, new_emit_key()))

    def is_open(self, episode: int) -> bool:
        """Return whether the episode accepts requests."""
        return episode in self._opened

    def end(self, episode: int, answer: str | None = None, rewards: Mapping[str, float] | None = None) -> "Future[None]":
        """Cancel the episode's turns and end the episode. The future is done when the episode's rows are written."""
        ended = self._ended.setdefault(episode, Future())
        self._order(partial(self._end, episode, AgentEnd(answer=answer, rewards=rewards)))
        return ended

    def close(self) -> None:
        """End all episodes and the run, and wait for the thread's end."""
        self._closing.set()
        self._wake()
        self._thread.join()

    # in the thread

    def _work(self) -> None:
        looked = ended = forgot = time.monotonic()
        while not (self._closing.is_set() and not self._orders):
            events = take_events(self._inbox, gathers=len(self._rollouts) > 1 or self._may_gather)
            while self._orders:
                self._orders.popleft()()
            self._handle(events)
            if time.monotonic() - looked > POLL_SECONDS:
                self._try(self._look)
                looked = time.monotonic()
            if time.monotonic() - ended > settings().lease_seconds:
                self._try(self._end_lost_runs)
                ended = time.monotonic()
            if time.monotonic() - forgot > FORGET_SECONDS:
                self._try(partial(served_runs.forget_old, self.db))
                forgot = time.monotonic()
        self._end_all()

    def _look(self) -> None:
        """Repeat work that failed because the database did not answer. Nothing else must be read: this process itself wrote all
        other changes.
        """
        for rollout in [rollout for rollout in self._rollouts.values() if not rollout.is_live]:
            self._drop(rollout)
        for opened in [opened for opened in self._opened.values() if opened.group not in self._rollouts]:
            self._take_up(opened)
        for episode in list(self._ending):
            self._write_end(self._opened[episode])

    def _end_lost_runs(self) -> None:
        """End the `serve` runs whose servers are gone. A server is gone if its lease had expired at this check and at the
        previous one.

        One check is not enough. After a machine sleeps, the leases of live servers have expired too, until each server renews
        its lease.
        """
        lost = served_runs.find_lost_runs(self.db, settings().lease_seconds) - {self.run.id}
        served_runs.end_lost_runs(self.db, settings().lease_seconds, lost & self._lost_runs)
        self._lost_runs = lost

    @property
    def _may_gather(self) -> bool:
        return any(rollout.may_gather for rollout in self._rollouts.values())

    def _handle(self, events: Sequence[InboxEvent]) -> None:
        by_group: dict[int, list[InboxEvent]] = {}
        for event in events:
            by_group.setdefault(event.group, []).append(event)
        for group, mine in by_group.items():
            if (rollout := self._rollouts.get(group)) is not None:
                self._guard(rollout, partial(rollout.handle, mine))

    def _open(self, client: str, emit_key: str) -> OpenEpisode:
        if self._closing.is_set() or self.lost.is_set():
            raise StateError(f"{self.run.name} is over.", "Start another: agentrl serve")
        lease = settings().lease_seconds
        try:
            opened = served_runs.open_episode(self.db, self.run, client, key_hash(sampling_key(emit_key)), lease)
        except Fenced as error:
            self.lost.set()
            raise StateError(error.message, "Start another: agentrl serve") from error
        self._opened[opened.id] = opened
        self._heartbeat.hold_agent(opened.agent, self.run.worker, lambda: None)
        self.count += 1
        try:
            self._take_up(opened)
        except ServiceError as error:
            self._warn(error)  # the episode is taken up once the service is back; its calls wait, or come again
        if opened.id not in self._opened:
            raise StateError(f"{self.run.name} is over.", "Start another: agentrl serve")
        return OpenEpisode(opened, emit_key)

    def _take_up(self, opened: ServedEpisode) -> None:
        """Claim the episode's group, and drive the episode from its last stored step on.

        Raises:
            ServiceError: the database does not answer.
        """
        work = rollout_claims.claim_group(self.db, opened.group, self.run.worker, settings().lease_seconds)
        if work is None:  # it is over, or the run is
            self._forget(opened)
            return
        policy = self.policy
        rollout = AgentRollout(
            *(self.db, work, self.experiment, policy.engine, policy.chat.at(work.clock), self._inbox, self._lost_groups),
            max_context=self._window(),
            server=self.server,
            served=_Clients(self.db, work.fence),
        )
        self._rollouts[opened.group] = rollout
        self._heartbeat.hold_group(work.fence, partial(self._lost_groups.add, work.fence))
        self._guard(rollout, rollout.start)

    def _window(self) -> int:
        """Return the most tokens of prompt and response together. If the server that samples cannot be used, return the
        policy's: the next turn then fails with the server's error.

        Raises:
            ServiceError: the server does not respond.
        """
        max_context = self.policy.policy.max_context
        try:
            return engines.window(self.policy.engine, max_context)
        except (ModelError, InfraError, ConfigError):
            return max_context

    def _end(self, episode: int, end: AgentEnd) -> None:
        opened = self._opened.get(episode)
        if opened is None:
            self._notify_ended(episode)
            return
        self._ending.setdefault(episode, end)
        self._try(partial(self._write_end, opened))

    def _write_end(self, opened: ServedEpisode) -> None:
        agent_attempts.finish_agent(self.db, opened.agent, self.run.worker, self._ending[opened.id])
        if (rollout := self._rollouts.get(opened.group)) is not None:
            self._guard(rollout, partial(rollout.handle, [InboxEvent(opened.group, opened.id, woken=True)]))

    def _guard(self, rollout: AgentRollout, act: Callable[[], None]) -> None:
        """Run an action of an episode, and handle its failure without affecting other episodes.

        An ordinary failure ends the episode. If the database does not answer, the episode does not end; it is resumed from its
        rows later. If the device is lost, this process must end.
        """
        fence = rollout.work.fence
        try:
            act()
        except Fenced as error:
            log.info("%s", error)
            rollout.lose()
        except ServiceError as error:
            self._warn(error)
            self._set_aside(rollout)
            return
        except DeviceLost as error:
            self.failure = error
            self.lost.set()
            self._set_aside(rollout)
            return
        except Exception as error:
            if isinstance(error, AgentRLError):
                log.warning("group %d failed: %s", fence.group, error)
            else:
                log.exception("group %d failed", fence.group)
            rollout.lose()
            if not self._try(partial(rollout_claims.fail_attempt, self.db, fence, type(error).__name__, str(error), 1)):
                self._set_aside(rollout)
                return
        if not rollout.is_live:
            self._drop(rollout)

    def _set_aside(self, rollout: AgentRollout) -> None:
        rollout.close()
        self._rollouts.pop(rollout.work.fence.group, None)
        self._heartbeat.drop_group(rollout.work.fence)

    def _drop(self, rollout: AgentRollout) -> None:
        self._set_aside(rollout)
        for opened in [opened for opened in self._opened.values() if opened.group == rollout.work.fence.group]:
            self._forget(opened)
        if self.forgets:
            self._try(partial(served_runs.forget_ended, self.db, self.run))

    def _forget(self, opened: ServedEpisode) -> None:
        self._heartbeat.drop_agent(opened.agent, self.run.worker)
        self._opened.pop(opened.id, None)
        self._ending.pop(opened.id, None)
        self._notify_ended(opened.id)

    def _end_all(self) -> None:
        for episode in self._opened:
            self._ending.setdefault(episode, AgentEnd())
        self._try(self._look)
        deadline = time.monotonic() + 10.0
        while self._rollouts and time.monotonic() < deadline:  # what is sampled is being stopped
            self._handle(take_events(self._inbox))
        for rollout in list(self._rollouts.values()):
            rollout.close()
        self._heartbeat.drop_iteration(self.run.iteration, self.run.token)
        self._try(partial(served_runs.close_run, self.db, self.run))

    def _try(self, act: Callable[[], object]) -> bool:
        """Run an action and return whether it succeeded. An exception is logged and not raised."""
        try:
            act()
        except ServiceError as error:
            self._warn(error)
            return False
        except Exception:
            log.exception("serving the episodes of %s continues after an error", self.run.name)
            return False
        return True

    def _warn(self, error: ServiceError) -> None:
        """Log that a service does not answer: once for each change of the reason, and again after `REPEAT_SECONDS`."""
        reason, now = f"{error!s:.{MAX_REASON}}", time.monotonic()
        if self.has_upstream:
            reason = reason.replace("AGENTRL_ENGINE_URL", "--upstream")
        if reason != self._logged[0] or now - self._logged[1] > REPEAT_SECONDS:
            log.warning("%s", reason)
            self._logged = (reason, now)

    # orders

    def _order(self, act: Callable[[], "OpenEpisode | None"]) -> "Future[OpenEpisode]":
        future: Future[OpenEpisode] = Future()

        def run() -> None:
            try:
                opened = act()
            except Exception as error:  # noqa: BLE001 - whoever ordered it is told
                future.set_exception(error)
            else:
                if opened is not None:
                    future.set_result(opened)

        self._orders.append(run)
        self._wake()
        return future

    def _notify_ended(self, episode: int) -> None:
        ended = self._ended.pop(episode, None)
        if ended is not None:
            ended.set_result(None)

    def _wake(self) -> None:
        self._inbox.put(InboxEvent(0, 0, woken=True))
