"""The agents of a group's episodes. A group's worker sends them to the agents workers, sends them again if they seem lost, and
waits until they have ended.

This module writes no results. A wake-up message only says that an agent's row may have changed; the row says how the agent
ended.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from agentrl.workers.jobs.inbox import Inbox, InboxEvent
from agentrl.workers.stack.dispatch import send_agent
from agentrl.workers.stack.replies import Replies
from agentrl.workflow.errors import ServiceError
from agentrl.workflow.runtime.once_per_process import Once
from agentrl.workflow.settings import settings
from agentrl.workflow.store import agent_holds
from agentrl.workflow.store.agent_holds import AgentState
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.rollout_claims import Fence

RESEND_SECONDS = 30.0
"""The time, in seconds, after which an agent that no worker has started is sent again. If a lease is shorter, the agent is sent
again after a lease. While an agents worker is busy, the agent may be waiting in its queue, so the time is ten times as long.
"""

RESENDS = 5
"""The most times that unstarted agents are sent again. After that, it is assumed that no worker runs agents, and the group is
released.
"""

_AGENTS_WORKER_HINT = (
    "Start an agents worker: agentrl worker agents. If one is running, its log says why it does not start these agents."
)


class Agents(Protocol):
    """The interface of the objects through which a rollout starts the agents of a group's episodes and reads their states."""

    def give(self, episodes: Sequence[int]) -> None:
        """Make the current attempts of these episodes ready for their agents. An agent that already runs continues."""

    def load(self, episodes: Collection[int] | None = None) -> dict[int, AgentState]:
        """Return the state of each episode's agent, by episode. `episodes` is None for all episodes of the group."""

    def send_overdue(self, states: Collection[AgentState]) -> None:
        """Act on agents that have waited for long and that no worker has started: send them again, or report the wait."""

    def forget(self) -> None:
        """Stop waiting for agents."""


@dataclass
class PendingAgents:
    """The agents of a group's episodes, run by agents workers. `report_wait` is called with the reason when no worker runs
    them.
    """

    db: Database
    fence: Fence
    inbox: Inbox
    report_wait: Callable[[str], None]
    _sent: dict[int, float] = field(default_factory=dict)
    _expected: dict[int, int] = field(default_factory=dict)
    _in_vain: int = 0
    _looked: float = field(default_factory=time.monotonic)

    def give(self, episodes: Sequence[int]) -> None:
        """See `Agents.give`."""
        agent_holds.open_attempts(self.db, self.fence, episodes)
        states = self.load()
        self._send([states[episode] for episode in episodes if episode in states and states[episode].status == "pending"])
        for episode in episodes:
            if episode in states:
                self._expect(states[episode])

    def load(self, episodes: Collection[int] | None = None) -> dict[int, AgentState]:
        """See `Agents.load`."""
        return agent_holds.load_agents(self.db, self.fence.group, settings().lease_seconds, episodes)

    def send_overdue(self, states: Collection[AgentState]) -> None:
        """Send the agents again that were sent long ago and that no worker has started.

        Raises:
            ServiceError: agents were sent more than `RESENDS` times, and no agents worker runs any agent.
        """
        waiting = [state for state in states if state.status == "pending"]
        if len(waiting) < len(states):
            self._in_vain = 0
        patience = min(RESEND_SECONDS, settings().lease_seconds)
        now = time.monotonic()
        late = [state for state in waiting if now - self._sent.get(state.id, -patience) > patience]
        if not late:
            return
        if agent_holds.any_at_work(self.db, settings().lease_seconds):
            self._in_vain = 0
            self._send([state for state in late if now - self._sent.get(state.id, now) > 10 * RESEND_SECONDS])
            return
        self._in_vain += 1
        if self._in_vain > RESENDS:
            raise ServiceError("Agents were sent to the queue several times, but no worker ran them.", _AGENTS_WORKER_HINT)
        self.report_wait(f"Agents were sent, but no worker runs them. {_AGENTS_WORKER_HINT}")
        self._send(late)

    def forget(self) -> None:
        """Stop waiting for agents."""
        for key in self._expected.values():
            _replies().forget(key)
        self._expected.clear()

    def _send(self, states: Sequence[AgentState]) -> None:
        for state in states:
            self._expect(state)
            self._sent[state.id] = time.monotonic()
        if states:
            agent_holds.count_sent(self.db, [state.id for state in states])
        for state in states:
            send_agent(state.episode, state.attempt, _replies().address)

    def _expect(self, state: AgentState) -> None:
        self._expected[state.episode] = state.episode
        _replies().expect(state.episode, partial(_wake, self.inbox, self.fence.group, state.episode))


@dataclass
class PolledAgents:
    """The external agents of a group's episodes: processes elsewhere ask the endpoint for the waiting attempts.

    No message is sent, so the rollout reads the rows at each `poll_calls`. `report_wait` is called with the reason if attempts
    wait for long.
    """

    db: Database
    fence: Fence
    report_wait: Callable[[str], None]
    _moved: float = field(default_factory=time.monotonic)

    def give(self, episodes: Sequence[int]) -> None:
        """See `Agents.give`."""
        agent_holds.open_attempts(self.db, self.fence, episodes)

    def load(self, episodes: Collection[int] | None = None) -> dict[int, AgentState]:
        """See `Agents.load`."""
        return agent_holds.load_agents(self.db, self.fence.group, settings().lease_seconds, episodes)

    def send_overdue(self, states: Collection[AgentState]) -> None:
        """Report that the run waits, if no agent has worked on the group for the length of a lease."""
        if not states or any(state.status != "pending" for state in states):
            self._moved = time.monotonic()
        if time.monotonic() - self._moved > min(RESEND_SECONDS, settings().lease_seconds):
            self.report_wait("Tasks wait for external agents. Ask for them: agentrl agent poll --url URL -- COMMAND")

    def forget(self) -> None:
        """See `Agents.forget`."""


def _wake(inbox: Inbox, group: int, episode: int, _episode: int, _reason: str) -> None:
    inbox.put(InboxEvent(group, episode, woken=True))


@Once
def _replies() -> Replies:
    return Replies(settings())
