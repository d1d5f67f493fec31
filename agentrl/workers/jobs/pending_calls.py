"""The calls that a group's episodes wait for. A group's worker sends them to the tools workers, and sends them again if they
seem lost, until their rows have results.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

from agentrl.workers.jobs.inbox import Inbox, put_reply
from agentrl.workers.stack.dispatch import send_calls
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
"""The longest wait, in seconds, that is added to the tools' time limit before an unanswered call is sent again. If a lease is
shorter, the lease is added instead. If a call runs twice, its first result is used.
"""

RESENDS = 5
"""The most resends of a call without a reply to any call. After that, it is assumed that no worker serves the tools, and the
group's attempt fails instead of waiting forever.
"""

MAX_SENDINGS = 50
"""The most sends of a call. The limit is high, because calls are also sent again while the tools workers answer other calls but
are slow.
"""

_TOOLS_WORKER_HINT = "Is a tools worker running? Start one: agentrl worker tools"


@dataclass
class _EpisodeCalls:
    """The calls that one episode waits for.

    Attributes:
        calls: the ids of the calls, in order.
        limit_seconds: the longest time limit of the tools, in seconds.
        answered: the ids of the calls that have results.
        sent: the time of the last send, in seconds of the monotonic clock.
        sendings: the number of sends.
        in_vain: the number of consecutive sends after which no reply to any call arrived.
        refused: the latest reason why a worker could not run one of the calls.
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
        """True if the last send was so long ago that the calls seem lost."""
        return time.monotonic() - self.sent > min(RESEND_SECONDS, settings().lease_seconds) + self.limit_seconds

    @property
    def fate(self) -> str:
        """The state of the calls, as a part of an error message."""
        times = "once" if self.sendings == 1 else f"{self.sendings} times"
        return f"were sent {times} without an answer."


@dataclass
class PendingCalls:
    """The calls that a group's episodes wait for. `report_wait` is called with the reason when calls wait for long."""

    db: Database
    group: int
    inbox: Inbox
    report_wait: Callable[[str], None]
    by_episode: dict[int, _EpisodeCalls] = field(default_factory=dict)

    def add(self, episode: int, calls: Sequence[int], tools: Mapping[str, Tool], answered: Collection[int] = ()) -> None:
        """Register the calls that the episode waits for. Nothing is sent yet.

        Args:
            calls: the ids of the calls.
            tools: the tools that the calls may use; the longest of their time limits applies.
            answered: the ids of the calls that already have results.
        """
        longest = max((tool.timeout_seconds for tool in tools.values()), default=0.0)
        self.by_episode[episode] = _EpisodeCalls(calls, longest, answered)

    def send(self, episodes: Iterable[int]) -> None:
        """Send the unanswered calls of these episodes, several in each message, and listen for their replies."""
        send_calls([call for episode in episodes for call in self._prepare(episode)], _replies().address)

    def _prepare(self, episode: int) -> list[int]:
        """Listen for the replies to the episode's unanswered calls, and return these calls, which are sent now."""
        waiting = self.by_episode[episode]
        unanswered = [call for call in waiting.calls if call not in waiting.answered]
        for call in unanswered:
            _replies().expect(call, partial(put_reply, self.inbox, self.group, episode))
        waiting.sent = time.monotonic()
        waiting.sendings, waiting.refused = waiting.sendings + 1, ""
        return unanswered

    def send_again(self, episode: int) -> None:
        """Send calls that some worker has sent before, and increment the number of sends in their rows."""
        count_sending(self.db, self.by_episode[episode].calls)
        for call in self._prepare(episode):
            send_calls([call], _replies().address)  # alone: see `send_calls_again`

    def take_answered(self, episodes: Set[int]) -> dict[int, tuple[ToolResult, ...]]:
        """Remove the episodes whose calls are all answered. Return their results, in the order of the calls."""
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
        """Report the reason why a tools worker cannot run a pending call."""
        waiting = self.by_episode.get(episode)
        if waiting is not None and call in waiting.calls:
            waiting.refused = reason
            self.report_wait(reason)

    def send_overdue(self) -> None:
        """Send calls again that seem lost, and report them. Raise ServiceError if calls were sent more than `RESENDS` times,
        and the last worker that received one reports that it cannot run it. Raise InfraError if calls were sent too often
        without an answer: no worker receives them, they never end, or the system fails them each time.
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
