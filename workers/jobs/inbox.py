"""The inbox of a rollout job, into which the engine and the tools put events from any thread."""

from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

from agentrl.workflow.engines import Completion


@dataclass(frozen=True, slots=True)
class Event:
    """A completion of `episode`, the answer to its tool call `call`, or the reason why that cannot run where it came to."""

    group: int
    episode: int
    completion: "Future[Completion] | None" = None
    call: int = 0
    reason: str = ""


Inbox = SimpleQueue[Event]


def put_completion(inbox: Inbox, group: int, episode: int, future: "Future[Completion]") -> None:
    """Puts the engine's completion into the inbox."""
    inbox.put(Event(group, episode, completion=future))


def put_reply(inbox: Inbox, group: int, episode: int, call: int, reason: str) -> None:
    """Puts a tool's reply into the inbox."""
    inbox.put(Event(group, episode, call=call, reason=reason))
