"""The turns of one episode that an agent from outside asks for: matched with its record, and answered again if asked again.

An answer is known by its request's id, and by the hash of its body where the client says that it tries again. What is sampled
is decided by the prompt's tokens and by how often this very prompt was asked before (its `draw`), whatever arrives first.
"""

import hashlib
import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from agentrl.workers.jobs.agent_calls import Accepted, AgentCall, Answered, Drawn, Left
from agentrl.workers.jobs.agent_history import History
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.chat.text_length import TooLong
from agentrl.workflow.dialects import Ask, RequestError, Turn
from agentrl.workflow.engines import Completion
from agentrl.workflow.errors import ModelError
from agentrl.workflow.inference.agent_draft import AgentDraft, Lines, continuing, opening
from agentrl.workflow.store.agent_steps import RequestMark
from agentrl.workflow.store.row_values import pack
from agentrl.workflow.trajectory import ROOT, Episode, Message, Step, messages_of

TOP = "top"
"""Where `steps.asked` keeps the likeliest tokens of each place, for who asked for them and may ask again."""

CANCELLED = "~"
"""What the request id of a turn that was stopped carries behind it: the request may be answered yet."""


def choice_id(request_id: str, choice: int) -> str:
    """The request id of a choice; the first one's is the request's own."""
    return request_id if choice == 0 else f"{request_id}.{choice}"


@dataclass(eq=False)
class AgentTurn:
    """The choices of one request while they are sampled.

    Args:
        call: the request.
        draft: its prompt.
        draws: how often this prompt was asked before, for each choice.
        session: under which the engine keeps what it knows of the turn's tokens.

    Attributes:
        waiting: the calls that wait for it; `later` those that ask for it again while it is being stopped.
        completions: what was sampled, once it is over; None for a choice that was stopped before it began.
        cut: whether it was stopped before its end.
    """

    call: AgentCall
    draft: AgentDraft
    draws: tuple[int, ...]
    session: int
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
        """What was asked for."""
        return self.call.ask

    @property
    def is_over(self) -> bool:
        """Whether all choices are sampled, or stopped."""
        return len(self.futures) == len(self.draws) and all(future.done() for future in self.futures)

    @property
    def is_awaited(self) -> bool:
        """Whether anybody still waits for it."""
        return any(not call.gone.is_set() for call in self.waiting)

    def join(self, call: AgentCall) -> None:
        """Lets the call wait for this turn, too, from its first token on."""
        cached = len(self.draft.context) - len(self.draft.prompt_ids)
        call.tell(Accepted(self.draft.context, self.call.request_id, self.call.created, cached))
        with self._lock:
            for choice, tokens in enumerate(self._heard):
                for token in tokens:
                    call.tell(Drawn(choice, token))
            self.waiting.append(call)

    def hear(self, choice: int, token: int) -> bool:
        """Passes a token on, as it is drawn; returns whether the turn goes on."""
        with self._lock:
            self._heard[choice].append(token)
            for call in self.waiting:
                if call.ask.stream:
                    call.tell(Drawn(choice, token))
        return not self.stopped

    def stop(self) -> None:
        """Ends the turn with the tokens that are being drawn."""
        self.stopped = True
        for future in self.futures:
            future.cancel()

    def answer(self, turns: tuple[Turn, ...]) -> None:
        """Gives everybody who waits the whole turns."""
        for call in self.waiting:
            call.answered = self.call.request_id
            call.tell(Answered(turns))

    def leave(self) -> None:
        """Tells everybody who waits that the turn has no end here."""
        for call in (*self.waiting, *self.later):
            call.tell(Left())


@dataclass
class EpisodeTurns:
    """What is known of an episode's requests: those in flight, the marks of those that its rows answer, and who was given which
    answer last.
    """

    attempt: int
    lines: Lines = field(default_factory=Lines)
    marks: list[RequestMark] = field(default_factory=list)
    open: list[AgentTurn] = field(default_factory=list)
    is_ending: bool = False
    given: dict[str, AgentCall] = field(default_factory=dict)
    _history: History = field(default_factory=History)
    _sessions: dict[int, int] = field(default_factory=dict)
    _prompts: dict[str, set[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, episode: Episode, attempt: int, marks: Sequence[RequestMark]) -> "EpisodeTurns":
        """As the rows have it."""
        made = cls(attempt)
        by_step = {mark.step: mark for mark in marks}
        for step in episode.steps:
            made.add(step, by_step.get(step.index))
        return made

    @property
    def count(self) -> int:
        """How many requests there were."""
        firsts = {mark.request_id.partition(".")[0] for mark in self.marks}
        return len(firsts | {turn.call.request_id for turn in self.open})

    def add(self, step: Step, mark: RequestMark | None) -> None:
        """A step that is in the rows."""
        self.lines.add(step)
        self._history.add(self.lines.steps, step.index, *((mark.tools, mark.template_options) if mark else ((), {})))
        if mark is not None:
            self.marks.append(mark)
            self._prompts.setdefault(self._prompt_hash(step), set()).add(int(mark.asked.get("draw", 0)))

    def refresh(self, episode: Episode) -> None:
        """Takes over what became known of the steps: results, and what was delivered."""
        self.lines.steps[:] = episode.steps

    def prompt(self, step: Step) -> tuple[int, ...]:
        """The whole input of a step."""
        whole = self.lines.tokens(step.index)
        return whole[: len(whole) - len(step.sampled_ids)]

    def draft(self, chat: Chat, ask: Ask, most: int) -> AgentDraft:
        """The prompt of the turn that is asked for, of which `most` tokens fit.

        Raises:
            RequestError: the template refuses these messages, or they are far too long.
        """
        found = self._history.find(ask, self.lines.steps)
        try:
            reason = found.reason
            if found.step != ROOT:
                new, turn = ask.messages[found.count :], self.lines.steps[found.step].sampled_ids
                ids, reason = chat.continuation(new, ask.tools, turn, ask.template_options, most)
                if ids is not None:
                    return continuing(self.lines, found.step, new, ids, found.equal)
            ids = chat.opening(ask.messages, ask.tools, ask.template_options, most)
            return opening(self.lines, ask.messages, ids, reason or None)
        except TooLong as error:
            raise too_long(most, "more") from error
        except Exception as error:  # a template is a program, and the messages are anybody's
            said = str(error) if isinstance(error, ModelError) else f"The chat template cannot render these messages: {error}."
            raise RequestError(400, said[:1000], code="invalid_messages", param="messages") from error

    def messages(self, draft: AgentDraft) -> tuple[Message, ...]:
        """All messages of a draft's line."""
        if draft.parent == ROOT or draft.shared is not None:
            return draft.messages
        return (*messages_of(self.lines.steps, draft.parent), *draft.messages)

    def shown(self, ask: Ask) -> dict[tuple[int, int], str]:
        """(step, call) -> what came of it, as the request shows it, for calls whose results are not known."""
        pending = {step.index: _calls_key(step.message) for step in self.lines.steps if step.pending}
        found: dict[tuple[int, int], str] = {}
        for place, message in enumerate(ask.messages):
            if not pending:
                break
            key = _calls_key(message) if message.role == "assistant" and message.tool_calls else None
            index = next((index for index, wanted in pending.items() if wanted == key), None) if key else None
            if index is not None:
                del pending[index]
                readable = [n for n, call in enumerate(self.lines.steps[index].message.tool_calls) if call.error is None]
                found |= {(index, n): said for n, said in zip(readable, _results(ask.messages, place + 1), strict=False)}
        return found

    def session(self, draft: AgentDraft) -> int:
        """Under which name the engine keeps the line of a draft: its parent's, where it goes on from that."""
        if draft.parent != ROOT and draft.shared is None and draft.parent in self._sessions:
            return self._sessions[draft.parent]
        return secrets.randbits(63)

    def keep_session(self, step: Step, session: int) -> None:
        """The engine keeps the line of that step under this name."""
        self._sessions[step.index] = session

    @property
    def all_sessions(self) -> set[int]:
        """All names under which the engine keeps something of the episode."""
        return {*self._sessions.values(), *(turn.session for turn in self.open)}

    def is_other(self, call: AgentCall) -> bool:
        """Whether the call's name was another request's before, with another body."""
        before = {mark.request_hash for mark in self.marks if _request_of(mark) == call.request_id}
        before |= {turn.call.body_hash for turn in self.open if turn.call.request_id == call.request_id}
        return bool(before - {call.body_hash})

    def in_flight(self, call: AgentCall) -> AgentTurn | None:
        """The turn that the call asks for once more."""
        same = [turn for turn in self.open if turn.call.request_id == call.request_id]
        if call.retry and not same:
            same = [turn for turn in self.open if turn.call.body_hash == call.body_hash]
            same.sort(key=lambda turn: turn.is_awaited)  # first one that its client has left
        return same[0] if same else None

    def recorded(self, call: AgentCall) -> list[RequestMark]:
        """The marks of the whole answer that the call asks for once more, choice by choice; none if there is none."""
        firsts = [mark for mark in self.marks if "." not in mark.request_id and CANCELLED not in mark.request_id]
        found = [mark for mark in firsts if mark.request_id == call.request_id]
        if call.retry and not found:
            found = [mark for mark in firsts if mark.request_hash == call.body_hash]
            found.sort(key=lambda mark: (not self.lines.steps[mark.step].delivered, mark.step))
        return self.answers(found[-1].request_id, call.ask.count) if found else []

    def draws(self, call: AgentCall, prompt_hash: str) -> tuple[int, ...]:
        """How often this very prompt was asked before, for each choice: the least numbers that no other answer has.

        A call that comes again after it was stopped has the numbers that it had.
        """
        stopped = [mark for mark in self.marks if CANCELLED in mark.request_id and self._is_again(mark, call)]
        before = sorted({int(mark.asked.get("draw", 0)) for mark in stopped})[: call.ask.count]
        used = set(self._prompts.get(prompt_hash, ()))
        for turn in self.open:
            if _hash_ids(turn.draft.context) == prompt_hash:
                used |= set(turn.draws)
        fresh = (number for number in range(len(used) + call.ask.count) if number not in used)
        return (*before, *(next(fresh) for _ in range(call.ask.count - len(before))))

    def answers(self, request_id: str, count: int) -> list[RequestMark]:
        """The marks of the answer to that request, choice by choice."""
        by_id = {mark.request_id: mark for mark in self.marks}
        return [by_id[name] for choice in range(count) if (name := choice_id(request_id, choice)) in by_id]

    def stopped_id(self, request_id: str) -> str:
        """The id under which a stopped answer to that request is kept."""
        times = sum(mark.request_id.startswith(request_id + CANCELLED) for mark in self.marks)
        return f"{request_id}{CANCELLED}{times}"

    def _is_again(self, mark: RequestMark, call: AgentCall) -> bool:
        return _request_of(mark) == call.request_id or (call.retry > 0 and mark.request_hash == call.body_hash)

    def _prompt_hash(self, step: Step) -> str:
        return _hash_ids(self.prompt(step))


def _request_of(mark: RequestMark) -> str:
    """The id of the request whose answer, or part of one, the mark is of."""
    return mark.request_id.partition(CANCELLED)[0].partition(".")[0]


def too_long(most: int, tokens: int | str) -> RequestError:
    """The refusal of messages of so many tokens."""
    said = f"This model's maximum context length is {most} tokens; the messages have {tokens}."
    return RequestError(400, said, code="context_length_exceeded", param="messages")


def _calls_key(message: Message) -> str:
    """What is the same for the same readable calls."""
    made = [(call.name, call.arguments) for call in message.tool_calls if call.error is None]
    return json.dumps(made, sort_keys=True, default=dict)


def _results(messages: Sequence[Message], place: int) -> list[str]:
    """The texts of the tools' messages from that place on."""
    following = takewhile(lambda message: message.role == "tool", messages[place:])
    return [message.content for message in following]


def prompt_hash(draft: AgentDraft) -> str:
    """What is the same for the same prompt, token for token."""
    return _hash_ids(draft.context)


def _hash_ids(ids: Sequence[int]) -> str:
    return hashlib.sha256(pack("i", ids)).hexdigest()


def turn_of(step: Step, asked: Mapping[str, Any]) -> Turn:
    """The turn of a stored step, as a reply says it; `asked` as its row has it."""
    completion = Completion(step.sampled_ids, step.behavior_logprobs, step.finish_reason, step.seconds)
    top = tuple(tuple((int(token), float(logprob)) for token, logprob in place) for place in asked.get(TOP, ()))
    return Turn(step.message, completion, top)
