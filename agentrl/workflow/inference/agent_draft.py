"""The prompt of a turn that an agent requests: it continues an earlier turn, or starts a chain.

Tokens are never made again from text. Where a request's messages go on from a turn, its tokens do, with the template's suffix.
Where they do not, the request is rendered whole and opens a chain, which refers to the line whose tokens it shares the longest.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.workflow.trajectory import ROOT, Message, Step, messages_of

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AgentDraft:
    """The prompt of a turn that is not sampled yet.

    Args:
        messages: as `trajectory.Step.prompt`.
        prompt_ids: ids after those that it shares with its parent's line.
        context: the policy's whole input.
        parent: the step whose line it continues or shares; ROOT for none.
        shared: as `trajectory.Step.shared`.
        shared_messages: so many of its first messages are those of its parent's line.
        reason: why it opens a chain; None where it continues its parent or is the first.
        equal: so many steps say what its parent's line says, the parent among them.
    """

    messages: tuple[Message, ...]
    prompt_ids: Ids
    context: Ids
    parent: int = ROOT
    shared: int | None = None
    shared_messages: int = 0
    reason: str | None = None
    equal: int = 1


def continuing(lines: "Lines", parent: int, new: tuple[Message, ...], ids: Ids, equal: int = 1) -> AgentDraft:
    """Return the turn after the step `parent`: its new messages, and their ids."""
    return AgentDraft(new, ids, lines.tokens(parent) + ids, parent, equal=equal)


def opening(lines: "Lines", messages: tuple[Message, ...], ids: Ids, reason: str | None) -> AgentDraft:
    """Return a turn whose request is rendered whole, by reference to what it shares."""
    parent, shared = lines.longest_share(ids)
    if parent == ROOT:
        return AgentDraft(messages, ids, ids, reason=reason)
    same = shared_messages(messages_of(lines.steps, parent), messages)
    return AgentDraft(messages, ids[shared:], ids, parent, shared, same, reason)


def shared_messages(history: Sequence[Message], messages: Sequence[Message]) -> int:
    """Return how many of the first messages are the same to the letter, in the order of their keys, too."""
    count = 0
    for one, other in zip(history, messages, strict=False):
        if not _same(one, other):
            break
        count += 1
    return count


def _same(one: Message, other: Message) -> bool:
    if (one.role, one.content, one.thought, one.name) != (other.role, other.content, other.thought, other.name):
        return False
    return not (one.tool_calls or other.tool_calls) or _spelling(one) == _spelling(other)


def _spelling(message: Message) -> str:
    return json.dumps([(call.name, _plain(call.arguments), call.error) for call in message.tool_calls])


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass
class Lines:
    """The lines of an episode's steps, token for token."""

    steps: list[Step] = field(default_factory=list)
    _ends: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    _begins: list[int] = field(default_factory=list)

    def add(self, step: Step) -> None:
        """Add the step with the next index."""
        parent = ROOT if step.parent is None else step.parent
        before = self._line(parent)[: step.shared]
        if step.shared is None and parent in self._ends:
            del self._ends[parent]  # what goes on from it has its tokens, too
        self._ends[step.index] = np.concatenate([before, _own(step)])
        self._begins.append(len(before))
        self.steps.append(step)

    def replace(self, step: Step) -> None:
        """Take another value of a step with the same tokens."""
        self.steps[step.index] = step

    def tokens(self, index: int) -> Ids:
        """Return all tokens of the line up to the end of that step."""
        return tuple(self._line(index).tolist())

    def longest_share(self, ids: Ids) -> tuple[int, int]:
        """Return (step, n): the first step, and how many of its line's tokens, that share the most of the ids' beginning."""
        wanted = np.asarray(ids, np.int32)
        best, shared = ROOT, 0
        for end, line in sorted(self._ends.items()):
            count = _common(line, wanted)
            if count > shared:
                best, shared = end, count
        while best != ROOT and self._begins[best] >= shared:
            best = self._parent(best)
        return best, shared

    def _line(self, index: int) -> NDArray[np.int32]:
        path: list[Step] = []
        while index != ROOT and index not in self._ends:
            path.append(self.steps[index])
            index = self._parent(index)
        line = self._ends[index] if index != ROOT else np.empty(0, np.int32)
        for step in reversed(path):
            line = np.concatenate([line[: step.shared], _own(step)])
        return line

    def _parent(self, index: int) -> int:
        parent = self.steps[index].parent
        return ROOT if parent is None else parent


def _own(step: Step) -> NDArray[np.int32]:
    return np.asarray((*step.prompt_ids, *step.sampled_ids), np.int32)


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size
