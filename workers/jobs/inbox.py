"""What a rollout job wakes up for: its engine and its tools put it into one inbox, from whatever thread they are in."""

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
    """The engine's part."""
    inbox.put(Event(group, episode, completion=future))


def put_reply(inbox: Inbox, group: int, episode: int, call: int, reason: str) -> None:
    """The tools' part."""
    inbox.put(Event(group, episode, call=call, reason=reason))
