"""The inbox of a rollout job: the engine, the tools and the agents put events into it from any thread."""

import time
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from agentrl.workflow.engines import Completion

if TYPE_CHECKING:
    from agentrl.workers.jobs.agent_calls import AgentCall
    from agentrl.workers.jobs.agent_conversation import AgentTurn


@dataclass(frozen=True, slots=True)
class InboxEvent:
    """An event of a rollout job: a completion of `episode`, the answer to its tool call `call`, or the reason why a worker
    could not run it.

    Of external agents: a `request` for a turn, or one whose client disconnected; the `turn` that this completion finishes;
    `woken` if the agent's row may have changed.
    """

    group: int
    episode: int
    completion: "Future[Completion] | None" = None
    call: int = 0
    reason: str = ""
    request: "AgentCall | None" = None
    turn: "AgentTurn | None" = None
    woken: bool = False


Inbox = SimpleQueue[InboxEvent]

POLL_SECONDS = 2.0
"""Seconds between two reads of the rows of waiting episodes."""

GATHER_SECONDS = 0.001
"""The wait for turns that end in the same decoding step, to commit them together. Answered calls do not wait."""


def take_events(inbox: Inbox, gathers: bool = True) -> list[InboxEvent]:
    """Wait for an event, and for a moment longer after a sampled turn; then take all events.

    Args:
        gathers: whether other turns may end in the same decoding step; if not, there is no second wait.
    """
    events: list[InboxEvent] = []
    try:
        events.append(inbox.get(timeout=POLL_SECONDS))
        if gathers and events[0].completion is not None:
            time.sleep(GATHER_SECONDS)
        while True:
            events.append(inbox.get_nowait())
    except Empty:
        return events


def put_completion(inbox: Inbox, group: int, episode: int, future: "Future[Completion]") -> None:
    """Put the engine's completion into the inbox."""
    inbox.put(InboxEvent(group, episode, completion=future))


def put_reply(inbox: Inbox, group: int, episode: int, call: int, reason: str) -> None:
    """Put a tool's reply into the inbox."""
    inbox.put(InboxEvent(group, episode, call=call, reason=reason))
