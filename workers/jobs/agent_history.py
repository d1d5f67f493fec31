"""Which turn of an episode a request goes on from, by what its messages say."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.workflow.dialects import Ask
from agentrl.workflow.trajectory import ROOT, Message, Step

OTHER_TOOLS = "other tools or template options"
EDITED = "the history is none that was sampled"


@dataclass(frozen=True, slots=True)
class Found:
    """The step that a request goes on from, ROOT for none, how many of its messages that covers, and why it is none."""

    step: int = ROOT
    count: int = 0
    reason: str = ""


@dataclass
class History:
    """The conversations of an episode's lines, each by one hash of all of it."""

    _by_digest: dict[bytes, int] = field(default_factory=dict)
    _digests: list[bytes] = field(default_factory=list)
    _seeds: set[bytes] = field(default_factory=set)

    def add(self, steps: Sequence[Step], index: int, tools: Sequence[Any], options: Mapping[str, Any]) -> None:
        """The step with the next index, whose request brought these tools and options."""
        step = steps[index]
        parent = ROOT if step.parent is None else step.parent
        seed = _seed(tools, options)
        digest = self._digests[parent] if parent != ROOT and step.shared is None else seed
        for message in (*step.prompt, step.message):
            digest = _next(digest, message)
        self._seeds.add(seed)
        self._digests.append(digest)
        self._by_digest.setdefault(digest, index)

    def find(self, ask: Ask) -> Found:
        """The step whose conversation is the longest that the request's messages begin with, and go on from."""
        seed = _seed(ask.tools, ask.template_options)
        digest, found = seed, Found()
        for count, message in enumerate(ask.messages[:-1], start=1):
            digest = _next(digest, message)
            if digest in self._by_digest:
                found = Found(self._by_digest[digest], count)
        if found.step != ROOT and all(message.role != "assistant" for message in ask.messages[found.count :]):
            return found
        if not self._digests:
            return Found()
        return Found(reason=EDITED if seed in self._seeds else OTHER_TOOLS)


def _seed(tools: Sequence[Any], options: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps([list(tools), dict(options)]).encode()).digest()


def _next(digest: bytes, message: Message) -> bytes:
    calls = [[call.name, call.arguments] for call in message.tool_calls if call.error is None]
    said = [message.role, message.content.strip(), message.thought.strip(), calls]
    return hashlib.sha256(digest + json.dumps(said, sort_keys=True, default=dict).encode()).digest()
