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
    """An event of a rollout job. Each event sets only the fields of its kind.

    Attributes:
        group, episode: the ids of the group and the episode that the event is about.
        completion: the finished sampling of a turn of the episode.
        call: the id of a tool call that was answered, or that a worker could not run.
        reason: why a worker could not run `call`; empty if the call was answered.
        request: a request of an external agent that arrived, or whose client disconnected.
        turn: with `completion`, the turn that an external agent requested; None in the built-in loop.
        woken: True if the row of the episode's agent may have changed.
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
"""The time between two reads of the rows of waiting episodes, in seconds."""

GATHER_SECONDS = 0.001
"""The wait for further turns that end in the same decoding step, in seconds. The turns are then committed together. After an
answered call, there is no such wait.
"""


def take_events(inbox: Inbox, gathers: bool = True) -> list[InboxEvent]:
    """Wait for an event for up to `POLL_SECONDS`, then return all events of the inbox. If `gathers` is True, other turns may
    end in the same decoding step: after a sampled turn, wait another `GATHER_SECONDS`.
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
    inbox.put(InboxEvent(group, episode, completion=future))


def put_reply(inbox: Inbox, group: int, episode: int, call: int, reason: str) -> None:
    """Put a tools worker's reply to a call into the inbox; `reason` says why the worker could not run the call."""
    inbox.put(InboxEvent(group, episode, call=call, reason=reason))
