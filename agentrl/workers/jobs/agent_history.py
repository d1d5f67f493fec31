"""Which turn of an episode a request goes on from, by what its messages say.

Messages are compared by a hash of all that was said: ids of tool calls, the order of keys in JSON and white space around a text
do not count, thoughts do. So a request costs a hash for each of its messages, however many turns there are.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from agentrl.workers.jobs.chain_reasons import ChainReasons
from agentrl.workers.jobs.message_keys import goes_on, key_of, next_digest
from agentrl.workflow.dialects import Ask
from agentrl.workflow.trajectory import ROOT, Step


@dataclass(frozen=True, slots=True)
class Found:
    """The step that a request goes on from, ROOT for none, how many of its messages that covers, and why it is none.

    Args:
        equal: how many delivered steps end this very history: their words are the same, their tokens may differ.
    """

    step: int = ROOT
    count: int = 0
    reason: str = ""
    equal: int = 0


@dataclass
class History:
    """The conversations of an episode's lines, each by one hash of all of it, its tools and its options."""

    _digests: list[bytes] = field(default_factory=list)
    _draws: list[tuple[int, ...]] = field(default_factory=list)
    _by_digest: dict[bytes, list[int]] = field(default_factory=dict)
    _reasons: ChainReasons = field(default_factory=ChainReasons)

    def add(self, steps: Sequence[Step], index: int, tools: Sequence[Any], options: Mapping[str, Any]) -> None:
        """The step with the next index, whose request brought these tools and options."""
        step = steps[index]
        parent = ROOT if step.parent is None or step.shared is not None else step.parent
        digest, draws = (self._digests[parent], self._draws[parent]) if parent != ROOT else (_seed(tools, options), ())
        keys = [key_of(message) for message in (*step.prompt, step.message)]
        for key in keys:
            digest = next_digest(digest, key)
        self._digests.append(digest)
        self._draws.append((*draws, step.draw or 0))
        self._by_digest.setdefault(digest, []).append(index)
        self._reasons.add(step, keys, tools, options)

    def find(self, ask: Ask, steps: Sequence[Step]) -> Found:
        """The step whose conversation is the longest that the request's messages begin with, and go on from.

        Of several that say the same it is one that was delivered, and of these the one whose draws come first: whichever of
        them was asked for first does not matter.

        Args:
            steps: those that were added, as they are by now.
        """
        digest, covered, found = _seed(ask.tools, ask.template_options), 0, list[int]()
        for count, message in enumerate(ask.messages[:-1], start=1):
            digest = next_digest(digest, key_of(message))
            if digest in self._by_digest:
                covered, found = count, self._by_digest[digest]
        if found and goes_on(ask.messages[covered:]):
            equal = [index for index in found if steps[index].delivered] or found
            first = min(equal, key=lambda index: (self._draws[index], index))
            return Found(first, covered, equal=len(equal))
        return Found(reason=self._reasons.of(ask, steps)) if self._digests else Found()


def _seed(tools: Sequence[Any], options: Mapping[str, Any]) -> bytes:
    return sha256(json.dumps([list(tools), dict(options)]).encode()).digest()
