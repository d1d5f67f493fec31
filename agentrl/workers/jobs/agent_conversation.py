"""The requests of one episode with an external agent: the turn that each request continues, the requests in flight, and the
recorded responses.

Messages are compared by a hash of their content. The comparison ignores the ids of tool calls, the order of JSON keys, and
white space at both ends of a text; it includes thoughts. A request costs one hash per message, however many turns the episode
has.

A recorded response is found by the request's id. If the client repeats the request, the response is also found by the hash of
the request's body. A request is a repetition if the client says that it retries, or if the earlier response did not reach its
client. The sampled tokens depend on the prompt's tokens and on the number of earlier samples of the same prompt
(the `draw`), never on the order of arrival.
"""

import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from agentrl.workers.jobs.agent_calls import Accepted, AgentCall, Answered, AttemptGone, Drawn, Refused
from agentrl.workflow.chat.rendering import Chat, TooLong
from agentrl.workflow.dialects import Ask, RecordedResponse, RequestError, ResponseTurn, too_long
from agentrl.workflow.engines import Completion
from agentrl.workflow.errors import ModelError
from agentrl.workflow.inference.prompt_draft import Draft, Lines, continuing, opening
from agentrl.workflow.store.row_codecs import pack
from agentrl.workflow.trajectory import RAW_ROLES, ROOT, Episode, Message, Step, StepRequest, messages_of

CONTINUES_NONE = "no earlier turn has these messages, tools and template options"
"""The stored reason why a request begins a new chain instead of continuing an earlier turn."""

EXTENDS_NONE = "the prompt extends the tokens of no earlier turn"
"""The stored reason why a request with a prompt of its own begins a new chain."""

TOP = "top"
"""The key of `steps.asked` under which the likeliest tokens of each position are stored, so that a repeated request gets the
same response.
"""

KEPT = "kept"
"""The key of `steps.asked` under which the dialect's `Ask.kept` is stored."""

CANCELLED = "~"
"""The separator between a request's id and a number in the id of a cancelled turn. The request itself may still be answered."""


def choice_id(request_id: str, choice: int) -> str:
    """Return the request id of a choice; for the first choice, it is the id of the request itself."""
    return request_id if choice == 0 else f"{request_id}.{choice}"


def choices_of(request_id: str, steps: Mapping[str, int]) -> list[int]:
    """Return the indexes of the steps of all choices of a request. `steps` maps the request id of each choice (`choice_id`) to
    the index of its step.
    """
    names = (choice_id(request_id, choice) for choice in range(len(steps)))
    return [steps[name] for name in takewhile(lambda name: name in steps, names)]


@dataclass(frozen=True, slots=True)
class Match:
    """The step that a request continues. If the request continues no step, `step` is ROOT.

    Args:
        step: the step's index.
        count: the number of the request's messages that the step's conversation contains.
        equal: the number of delivered steps whose conversations have the same text as this step's; their tokens may differ.
    """

    step: int = ROOT
    count: int = 0
    equal: int = 0


@dataclass
class History:
    """The conversations of an episode, each identified by one hash of its tools, template options and messages."""

    _digests: list[bytes] = field(default_factory=list)
    _draws: list[tuple[int, ...]] = field(default_factory=list)
    _by_digest: dict[bytes, list[int]] = field(default_factory=dict)

    def add(self, steps: Sequence[Step], index: int, tools: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Add a step to the history.

        Args:
            steps: the steps of the episode.
            index: the index of the new step. Steps are added in the order of their indexes.
            tools, options: the tools and the template options of the request that the step answered.
        """
        step = steps[index]
        parent = ROOT if step.parent is None or step.shared is not None else step.parent
        digest, draws = (self._digests[parent], self._draws[parent]) if parent != ROOT else (offer_digest(tools, options), ())
        for message in (*step.prompt, step.message):
            digest = next_digest(digest, message_digest(message))
        self._digests.append(digest)
        self._draws.append((*draws, step.draw or 0))
        self._by_digest.setdefault(digest, []).append(index)

    def find(self, ask: Ask, steps: Sequence[Step], previous: int = ROOT) -> Match:
        """Return the step whose conversation is the longest prefix of the request's messages.

        No step matches if a message after the prefix has the policy's role (`assistant`). If several conversations are equal,
        prefer delivered turns, then the turns that were sampled first. So the order of the requests does not matter.

        Args:
            ask: the request.
            steps: the episode's steps so far.
            previous: the step that the request names by the id of its response; `ROOT` if it names none.
        """
        digest, count, candidates = offer_digest(ask.tools, ask.template_options), 0, list[int]()
        for size, message in enumerate(ask.messages[:-1], start=1):
            digest = next_digest(digest, message_digest(message))
            if digest in self._by_digest:
                count, candidates = size, self._by_digest[digest]
        if not candidates or any(message.role == "assistant" for message in ask.messages[count:]):
            return Match()
        if previous in candidates:
            return Match(previous, count, equal=1)
        equal = [index for index in candidates if steps[index].delivered] or candidates
        first = min(equal, key=lambda index: (self._draws[index], index))
        return Match(first, count, equal=len(equal))


def offer_digest(tools: Sequence[Any], options: Mapping[str, Any], clean: Callable[[str], str] = str) -> bytes:
    """Return the digest of a conversation without messages: that of its tools and template options. `clean` changes their JSON
    text before it is hashed.
    """
    return hashlib.sha256(clean(json.dumps([list(tools), dict(options)])).encode()).digest()


def message_digest(message: Message, clean: Callable[[str], str] = str) -> bytes:
    """Return the digest of a message. `clean` changes its content and its thought before they are hashed."""
    calls = [[call.name, call.arguments] for call in message.tool_calls if call.error is None]
    values = [message.role, clean(message.content).strip(), clean(message.thought).strip(), calls]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=dict).encode()).digest()


def next_digest(digest: bytes, message: bytes) -> bytes:
    """Return the digest of a conversation that is extended by the message with this digest."""
    return hashlib.sha256(digest + message).digest()


@dataclass(eq=False)
class AgentTurn:
    """The choices of one request while they are sampled.

    Args:
        call: the request.
        draft: the prompt of the turn.
        draws: for each choice, its number among all samples of the same prompt, from 0.
        session: the engine's cache key for the turn's tokens.
        noted: other values that are stored with the request in the rows of its steps.
        grammar: the grammar that the sampled tokens must follow; empty if there is none.

    Attributes:
        waiting: the requests that wait for the turn.
        later: requests that repeat the request while the turn is being cancelled.
        completions: the sampled choices, set at the end; None for a choice that was cancelled before it began.
        cut: whether the turn was cancelled before its end.
    """

    call: AgentCall
    draft: Draft
    draws: tuple[int, ...]
    session: int
    noted: Mapping[str, Any] = field(default_factory=dict)
    grammar: str = ""
    waiting: list[AgentCall] = field(default_factory=list)
    futures: list[Future[Completion]] = field(default_factory=list)
    later: list[AgentCall] = field(default_factory=list)
    completions: list[Completion | None] = field(default_factory=list)
    stopped: bool = False
    cut: bool = False
    _heard: list[list[int]] = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._heard = [[] for _ in self.draws]

    @property
    def ask(self) -> Ask:
        return self.call.ask

    @property
    def is_over(self) -> bool:
        """True if every choice is sampled or cancelled."""
        return len(self.futures) == len(self.draws) and all(future.done() for future in self.futures)

    @property
    def is_awaited(self) -> bool:
        """True if at least one client of the turn is still connected."""
        return any(not call.gone.is_set() for call in self.waiting)

    def join(self, call: AgentCall) -> None:
        """Add a request that waits for this turn, and send all tokens that are already drawn to that request."""
        cached = len(self.draft.context) - len(self.draft.prompt_ids)
        call.tell(Accepted(self.draft.context, self.call.request_id, self.call.created, cached))
        with self._lock:
            for choice, tokens in enumerate(self._heard):
                for token in tokens:
                    call.tell(Drawn(choice, token))
            self.waiting.append(call)

    def hear(self, choice: int, token: int) -> bool:
        """Send a drawn token to the waiting requests; return False if the turn was cancelled."""
        with self._lock:
            self._heard[choice].append(token)
            for call in self.waiting:
                if call.ask.stream:
                    call.tell(Drawn(choice, token))
        return not self.stopped

    def stop(self) -> None:
        """Cancel the turn. A decoding step that is already running still draws its tokens."""
        self.stopped = True
        for future in self.futures:
            future.cancel()

    def answer(self, turns: tuple[ResponseTurn, ...]) -> None:
        """Send the complete turns to every waiting request."""
        for call in self.waiting:
            call.answered = self.call.request_id
            call.tell(Answered(turns))

    def refuse(self, error: RequestError) -> None:
        """Refuse every waiting request."""
        for call in self.waiting:
            call.tell(Refused(error))

    def leave(self) -> None:
        """Tell every waiting request that this process will not answer."""
        for call in (*self.waiting, *self.later):
            call.tell(AttemptGone())


@dataclass
class Conversation:
    """The requests of an episode: those in flight, those that the stored steps answered, and for each response the last request
    that received it. The first `inherited` steps of a fork are its parent's.
    """

    attempt: int
    inherited: int = 0
    lines: Lines = field(default_factory=Lines)
    requests: dict[int, StepRequest] = field(default_factory=dict)
    open: list[AgentTurn] = field(default_factory=list)
    is_ending: bool = False
    receivers: dict[str, AgentCall] = field(default_factory=dict)
    _history: History = field(default_factory=History)
    _sessions: dict[int, int] = field(default_factory=dict)
    _prompts: dict[str, set[int]] = field(default_factory=dict)
    _by_id: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, episode: Episode, attempt: int, requests: Mapping[int, StepRequest]) -> "Conversation":
        """Build a conversation from a stored episode.

        Args:
            episode: the stored episode.
            attempt: the episode's attempt number.
            requests: the request that each step answered, by the index of the step.
        """
        conversation = cls(attempt, episode.inherited)
        for step in episode.steps:
            conversation.add(step, requests.get(step.index))
        return conversation

    @property
    def count(self) -> int:
        """The number of the episode's requests, those in flight included."""
        firsts = {request.id.partition(".")[0] for request in self.requests.values()}
        return len(firsts | {turn.call.request_id for turn in self.open})

    def add(self, step: Step, request: StepRequest | None) -> None:
        """Add a stored step and the request that it answered."""
        self.lines.add(step)
        brought = (request.tools, request.template_options) if request else ((), {})
        self._history.add(self.lines.steps, step.index, *brought)
        if request is not None:
            self.requests[step.index] = request
            self._by_id[request.id] = step.index
            self._prompts.setdefault(self._prompt_hash(step), set()).add(int(request.asked.get("draw", 0)))

    def refresh(self, episode: Episode) -> None:
        """Replace the steps by those of the newly loaded episode, which have the current results and `delivered` flags."""
        self.lines.steps[:] = episode.steps

    def step_of(self, request_id: str, choice: int) -> int | None:
        """Return the index of the step that was this choice in the response to that request; None if there is no such step.
        Thread-safe.
        """
        return self._by_id.get(choice_id(request_id, choice))

    def response(self, request_id: str) -> RecordedResponse | None:
        """Return the recorded response to the request of that id; None if there is no such response. Thread-safe.

        Also return None if the client sent the prompt as text or tokens: such a conversation cannot be continued by messages.
        """
        index = self._by_id.get(request_id)
        if index is None or CANCELLED in request_id:
            return None
        messages, request = messages_of(self.lines.steps, index), self.requests[index]
        if any(message.role in RAW_ROLES for message in messages):
            return None
        return RecordedResponse(messages, request.tools, request.asked.get(KEPT, {}))

    def prompt(self, step: Step) -> tuple[int, ...]:
        """Return all input tokens of a step."""
        whole = self.lines.tokens(step.index)
        return whole[: len(whole) - len(step.sampled_ids)]

    def draft(self, chat: Chat, ask: Ask, max_tokens: int) -> Draft:
        """Return the prompt for the requested turn.

        Args:
            chat: the renderer of the policy's chat template.
            ask: the request.
            max_tokens: the most tokens that the prompt may have.

        Raises:
            RequestError: the template cannot render the messages, or the messages are far too long.
        """
        if ask.messages[0].role in RAW_ROLES:
            return self._raw_draft(chat, ask, max_tokens)
        match = self._history.find(ask, self.lines.steps, self._by_id.get(ask.previous, ROOT))
        reason = CONTINUES_NONE if self.lines.steps else None
        try:
            if match.step != ROOT:
                new, turn = ask.messages[match.count :], self.lines.steps[match.step].sampled_ids
                ids, refusal = chat.continuation(new, ask.tools, turn, ask.template_options, max_tokens)
                if ids is not None:
                    return continuing(self.lines, match.step, new, ids, match.equal)
                reason = refusal or None
            ids = chat.opening(ask.messages, ask.tools, ask.template_options, max_tokens)
            return opening(self.lines, ask.messages, ids, reason)
        except TooLong as error:
            raise too_long(max_tokens, f"more than {max_tokens}", ask.prompt_field) from error
        except Exception as error:  # a template is a program, and the messages are anybody's
            text = str(error) if isinstance(error, ModelError) else f"The chat template cannot render these messages: {error}."
            raise RequestError(400, text[:1000], code="invalid_messages", param=ask.prompt_field) from error

    def _raw_draft(self, chat: Chat, ask: Ask, max_tokens: int) -> Draft:
        """Return the draft of a prompt that the client wrote itself. It continues the step whose tokens it extends."""
        try:
            ids = chat.opening(ask.messages, max_tokens=max_tokens)
        except TooLong as error:
            raise too_long(max_tokens, f"more than {max_tokens}", ask.prompt_field) from error
        except ModelError as error:
            raise RequestError(400, error.message, code="invalid_prompt", param="prompt") from error
        parent = self.lines.longest_line(ids)
        if parent == ROOT:
            return opening(self.lines, ask.messages, ids, EXTENDS_NONE if self.lines.steps else None)
        new = ids[len(self.lines.tokens(parent)) :]
        return continuing(self.lines, parent, (Message("prompt_ids", json.dumps(new)),), new)

    def messages(self, draft: Draft) -> tuple[Message, ...]:
        """Return all messages of the conversation that ends with the draft."""
        if draft.parent == ROOT or draft.shared is not None:
            return draft.messages
        return (*messages_of(self.lines.steps, draft.parent), *draft.messages)

    def shown(self, ask: Ask) -> dict[tuple[int, int], str]:
        """Return the tool results that the request contains and that are not stored yet, by (index of the step, number of the
        call).
        """
        pending = {step.index: _calls_key(step.message) for step in self.lines.steps if step.pending}
        results: dict[tuple[int, int], str] = {}
        for place, message in enumerate(ask.messages):
            if not pending:
                break
            key = _calls_key(message) if message.role == "assistant" and message.tool_calls else None
            index = next((index for index, pending_key in pending.items() if pending_key == key), None) if key else None
            if index is not None:
                del pending[index]
                readable = [n for n, call in enumerate(self.lines.steps[index].message.tool_calls) if call.error is None]
                results |= {(index, n): result for n, result in zip(readable, _results(ask.messages, place + 1), strict=False)}
        return results

    def session(self, draft: Draft) -> int:
        """Return the engine's cache key for a draft. A draft that continues a step gets the key of that step, any other a new
        key.
        """
        if draft.parent != ROOT and draft.shared is None and draft.parent in self._sessions:
            return self._sessions[draft.parent]
        return secrets.randbits(63)

    def keep_session(self, step: Step, session: int) -> None:
        """Store the engine's cache key of a step."""
        self._sessions[step.index] = session

    @property
    def all_sessions(self) -> set[int]:
        """The engine's cache keys of the whole episode."""
        return {*self._sessions.values(), *(turn.session for turn in self.open)}

    def is_other(self, call: AgentCall) -> bool:
        """Return whether an earlier request had the same id but a different body."""
        own = [request for step, request in self.requests.items() if step >= self.inherited]
        before = {request.body_hash for request in own if _own_id(request) == call.request_id}
        before |= {turn.call.body_hash for turn in self.open if turn.call.request_id == call.request_id}
        return bool(before - {call.body_hash})

    def in_flight(self, call: AgentCall) -> AgentTurn | None:
        """Return the turn that is being sampled for an equal request; None if there is no such turn.

        If a stream breaks, its client may send the request again without `stream`, perhaps before the server notices the break.
        Such a request counts as a repetition too.
        """
        same = [turn for turn in self.open if turn.call.request_id == call.request_id]
        if not same:
            equal = [turn for turn in self.open if turn.call.body_hash == call.body_hash]
            same = [turn for turn in equal if call.retry or not turn.is_awaited or (turn.ask.stream and not call.ask.stream)]
            same.sort(key=lambda turn: turn.is_awaited)  # first one that its client has left
        return same[0] if same else None

    def recorded(self, call: AgentCall) -> list[int]:
        """Return the steps of the recorded response to this same request, one step per choice; empty if there is no such
        response.
        """
        firsts = {step: one for step, one in self.requests.items() if "." not in one.id and CANCELLED not in one.id}
        matches = [step for step, one in firsts.items() if one.id == call.request_id]
        if not matches:
            matches = [step for step, one in firsts.items() if self._is_again(one, call, self.lines.steps[step].delivered)]
            matches.sort(key=lambda step: (not self.lines.steps[step].delivered, step))
        return self.answers(self.requests[matches[-1]].id, call.ask.count) if matches else []

    def draws(self, call: AgentCall, prompt_hash: str) -> tuple[int, ...]:
        """Return the draw number of each choice: the lowest numbers that no other sample of this prompt uses.

        If the request repeats a cancelled request, its choices get the numbers of the cancelled request first, unless another
        repetition already has these numbers.
        """
        stopped = [one for one in self.requests.values() if CANCELLED in one.id and self._is_again(one, call, delivered=False)]
        again = [one for one in self.requests.values() if CANCELLED not in one.id and one.body_hash == call.body_hash]
        taken = {_draw(one) for one in again}
        taken |= {draw for turn in self.open if turn.call.body_hash == call.body_hash for draw in turn.draws}
        before = sorted({_draw(one) for one in stopped} - taken)[: call.ask.count]
        used = set(self._prompts.get(prompt_hash, ()))
        for turn in self.open:
            if _hash_ids(turn.draft.context) == prompt_hash:
                used |= set(turn.draws)
        fresh = (number for number in range(len(used) + call.ask.count) if number not in used)
        return (*before, *(next(fresh) for _ in range(call.ask.count - len(before))))

    def answers(self, request_id: str, count: int) -> list[int]:
        """Return the steps that answered the request of that id, one step per choice."""
        return choices_of(request_id, self._by_id)[:count]

    def stopped_id(self, request_id: str) -> str:
        """Return a new id for the record of a cancelled response."""
        times = sum(request.id.startswith(request_id + CANCELLED) for request in self.requests.values())
        return f"{request_id}{CANCELLED}{times}"

    def turn_of(self, index: int) -> ResponseTurn:
        """Return a stored step as the turn of a response."""
        step = self.lines.steps[index]
        return ResponseTurn(step.message, completion_of(step, self.requests[index]))

    def _is_again(self, request: StepRequest, call: AgentCall, delivered: bool) -> bool:
        """Return True if the call repeats the request. `delivered` says whether the request's response reached its client."""
        same_body = request.body_hash == call.body_hash
        return _own_id(request) == call.request_id or (same_body and (call.retry > 0 or not delivered))

    def _prompt_hash(self, step: Step) -> str:
        return _hash_ids(self.prompt(step))


def completion_of(step: Step, request: StepRequest) -> Completion:
    """Return the completion from which a stored step was made."""
    top = tuple(tuple((int(token), float(logprob)) for token, logprob in place) for place in request.asked.get(TOP, ()))
    return Completion(step.sampled_ids, step.behavior_logprobs, step.finish_reason, step.seconds, top, step.guided)


def _draw(request: StepRequest) -> int:
    return int(request.asked.get("draw", 0))


def _own_id(request: StepRequest) -> str:
    """Return the id of the client's request, without the suffixes for cancelled turns and for further choices."""
    return request.id.partition(CANCELLED)[0].partition(".")[0]


def _calls_key(message: Message) -> str:
    """Return a text that is equal for two messages with equal tool calls. Unreadable calls are left out."""
    calls = [(call.name, call.arguments) for call in message.tool_calls if call.error is None]
    return json.dumps(calls, sort_keys=True, default=dict)


def _results(messages: Sequence[Message], place: int) -> list[str]:
    """Return the texts of the consecutive tool messages from position `place` on."""
    following = takewhile(lambda message: message.role == "tool", messages[place:])
    return [message.content for message in following]


def prompt_hash(draft: Draft) -> str:
    """Return a hash of the prompt's tokens."""
    return _hash_ids(draft.context)


def _hash_ids(ids: Sequence[int]) -> str:
    return hashlib.sha256(pack("i", ids)).hexdigest()
