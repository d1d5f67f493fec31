"""The record from which the requests of a restarted agent are answered.

If an agent is lost, the next attempt at its episode begins with a new agent. The record has the requests of the lost attempts,
with their turns. As long as the new agent sends the same requests, it gets the recorded turns, and nothing is sampled. At the
first request that the record does not have, sampling goes on.

Two requests are the same if their messages, tools, template options and numbers of choices are equal. The comparison ignores
text that the patterns of `agent.replay_ignore` match, and the differences that `agent_conversation` ignores. If several
recorded requests are equal, their turns are used in the order of their draws (`agent_conversation`).

The steps of a recorded turn become steps of the new attempt, with the recorded messages and tokens. If the new agent's messages
differ from the recorded ones in ignored text, its later requests are rewritten: they begin with the recorded messages. So the
rows are the same as those of an agent that was never lost.

An agent contradicts the record if it continues a recorded conversation with another request than the recorded one. Agents may
send several requests at once, in any order. So a request only contradicts the record if the agent does not send the recorded
request within `WAIT_SECONDS`.

The agent of a fork is answered in the same way, from the steps that the fork inherits. The inherited steps are not written
again.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import takewhile

import regex

from agentrl.workers.jobs.agent_conversation import (
    CANCELLED,
    Conversation,
    choices_of,
    completion_of,
    message_digest,
    next_digest,
    offer_digest,
)
from agentrl.workflow.chat.rendering import Chat, TooLong
from agentrl.workflow.dialects import Ask
from agentrl.workflow.engines import Completion
from agentrl.workflow.errors import ModelError
from agentrl.workflow.inference.prompt_draft import Lines
from agentrl.workflow.store.row_codecs import pack
from agentrl.workflow.store.steps import EarlierAttempt
from agentrl.workflow.trajectory import RAW_ROLES, Message, Step, StepRequest, messages_of

WAIT_SECONDS = 5.0
"""The longest wait for the recorded request, in seconds, before another request that continues the same conversation counts as
a contradiction.
"""
CLEAN_SECONDS = 2.0
"""The most seconds for which the patterns of ignored text may search one request."""
LOAD_SECONDS = 10.0
"""The most seconds for which the patterns may search a record. Meanwhile the worker drives no other episode."""
SHOWN = 60
"""The most characters that the reason of a contradiction quotes from each of the two texts that differ."""
REPLAYED = "replayed"
"""The key of `steps.asked` under which the id of the recorded request is stored, if a step was copied from the record."""
SENT = "sent"
"""The key of `steps.asked` under which the digest of a replayed request is stored, if it differs from the recorded request."""
_RUN_DEPENDENT = (
    r"agentrl-agent-[\w-]{8}",  # the folder of a program; Claude Code writes its underscores as hyphens
    r"\bChunk ID: [0-9a-f]+",  # these three by Codex
    r"\bWall time: [0-9.]+ seconds",
    r"<current_date>[0-9-]+</current_date>",
    r"Today's date is [0-9-]+",  # by Claude Code
)
"""The patterns of text that is ignored in every run."""
_ROOT = b""
"""The position of a request that continues no known conversation."""


class Contradiction(Exception):
    """The error for a request that contradicts the record. The text of the error is the reason. If `may_wait` is True, the
    agent may still send the recorded request, so the contradicting request waits for it.
    """

    def __init__(self, reason: str, may_wait: bool = True) -> None:
        super().__init__(reason)
        self.may_wait = may_wait


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A request of the record, with the turn that answered it.

    Args:
        request: the request, as it is stored in the row of its first choice.
        messages: the messages of the request.
        prompt_ids: all input tokens.
        steps: the steps of its choices.
        position: the digest of the conversation that the request continues.
        is_inherited: True if the steps belong to the parent of a fork. Such steps are not written again.
    """

    request: StepRequest
    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    steps: tuple[Step, ...]
    completions: tuple[Completion, ...]
    position: bytes
    is_inherited: bool

    @property
    def is_cut(self) -> bool:
        """True if the turn was cancelled. The same request is then sampled again."""
        return CANCELLED in self.request.id

    @property
    def draws(self) -> tuple[int, ...]:
        """For each choice, its number among all samples of the same prompt."""
        return tuple(step.draw or 0 for step in self.steps)

    def ask(self, ask: Ask) -> Ask:
        """Return the request with the recorded messages, tools, template options and `side_call`."""
        ask = replace(ask, side_call=self.steps[0].side_call)
        if _is_raw(self.messages):
            return ask
        options = self.request.template_options
        return replace(ask, messages=self.messages, tools=self.request.tools, template_options=options)


@dataclass
class Cleaner:
    """Removes the text that is ignored when two requests are compared. `patterns` are the patterns of the run; the patterns for
    every run are always used too.
    """

    patterns: Sequence[str]
    _compiled: "list[regex.Pattern[str]]" = field(init=False)
    _seconds: float = 0.0
    _until: float = 0.0

    def __post_init__(self) -> None:
        self._compiled = [regex.compile(pattern) for pattern in (*_RUN_DEPENDENT, *self.patterns)]

    def begin(self, seconds: float | None = None) -> None:
        """Begin a search that may take `seconds`. If `seconds` is None, use the time limit for one request."""
        self._seconds = CLEAN_SECONDS if seconds is None else seconds
        self._until = time.monotonic() + self._seconds

    def clean(self, text: str) -> str:
        """Return the text without the ignored parts.

        Raises:
            Contradiction: the patterns took too long.
        """
        for pattern in self._compiled:
            try:
                text = pattern.sub("", text, timeout=max(0.001, self._until - time.monotonic()))
            except TimeoutError:
                message = f"the patterns of agent.replay_ignore took more than {self._seconds:g} s"
                raise Contradiction(message, may_wait=False) from None
        return text


@dataclass
class AgentReplay:
    """The record of an episode, and the requests of its current attempt that were answered from it."""

    cleaner: Cleaner
    _unused: dict[bytes, list[RecordedTurn]] = field(default_factory=dict)
    _known: set[bytes] = field(default_factory=set)
    _sent: dict[bytes, RecordedTurn] = field(default_factory=dict)
    _digests: dict[bytes, bytes] = field(default_factory=dict)

    @classmethod
    def of(
        cls, patterns: Sequence[str], conversation: Conversation, inherited: int, earlier: Sequence[EarlierAttempt]
    ) -> "AgentReplay":
        """Return the record of an episode without the turns that its current attempt has already copied.

        Args:
            patterns: regular expressions of text that may differ between equal requests.
            conversation: the stored part of the current attempt.
            inherited: the number of the conversation's first steps that were inherited by a fork. These steps are a part of the
                record.
            earlier: the lost attempts, the oldest first.

        Raises:
            Contradiction: the patterns took too long.
        """
        replay = cls(Cleaner(patterns))
        replay.cleaner.begin(LOAD_SECONDS)
        current = EarlierAttempt(tuple(conversation.lines.steps), conversation.requests)
        own = replay._turns_of(current, inherited, len(current.steps))
        turns = [replace(turn, is_inherited=True) for turn in replay._turns_of(current, 0, inherited)]
        copied = {turn.request.asked.get(REPLAYED) for turn in own}
        for attempt in reversed(earlier):
            attempt_turns = replay._turns_of(attempt, inherited, len(attempt.steps))
            turns += (turn for turn in attempt_turns if turn.request.id not in copied)
            copied |= {turn.request.asked.get(REPLAYED) for turn in attempt_turns}
        for turn in sorted(turns, key=lambda turn: (turn.is_cut, turn.draws)):
            replay._unused.setdefault(replay._key(turn.ask(_NO_ASK), turn.prompt_ids, len(turn.steps)), []).append(turn)
        replay._sent = {bytes.fromhex(turn.request.asked[SENT]): turn for turn in own if SENT in turn.request.asked}
        return replay

    @property
    def is_used_up(self) -> bool:
        """True if no recorded turn is left."""
        return all(turn.is_cut for turns in self._unused.values() for turn in turns)

    def take(self, ask: Ask, chat: Chat, max_tokens: int) -> RecordedTurn | None:
        """Return the recorded turn that answers the request, and remove it from the record; None if it must be sampled.

        Args:
            ask: the request.
            chat: the renderer of the policy's chat template.
            max_tokens: the most tokens of a prompt.

        Raises:
            Contradiction: the request contradicts the record, or the patterns took too long.
        """
        if self.is_used_up:
            return None
        self.cleaner.begin()
        prompt_ids: tuple[int, ...] = ()
        if _is_raw(ask.messages):
            try:
                prompt_ids = chat.opening(ask.messages, max_tokens=max_tokens)
            except (TooLong, ModelError):
                return None  # sampling refuses it in words
        turns = self._unused.get(self._key(ask, prompt_ids, ask.count), [])
        if turns:
            turn = turns.pop(0)
            return None if turn.is_cut else turn
        position = _ROOT if prompt_ids else self._position(ask.messages)
        rivals = [turn for turns in self._unused.values() for turn in turns if turn.position == position and not turn.is_cut]
        if rivals:
            raise Contradiction(self._difference(ask, rivals))
        return None

    def note_sent(self, ask: Ask, turn: RecordedTurn) -> dict[str, str]:
        """Note that the request was answered with the recorded turn. Return the values about the replay that are stored in
        `steps.asked`.
        """
        noted = {REPLAYED: turn.request.id}
        if _is_raw(ask.messages):
            return noted
        *_, sent = _line(ask)
        *_, recorded = _line(turn.ask(ask))
        if sent != recorded:
            self._sent[sent] = turn
            noted[SENT] = sent.hex()
        return noted

    def rewritten(self, ask: Ask) -> Ask:
        """Return the request. If a recorded turn answered its first messages, put the recorded messages in their place."""
        if not self._sent or _is_raw(ask.messages):
            return ask
        for count, digest in reversed(list(enumerate(_line(ask)))):
            if turn := self._sent.get(digest):
                return replace(turn.ask(ask), messages=(*turn.messages, *ask.messages[count:]))
        return ask

    def add(self, messages: Iterable[Message]) -> None:
        """Add a new turn and the conversation before it, so that a later request can continue it."""
        if self.is_used_up:
            return
        self.cleaner.begin()
        self._known.add(self._digest(messages))

    def _turns_of(self, attempt: EarlierAttempt, first: int, last: int) -> list[RecordedTurn]:
        """Return the turns of the steps from `first` to before `last`, one for each request, and add their conversations."""
        lines, turns = Lines(), list[RecordedTurn]()
        by_id = {request.id: index for index, request in attempt.requests.items()}
        for step in attempt.steps:
            lines.add(step)
        for index, request in attempt.requests.items():
            if not first <= index < last or "." in request.id:
                continue
            steps = [attempt.steps[number] for number in choices_of(request.id, by_id) if number < last]
            messages, ids = messages_of(attempt.steps, index)[:-1], lines.tokens(index)
            done = tuple(completion_of(one, attempt.requests[one.index]) for one in steps)
            position = _ROOT if _is_raw(messages) else self._position(messages)
            prompt_ids = ids[: len(ids) - len(steps[0].sampled_ids)]
            turns.append(RecordedTurn(request, messages, prompt_ids, tuple(steps), done, position, is_inherited=False))
            self._known |= {self._digest((*messages, one.message)) for one in steps}
        return turns

    def _key(self, ask: Ask, prompt_ids: Sequence[int], count: int) -> bytes:
        """Return the key by which equal requests are found. That of a prompt which the client wrote itself are its tokens."""
        if _is_raw(ask.messages) or not ask.messages:
            whole = sha256(pack("i", prompt_ids)).digest()
        else:
            whole = next_digest(offer_digest(ask.tools, ask.template_options, self.cleaner.clean), self._digest(ask.messages))
        return next_digest(whole, str(count).encode())

    def _position(self, messages: Sequence[Message]) -> bytes:
        """Return the digest of the messages up to the last one of the policy; _ROOT if they are no known conversation."""
        ends = [count for count, message in enumerate(messages, start=1) if message.role == "assistant"]
        digest = self._digest(messages[: ends[-1]]) if ends else _ROOT
        return digest if digest in self._known else _ROOT

    def _digest(self, messages: Iterable[Message]) -> bytes:
        digest = _ROOT
        for message in messages:
            exact = message_digest(message)
            if exact not in self._digests:
                self._digests[exact] = message_digest(message, self.cleaner.clean)
            digest = next_digest(digest, self._digests[exact])
        return digest

    def _difference(self, ask: Ask, turns: Sequence[RecordedTurn]) -> str:
        """Return a sentence that says where the request first differs from the recorded request that is most like it."""
        clean = self.cleaner.clean
        messages, others = ask.messages, [turn.messages for turn in turns]
        digests = [message_digest(message, clean) for message in messages]

        def count_equal(other: Sequence[Message]) -> int:
            pairs = zip(digests, other, strict=False)
            return sum(1 for _ in takewhile(lambda pair: pair[0] == message_digest(pair[1], clean), pairs))

        other = max(others, key=count_equal)
        place = count_equal(other)
        if place == len(messages) == len(other):
            return "its tools, template options or number of choices differ from the recorded ones"
        if place == min(len(messages), len(other)):
            return f"it has {len(messages)} messages instead of {len(other)}"
        sides = [clean(message.content).strip() for message in (messages[place], other[place])]
        if sides[0] == sides[1]:
            return f"its message {place} differs from the recorded one"
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(*sides, strict=False))
        start = max(0, sum(1 for _ in equal) - SHOWN // 3)
        sent, recorded = (side[start : start + SHOWN] for side in sides)
        return f"its message {place} ({messages[place].role}) has {sent!r} instead of {recorded!r}"


_NO_ASK = Ask(messages=(), model="")


def _line(ask: Ask) -> list[bytes]:
    """Return the exact digests of the request's conversation after each number of messages, from none to all."""
    line = [offer_digest(ask.tools, ask.template_options)]
    for message in ask.messages:
        line.append(next_digest(line[-1], message_digest(message)))
    return line


def _is_raw(messages: Sequence[Message]) -> bool:
    return any(message.role in RAW_ROLES for message in messages)
