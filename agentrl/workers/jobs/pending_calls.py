"""The calls that a group's episodes wait for: sent to the tools workers, and sent again if they seem lost, until their rows
have results.

This module decides nothing and writes no results. A reply is only a wake-up; the row has the call's result.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

from agentrl.workers.jobs.inbox import Inbox, put_reply
from agentrl.workers.stack.dispatch import send_call
from agentrl.workers.stack.replies import Replies
from agentrl.workflow.errors import InfraError, ServiceError
from agentrl.workflow.runtime.once_per_process import Once
from agentrl.workflow.settings import settings
from agentrl.workflow.store import steps
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.tool_calls import count_sending
from agentrl.workflow.tools import Tool
from agentrl.workflow.trajectory import ToolResult

RESEND_SECONDS = 30.0
"""A call without a result is sent again after its tool's time limit and a lease; the lease counts for at most this many
seconds. The first answer counts.
"""

RESENDS = 5
"""After this many sends without an answer, no worker seems to serve the tools: the group's attempt fails instead of waiting for
ever.
"""

MAX_SENDINGS = 50
"""The most sends of a call while other calls get replies, so that the tools workers are alive but slow."""

_TOOLS_WORKER_HINT = "Is a tools worker running? Start one: agentrl worker tools"


@dataclass
class _EpisodeCalls:
    """The calls that an episode waits for: their ids in order, the longest time limit, and the answered ones.

    It also counts the sends, remembers the time of the last one, counts how many of the last ones no reply to any call
    followed, and keeps a worker's latest reason for not running a call.
    """

    calls: Sequence[int]
    limit_seconds: float
    answered: Collection[int]
    sent: float = 0.0
    sendings: int = 0
    in_vain: int = 0
    refused: str = ""

    @property
    def is_overdue(self) -> bool:
        """Whether the calls seem lost."""
        return time.monotonic() - self.sent > min(RESEND_SECONDS, settings().lease_seconds) + self.limit_seconds

    @property
    def fate(self) -> str:
        """Describe the state of the calls, for a message."""
        times = "once" if self.sendings == 1 else f"{self.sendings} times"
        return f"were sent {times} without an answer."


@dataclass
class PendingCalls:
    """The calls that a group's episodes wait for; `report_wait` is called with the reason why they wait."""

    db: Database
    group: int
    inbox: Inbox
    report_wait: Callable[[str], None]
    by_episode: dict[int, _EpisodeCalls] = field(default_factory=dict)

    def add(self, episode: int, calls: Sequence[int], tools: Mapping[str, Tool], answered: Collection[int] = ()) -> None:
        """Register these calls, each of one of the tools; nothing is sent yet."""
        longest = max((tool.timeout_seconds for tool in tools.values()), default=0.0)
        self.by_episode[episode] = _EpisodeCalls(calls, longest, answered)

    def send(self, episode: int) -> None:
        """Send the episode's unanswered calls, and listen for their replies."""
        waiting = self.by_episode[episode]
        unanswered = [call for call in waiting.calls if call not in waiting.answered]
        for call in unanswered:
            _replies().expect(call, partial(put_reply, self.inbox, self.group, episode))
        waiting.sent = time.monotonic()
        waiting.sendings, waiting.refused = waiting.sendings + 1, ""
        for call in unanswered:
            send_call(call, _replies().address)

    def send_again(self, episode: int) -> None:
        """Send calls that some worker has sent before; like `send`."""
        count_sending(self.db, self.by_episode[episode].calls)
        self.send(episode)

    def take_answered(self, episodes: Set[int]) -> dict[int, tuple[ToolResult, ...]]:
        """Remove the episodes whose calls are all answered; return the results of each one's calls, in order."""
        waiting = {episode: self.by_episode[episode] for episode in sorted(episodes & self.by_episode.keys())}
        if not waiting:
            return {}
        results = steps.load_results(self.db, [call for one in waiting.values() for call in one.calls])
        answered = {}
        for episode, one in waiting.items():
            one.answered = results.keys()
            if results.keys() >= set(one.calls):
                answered[episode] = tuple(results[call] for call in one.calls)
                self._forget(episode)
        return answered

    def note_refusal(self, episode: int, call: int, reason: str) -> None:
        """Report what a tools worker lacks to run a pending call."""
        waiting = self.by_episode.get(episode)
        if waiting is not None and call in waiting.calls:
            waiting.refused = reason
            self.report_wait(reason)

    def send_overdue(self) -> None:
        """Send calls again that seem lost, and report them.

        Raises:
            ServiceError: calls were sent several times, and the last worker to get one says that it cannot run it.
            InfraError: calls were not answered: no worker has them, they never end, or the system fails them each time.
        """
        for episode, waiting in self.by_episode.items():
            if not waiting.is_overdue:
                continue
            slow = not waiting.refused and _replies().answered_at > waiting.sent
            waiting.in_vain = 0 if slow else waiting.in_vain + 1
            if waiting.in_vain > RESENDS or waiting.sendings > MAX_SENDINGS:
                message = f"Tool calls {waiting.calls} {waiting.fate}"
                raise ServiceError(waiting.refused) if waiting.refused else InfraError(message, _TOOLS_WORKER_HINT)
            if not waiting.refused and not slow:  # in the same words for all episodes, so that the run's events say it once
                self.report_wait(f"Tool calls {waiting.fate} {_TOOLS_WORKER_HINT}")
            self.send_again(episode)

    def forget(self) -> None:
        """Stop waiting for all calls."""
        for episode in list(self.by_episode):
            self._forget(episode)

    def _forget(self, episode: int) -> None:
        for call in self.by_episode.pop(episode).calls:
            _replies().forget(call)


@Once
def _replies() -> Replies:
    return Replies(settings())
