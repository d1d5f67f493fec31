"""The inbox of a rollout job, into which the engine, the tools and the agents put events from any thread."""

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
class Event:
    """A completion of `episode`, the answer to its tool call `call`, or the reason why that cannot run where it came to.

    Of an agent from outside: a `request` for a turn, or one that nobody waits for any more; the `turn` of which this is the
    last completion; `woken` where the agent's row may have changed.
    """

    group: int
    episode: int
    completion: "Future[Completion] | None" = None
    call: int = 0
    reason: str = ""
    request: "AgentCall | None" = None
    turn: "AgentTurn | None" = None
    woken: bool = False


Inbox = SimpleQueue[Event]

POLL_SECONDS = 2.0
"""Seconds between two looks of waiting episodes at their rows."""

GATHER_SECONDS = 0.001
"""The wait for turns that end in the same decoding step, to commit them together; answered calls wait for nothing."""


def take_events(inbox: Inbox, gathers: bool = True) -> list[Event]:
    """Wait for an event, and after a sampled turn a moment longer, then take all events that are there.

    Args:
        gathers: whether other turns may end in the same decoding step; where none can, nothing is waited for.
    """
    events: list[Event] = []
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
    inbox.put(Event(group, episode, completion=future))


def put_reply(inbox: Inbox, group: int, episode: int, call: int, reason: str) -> None:
    """Put a tool's reply into the inbox."""
    inbox.put(Event(group, episode, call=call, reason=reason))
