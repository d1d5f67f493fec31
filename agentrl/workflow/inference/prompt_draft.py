"""The prompt of the next turn, and the step that the sampled turn becomes: for rollouts, for chats, and for requests of agents.

A step's line is all tokens from the start of its prompt to the end of the step. Sampled text is never tokenized again. If
messages continue a turn, their prompt is the turn's line, the template's suffix and the new messages. Otherwise all messages
are rendered and begin a chain. For an agent's request, the step then refers to the earlier line that has the longest beginning
in common with the prompt.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.engines import Completion
from agentrl.workflow.tool_formats import Schema
from agentrl.workflow.trajectory import ROOT, Episode, Message, Step, messages_of

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """The prompt of a turn that is not sampled yet.

    Args:
        messages: see `trajectory.Step.prompt`.
        prompt_ids: the ids after those that the prompt shares with its parent's line.
        context: the complete input of the policy.
        parent: the index of the step whose line the prompt continues or shares; `ROOT` without such a step.
        shared: see `trajectory.Step.shared`.
        shared_messages: the number of messages that the prompt has in common with the conversation of the parent step.
        new_row: why the turn begins a chain; None if it continues its parent or is the episode's first turn.
        chain: the number of the turn's chain. For an agent's turn, the commit determines it.
        equal: the number of steps with the same messages that the turn could continue, including the parent.
    """

    messages: tuple[Message, ...]
    prompt_ids: Ids
    context: Ids
    parent: int = ROOT
    shared: int | None = None
    shared_messages: int = 0
    new_row: str | None = None
    chain: int = 0
    equal: int = 1

    def step(
        self,
        index: int,
        completion: Completion,
        message: Message,
        policy_version: int,
        delivered: bool = True,
        draw: int | None = None,
        side_call: bool = False,
    ) -> Step:
        """Return the step that consists of this prompt and its completion.

        `message` is the message that was parsed from the sampled ids.
        """
        return Step(
            index=index,
            prompt=self.messages,
            prompt_ids=self.prompt_ids,
            sampled_ids=completion.token_ids,
            behavior_logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            message=message,
            policy_version=policy_version,
            seconds=completion.seconds,
            new_row=self.new_row,
            chain=self.chain,
            parent=self.parent,
            shared=self.shared,
            delivered=delivered,
            draw=draw,
            side_call=side_call,
            guided=completion.guided,
        )

    def sibling(self, messages: tuple[Message, ...], reason: str) -> "Draft":
        """Return the draft of another choice for the same request. It has the same input, and begins a chain.

        Args:
            messages: all messages of the input.
            reason: why the choice begins a chain.
        """
        return replace(
            self,
            messages=messages,
            prompt_ids=(),
            shared=len(self.context),
            shared_messages=len(messages),
            new_row=reason,
        )


def draft_turn(chat: Chat, episode: Episode, messages: tuple[Message, ...], schemas: Sequence[Schema]) -> Draft:
    """Return the prompt of the episode's next turn.

    Raises:
        ModelError: the template refuses these messages.
    """
    if not episode.steps:
        ids = chat.opening(messages, schemas)
        return Draft(messages, ids, ids)
    last = episode.steps[-1]
    continued, reason = chat.continuation(messages, schemas, last.sampled_ids)
    if continued is not None:
        return Draft(messages, continued, episode.context_ids + continued, last.index, chain=last.chain)
    ids = chat.opening((*episode.messages, *messages), schemas)
    return Draft(messages, ids, ids, new_row=reason, chain=max(step.chain for step in episode.steps) + 1)


def continuing(lines: "Lines", parent: int, new: tuple[Message, ...], ids: Ids, equal: int = 1) -> Draft:
    """Return the prompt of a turn that continues the step `parent`.

    Args:
        lines: the lines of the episode.
        parent: the index of the step.
        new: the new messages.
        ids: the token ids of the new messages.
        equal: see `Draft`.
    """
    return Draft(new, ids, lines.tokens(parent) + ids, parent, equal=equal)


def opening(lines: "Lines", messages: tuple[Message, ...], ids: Ids, reason: str | None) -> Draft:
    """Return the prompt of a request whose messages were all rendered.

    A step's line is all tokens from the start of its prompt to the end of the step (`Lines`). If the prompt begins with the
    tokens of a line, the draft refers to these tokens instead of repeating them.

    Args:
        lines: the lines of the episode.
        messages: all messages of the request.
        ids: the token ids of these messages.
        reason: why the turn begins a chain; None for the first turn.
    """
    parent, shared = lines.longest_share(ids)
    if parent == ROOT:
        return Draft(messages, ids, ids, new_row=reason)
    same = shared_messages(messages_of(lines.steps, parent), messages)
    return Draft(messages, ids[shared:], ids, parent, shared, same, reason)


def shared_messages(earlier: Sequence[Message], messages: Sequence[Message]) -> int:
    """Return the number of first messages that are identical in both lists.

    The order of keys in arguments must be the same too.
    """
    count = 0
    for one, other in zip(earlier, messages, strict=False):
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
    """The lines of an episode's steps. A step's line is all tokens from the start of its prompt to the end of the step."""

    steps: list[Step] = field(default_factory=list)
    _ends: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    _begins: list[int] = field(default_factory=list)

    def add(self, step: Step) -> None:
        """Add a step. Its index must be the number of steps added before."""
        parent = ROOT if step.parent is None else step.parent
        before = self._line(parent)[: step.shared]
        if step.shared is None and parent in self._ends:
            del self._ends[parent]  # what goes on from it has its tokens, too
        self._ends[step.index] = np.concatenate([before, _own(step)])
        self._begins.append(len(before))
        self.steps.append(step)

    def longest_line(self, ids: Ids) -> int:
        """Return the index of the step whose line (all token ids up to the end of the step) is the longest proper prefix of
        `ids`; `ROOT` if there is no such step. A line that another line continues is not compared: the longer one decides.
        """
        id_array = np.asarray(ids, np.int32)
        ends = {index: len(line) for index, line in self._ends.items() if _common(line, id_array) == len(line) < len(ids)}
        return max(ends, key=lambda index: (ends[index], -index), default=ROOT)

    def replace(self, step: Step) -> None:
        """Replace a step by one with the same tokens."""
        self.steps[step.index] = step

    def tokens(self, index: int) -> Ids:
        """Return all tokens of the line up to the end of that step."""
        return tuple(self._line(index).tolist())

    def longest_share(self, ids: Ids) -> tuple[int, int]:
        """Find the earlier tokens that have the longest beginning in common with `ids`.

        Return the index of the first step whose line contains this beginning, and the number of tokens in the beginning. If
        nothing is in common, the index is `ROOT`.
        """
        id_array = np.asarray(ids, np.int32)
        best, shared = ROOT, 0
        for end, line in sorted(self._ends.items()):
            count = _common(line, id_array)
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
