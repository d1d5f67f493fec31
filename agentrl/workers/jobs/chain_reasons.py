"""Why a request goes on from no turn of its episode, so that its turn opens another chain: a text for people, nothing else.

Its messages are compared more loosely with those that there were: without tools and options, without thoughts, turn by turn.
That costs a few hashes for each message, however many turns there are. What was meant cannot be known: a summary in place of
all but a system's message looks like a new conversation, and is called one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from agentrl.workers.jobs.message_keys import goes_on, key_of, key_without_thought, next_digest
from agentrl.workflow.dialects import Ask
from agentrl.workflow.trajectory import ROOT, Message, Step, messages_of

OTHER_TOOLS = "other tools: the messages are those of an earlier turn, the tools are not"
OTHER_OPTIONS = "other template options: the messages are those of an earlier turn, the options of the template are not"
DROPPED = "dropped thinking: the history lacks thoughts of its turns"
COMPACTED = "compaction: earlier messages were left out, or a summary took their place"
EDITED = "edited history: messages are not as they were"
AGAIN = "the same request again"
NEW = "new conversation: it shares no turn with an earlier one"

MOST_ALIKE = 16
"""So many turns whose words are the same are looked at."""


@dataclass(frozen=True, slots=True)
class _Told:
    """A conversation up to some message.

    Args:
        words: the hash of all that was said.
        bare: the same without thoughts.
        size: how many messages.
        beginning: the hash of the messages up to the first one of a user; empty before that.
    """

    words: bytes = b""
    bare: bytes = b""
    size: int = 0
    beginning: bytes = b""

    def then(self, message: Message, key: bytes) -> "_Told":
        """The conversation with one more message, and its key."""
        bare = next_digest(self.bare, key_without_thought(message) if message.thought else key)
        begun = self.beginning or (bare if message.role == "user" else b"")
        return _Told(next_digest(self.words, key), bare, self.size + 1, begun)


@dataclass
class ChainReasons:
    """What an episode's conversations have in common with a request that goes on from none of them."""

    _told: list[_Told] = field(default_factory=list)
    _brought: list[tuple[bytes, bytes]] = field(default_factory=list)
    _by_words: dict[bytes, int] = field(default_factory=dict)
    _by_bare: dict[bytes, list[int]] = field(default_factory=dict)
    _by_prompt: dict[bytes, int] = field(default_factory=dict)
    _sizes: dict[bytes, set[int]] = field(default_factory=dict)  # of the lines that a turn ends
    _places: set[tuple[bytes, int]] = field(default_factory=set)  # where a line with that beginning has a turn
    _longest: dict[bytes, int] = field(default_factory=dict)

    def add(self, step: Step, keys: Sequence[bytes], tools: Sequence[Any], options: Mapping[str, Any]) -> None:
        """The step with the next index, the keys of its messages, and the tools and options that its request brought."""
        told = _Told() if step.parent in (None, ROOT) or step.shared is not None else self._told[step.parent]
        for message, key in zip(step.prompt, keys, strict=False):
            told = told.then(message, key)
        self._by_prompt[told.words] = step.index
        told = told.then(step.message, keys[-1])
        self._told.append(told)
        self._brought.append((_hash(list(tools)), _hash(dict(options))))
        self._by_words[told.words] = step.index
        self._by_bare.setdefault(told.bare, []).append(step.index)
        self._sizes.setdefault(key_without_thought(step.message), set()).add(told.size)
        self._places.add((told.beginning, told.size))
        self._longest[told.beginning] = max(told.size, self._longest.get(told.beginning, 0))

    def of(self, ask: Ask, steps: Sequence[Step]) -> str:
        """Why the request goes on from none of the steps, which were all added."""
        told = _conversations(ask.messages)
        said = next((one for one in reversed(told) if one.words in self._by_words), None)
        if said is not None and goes_on(ask.messages[said.size :]):
            return self._other_request(ask, self._by_words[said.words])
        if told[-1].words in self._by_prompt:
            return self._other_request(ask, self._by_prompt[told[-1].words])
        bare = next((one for one in reversed(told) if one.bare in self._by_bare), None)
        if bare is not None and goes_on(ask.messages[bare.size :]):
            alike = self._by_bare[bare.bare][-MOST_ALIKE:]
            lacking = any(_only_lacks_thoughts(ask.messages, messages_of(steps, index)) for index in alike)
            return DROPPED if lacking else EDITED
        return self._other_history(ask.messages, told)

    def _other_request(self, ask: Ask, index: int) -> str:
        tools, options = self._brought[index]
        if _hash(list(ask.tools)) != tools:
            return OTHER_TOOLS
        return OTHER_OPTIONS if _hash(dict(ask.template_options)) != options else AGAIN

    def _other_history(self, messages: Sequence[Message], told: Sequence[_Told]) -> str:
        """By the last turn that there was before; else by how the conversation begins."""
        turns = [(n, message) for n, message in enumerate(messages, start=1) if message.role == "assistant"]
        for count, message in reversed(turns):
            sizes = self._sizes.get(key_without_thought(message))
            if sizes:
                return COMPACTED if count not in sizes and count < max(sizes) else EDITED
        beginning = told[-1].beginning
        if beginning not in self._longest:
            return NEW
        in_place = any((beginning, count) in self._places for count, _ in turns)
        return COMPACTED if len(messages) < self._longest[beginning] and not in_place else EDITED


def _hash(value: Any) -> bytes:
    return sha256(json.dumps(value).encode()).digest()


def _conversations(messages: Sequence[Message]) -> list[_Told]:
    found = [_Told()]
    for message in messages:
        found.append(found[-1].then(message, key_of(message)))
    return found


def _only_lacks_thoughts(messages: Sequence[Message], known: Sequence[Message]) -> bool:
    """Whether the messages, whose words are those of the known ones, have the same thoughts or none."""
    thoughts = ((one.thought.strip(), other.thought.strip()) for one, other in zip(messages, known, strict=False))
    return all(one in ("", other) for one, other in thoughts)
