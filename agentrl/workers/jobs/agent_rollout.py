"""The rollout of a group with external agents: it samples a turn for each of their requests, commits the turn and sends the
response.

An agent is a separate process, one per episode (`agentrl worker agents`). It sends requests to the endpoint, which forwards
them to this process. A request continues an earlier turn of its episode or begins a new chain (`agent_conversation`). Its turn
is committed before the response ends. When the agent has ended, this process scores and ends the episode.
"""

import time
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import islice
from logging import getLogger
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from agentrl.workers.jobs.agent_calls import Accepted, AgentCall, Answered, AttemptGone, Refused
from agentrl.workers.jobs.agent_conversation import KEPT, TOP, AgentTurn, Conversation, choice_id, prompt_hash
from agentrl.workers.jobs.agent_replay import REPLAYED, WAIT_SECONDS, AgentReplay, Contradiction, RecordedTurn
from agentrl.workers.jobs.episode_recorder import EpisodeRecorder
from agentrl.workers.jobs.inbox import Inbox, InboxEvent
from agentrl.workers.jobs.pending_agents import Agents, PendingAgents, PolledAgents
from agentrl.workers.jobs.pending_calls import PendingCalls
from agentrl.workers.jobs.sampling_server import SamplingServer, sampling_server
from agentrl.workflow import engines
from agentrl.workflow.chat import grammar
from agentrl.workflow.chat.grammar import Constraint, GrammarError
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.config import CLIENTS, AgentConfig, RolloutConfig
from agentrl.workflow.dialects import Ask, RecordedResponse, RequestError, too_long
from agentrl.workflow.dialects.client_sampling import key_asked, limits_asked, with_stop
from agentrl.workflow.dialects.reply_text import parse_turn
from agentrl.workflow.engines import Backend, Completion, Engine, GenerateRequest
from agentrl.workflow.errors import AgentRLError, ConfigError, InfraError, ModelError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.hooks import load_hooks
from agentrl.workflow.inference.http import RequestRefused, server_urls
from agentrl.workflow.inference.prompt_draft import Draft
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.settings import settings
from agentrl.workflow.store import agent_holds
from agentrl.workflow.store.agent_attempts import MISMATCH
from agentrl.workflow.store.agent_holds import AgentState
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.rollout_claims import MAX_LOSSES, Fence, GroupWork, Outcome
from agentrl.workflow.store.steps import load_earlier, load_requests
from agentrl.workflow.token_chains import EQUAL
from agentrl.workflow.tool_formats import Schema
from agentrl.workflow.trajectory import (
    GRAMMAR,
    UNCLOSED,
    UNFINISHED,
    CallRecord,
    Episode,
    Message,
    PolicyRef,
    Step,
    StepRecord,
    StepRequest,
    StopReason,
    ToolCall,
    ToolResult,
    messages_of,
)

log = getLogger("agentrl.agent_rollout")

TIMEOUT = "timeout"
"""The error class of an agent that exceeded its time limit."""
MAX_OPEN = 64
"""The most open requests of an episode. Further requests get status 429, which tells clients to retry."""
MAX_ERROR = 500
"""The most characters of the error that a client gets if the engine's server failed."""
ANOTHER_CHOICE = "another choice of one request"
RECORDED, TEXT = "recorded", "text"
"""The key and the value in `steps.asked` of a turn whose server returned only its text. Its tokens are not the sampled ones."""
_told_runs: set[int] = set()
"""The ids of runs for which this process has recorded that the run's sampling options replace those of its clients."""


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """The result of an agent's process.

    Args:
        error_class: the class of the agent's error; empty if the agent returned or its program exited with code 0.
        error: the message of the agent's error.
        answer: the text that the agent returned as the episode's answer, if any.
        rewards: the rewards that the agent returned, by name.
    """

    error_class: str = ""
    error: str = ""
    answer: str | None = None
    rewards: Mapping[str, float] | None = None


def judge_end(episode: Episode, end: AgentOutcome) -> StopReason | Outcome:
    """Return the episode's stop reason. If no turn was delivered, return a failed outcome with the agent's error instead."""
    last = episode.last_turn
    if last is None or not episode.begun:
        message = end.error or f"The agent ended without a completed model call{' after the forked step' * bool(last)}."
        return Outcome(episode.id, "failed", error_class="AgentError", error=message)
    if all(step.side_call for step in episode.steps[episode.inherited :]):
        message = end.error or "The agent marked all of its model calls as side calls, so the episode has nothing to train."
        return Outcome(episode.id, "failed", error_class="AgentError", error=message)
    if end.error_class:
        return "timeout" if end.error_class == TIMEOUT else "agent_error"
    if last.finish_reason == "length":
        return "max_tokens"
    if any(call.error in (UNCLOSED, UNFINISHED) for call in last.message.tool_calls):
        return "parse_error"
    return "answered"


@dataclass
class AgentRollout:
    """The driver of a group's unfinished episodes with external agents. It runs until all episodes end, or until another worker
    claims the group.

    Args:
        max_context: the most tokens of one training row.
        server: the server that receives the agents' requests.
        served: the object that starts the agents; None if agents workers start them.
    """

    db: Database
    work: GroupWork
    experiment: Experiment
    engine: Engine
    chat: Chat
    inbox: Inbox
    lost: set[Fence]
    max_context: int
    server: SamplingServer = field(default_factory=sampling_server)
    served: Agents | None = None
    _arrived: set[AgentCall] = field(default_factory=set)
    _is_closed: bool = False
    _conversations: dict[int, Conversation] = field(default_factory=dict)
    _replays: dict[int, AgentReplay] = field(default_factory=dict)
    _waiting: dict[AgentCall, float] = field(default_factory=dict)
    _ends: dict[int, AgentOutcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.experiment.config
        assert config.agent is not None
        self.limits, self.model = config.rollout, self.work.run
        self.fingerprint, self.policy_version = fingerprint_of(self.work.policy), self.work.policy.version
        self.allows_side_calls, self.records_text = config.agent.side_calls, not self.experiment.engine.logprobs
        env, judges = self.experiment.env, self.experiment.judges
        hooks = load_hooks(config.hooks)
        self.recorder = EpisodeRecorder(self.db, self.work, env, hooks, judges, self.limits, self._release)
        self.recorder.of_agents = True
        self.recorder.counts_own = config.agent.own_rewards
        self.records = AgentRecords(self.work, self.chat, self.limits, self.max_context)
        self.sampling = AgentSampling(self.db, self.work, self.limits, config.agent, self.experiment.engine)
        self.judging = PendingCalls(self.db, self.work.fence.group, self.inbox, self.recorder.report_wait)
        self.agents: Agents = self.served or self._make_agents(config.agent)

    def _make_agents(self, agent: AgentConfig) -> Agents:
        if agent.is_external:
            return PolledAgents(self.db, self.work.fence, self.recorder.report_wait)
        return PendingAgents(self.db, self.work.fence, self.inbox, self.recorder.report_wait)

    @property
    def is_live(self) -> bool:
        """True if this worker still has an episode of the group to drive."""
        return bool(self.recorder.episodes) and self.work.fence not in self.lost

    @property
    def may_gather(self) -> bool:
        """True if several turns are in flight, which can then be committed together."""
        return sum(len(conversation.open) for conversation in self._conversations.values()) > 1

    def lose(self) -> None:
        """Write nothing more: another worker now holds the group, or the attempt is over."""
        self.lost.add(self.work.fence)
        self.close()

    def close(self) -> None:
        """Stop serving the episodes and cancel their turns."""
        self._is_closed = True
        self.judging.forget()
        self.agents.forget()
        for number, conversation in self._conversations.items():
            self.server.drop(number, self)
            for turn in conversation.open:
                turn.stop()
                turn.leave()
        for call in list(self._arrived):
            call.tell(AttemptGone())

    def start(self) -> None:
        """Start to serve every episode, continuing after its last stored step. Start an agent for each episode that has no
        agent.
        """
        numbers = list(self.recorder.episodes)
        attempts = agent_holds.current_attempts(self.db, self.work.fence.group)
        requests = load_requests(self.db, numbers)
        agent_holds.publish_address(self.db, self.work.fence, self.server.address)
        self.recorder.begin_with_agents()
        for number, episode in self.recorder.episodes.items():
            self._hold(number, Conversation.of(episode, attempts[number], requests.get(number, {})))
        self.agents.give(list(self.recorder.episodes))
        self._judge_agents(self.agents.load())

    def take(self, call: AgentCall) -> None:
        """Put a request into the inbox. Thread-safe."""
        self._arrived.add(call)
        self.inbox.put(InboxEvent(self.work.fence.group, call.episode, request=call))
        if self._is_closed:  # the inbox is no longer read
            call.tell(AttemptGone())

    def left(self, call: AgentCall) -> None:
        """Cancel the request because its client disconnected. Thread-safe."""
        call.gone.set()
        self.inbox.put(InboxEvent(self.work.fence.group, call.episode, request=call))

    def step_of(self, episode: int, request_id: str, choice: int) -> int | None:
        """Return the index of the step that was this choice in the response to that request; None if there is no such step.
        Thread-safe.
        """
        conversation = self._conversations.get(episode)
        return None if conversation is None else conversation.step_of(request_id, choice)

    def recorded(self, episode: int, request_id: str) -> RecordedResponse | None:
        """Return the response to an earlier request of the episode's current attempt; None if there is no such response.

        Thread-safe.
        """
        conversation = self._conversations.get(episode)
        return None if conversation is None else conversation.response(request_id)

    def constrain(self, ask: Ask) -> Ask:
        """Return the request with the constraint that will be enforced. If nothing here can enforce the constraint, the system
        message asks the model to keep it. Thread-safe.

        Raises:
            RequestError: no text satisfies the constraint, or `agent.strict_api` refuses constraints that are not enforced.
        """
        return self.sampling.constrain(ask, self.chat)

    def handle(self, events: Sequence[InboxEvent]) -> None:
        """Commit sampled turns, begin the requested turns, and end the episodes whose agents have ended."""
        self._commit([event.turn for event in events if event.turn is not None])
        for event in events:
            if event.request is not None:
                self._take(event.request)
            if event.reason:
                self.judging.note_refusal(event.episode, event.call, event.reason)
        self._take_waiting({event.episode for event in events})
        self._observe({event.episode for event in events if event.call and not event.reason})
        if woken := {event.episode for event in events if event.woken}:
            self._judge_agents(self.agents.load(woken))

    def poll_calls(self) -> None:
        """Read the rows of agents and of judges' questions without waiting for a message, and send lost messages again.

        Raises:
            ServiceError: no worker runs agents, or a tools worker reports that it cannot run a judge.
            InfraError: the questions to the judges were sent several times without an answer.
        """
        self._take_waiting(self._conversations.keys())
        self._observe(self.judging.by_episode.keys())
        self.judging.send_overdue()
        states = self.agents.load()
        self._judge_agents(states)
        self.agents.send_overdue([state for number, state in states.items() if number in self._conversations])

    # calls

    def _take(self, call: AgentCall) -> None:
        """Answer a request: join it to a turn in flight, send a recorded response, or begin a turn.

        If an exception is raised here, the request stays in `_arrived`, and `close` answers it with `AttemptGone`.
        """
        conversation = self._conversations.get(call.episode)
        if call.gone.is_set():
            self._arrived.discard(call)
            self._waiting.pop(call, None)
            self._leave(call, conversation)
            return
        faultpoint("agent_call.in")
        try:
            self._answer(call, conversation)
        except RequestError as error:
            call.tell(Refused(error))
        except Contradiction as error:
            deadline = self._waiting.setdefault(call, time.monotonic() + WAIT_SECONDS)
            if error.may_wait and time.monotonic() < deadline:
                return
            self._end_replay(call.episode, str(error))
        self._waiting.pop(call, None)
        self._arrived.discard(call)

    def _take_waiting(self, episodes: Set[int]) -> None:
        """Answer the requests that contradicted the record, if the agent has sent the recorded requests meanwhile."""
        for call in [call for call in self._waiting if call.episode in episodes]:
            if call in self._waiting:  # else its attempt has ended meanwhile
                self._take(call)

    def _answer(self, call: AgentCall, conversation: Conversation | None) -> None:
        if (
            conversation is None
            or conversation.is_ending
            or conversation.attempt != call.attempt
            or call.episode not in self.recorder.episodes
        ):
            raise _attempt_over()
        if conversation.is_other(call):
            message = "This Idempotency-Key was used before with another body."
            raise RequestError(422, message, code="idempotency_key_reused")
        if call.ask.counts_only:
            self._count(call, conversation)
            return
        flying = conversation.in_flight(call)
        if flying is not None:
            flying.later.append(call) if flying.stopped else flying.join(call)
            return
        if recorded := conversation.recorded(call):
            self._answer_again(call, conversation, recorded)
            return
        self.sampling.check_count(conversation)
        self.sampling.check(call.ask)
        replay = self._replays.get(call.episode)
        if replay is None:
            self._begin(call, conversation)
            return
        try:
            turn = replay.take(call.ask, self.chat, self.max_context)
        except Contradiction:
            self._draft(replay.rewritten(call.ask), conversation)  # a request that is refused is not recorded
            raise
        if turn is None:
            call.ask = replay.rewritten(call.ask)
            self._begin(call, conversation)
            return
        noted = replay.note_sent(call.ask, turn)
        call.ask = turn.ask(call.ask)
        if turn.is_inherited:
            self._answer_again(call, conversation, [step.index for step in turn.steps])
        else:
            self._begin(call, conversation, turn, noted)

    def _answer_again(self, call: AgentCall, conversation: Conversation, steps: Sequence[int]) -> None:
        """Send the recorded response, and mark its steps as delivered."""
        first, request = conversation.lines.steps[steps[0]], conversation.requests[steps[0]]
        prompt = conversation.prompt(first)
        created = int(request.asked.get("created", call.created))
        self._mark(call, conversation, steps, delivered=True)
        conversation.receivers[request.id] = call
        call.answered = request.id
        call.tell(Accepted(prompt, request.id, created, len(prompt) - len(first.prompt_ids)))
        call.tell(Answered(tuple(map(conversation.turn_of, steps))))

    def _count(self, call: AgentCall, conversation: Conversation) -> None:
        """Send the prompt of the request, whose tokens the client wants to count."""
        draft = conversation.draft(self.chat, call.ask, self.max_context)
        call.tell(Accepted(draft.context, call.request_id, call.created, 0))
        call.tell(Answered(()))

    def _begin(
        self,
        call: AgentCall,
        conversation: Conversation,
        recorded: RecordedTurn | None = None,
        noted: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Begin a turn for the request: submit its choices to the engine, unless they are recorded."""
        draft = self._draft(call.ask, conversation)
        if recorded and draft.context != recorded.prompt_ids:
            raise Contradiction("the chat template renders its messages to other tokens than the recorded ones", may_wait=False)
        if not self.recorder.begin_step(self.recorder.episodes[call.episode]):
            self._drop(call.episode)
            raise RequestError(409, "This episode has ended.", code="episode_over")
        draws = recorded.draws if recorded else tuple(self.sampling.draws(conversation, call, draft))
        noted = {**noted, RECORDED: TEXT} if self.records_text else noted
        limits = grammar_of(call.ask, draft.context, self.chat)
        turn = AgentTurn(call, draft, draws, conversation.session(draft), noted, limits)
        conversation.open.append(turn)
        turn.join(call)
        self.sampling.note_asked(call.ask)
        max_tokens, episode = self.records.most_tokens(turn), self.recorder.episodes[call.episode]
        for choice, draw in enumerate(turn.draws):
            future: Future[Completion] = Future()
            if recorded:
                future.set_result(recorded.completions[choice])
            else:
                future = self.engine.submit(self.sampling.request(turn, choice, draw, max_tokens, episode, self.chat))
            turn.futures.append(future)
        for future in list(turn.futures):
            future.add_done_callback(partial(self._put_over, turn))
        faultpoint("generate.sent")

    def _draft(self, ask: Ask, conversation: Conversation) -> Draft:
        """Return the prompt for the requested turn. Raise RequestError if it leaves no place for a turn."""
        draft = conversation.draft(self.chat, ask, self.max_context)
        if len(draft.context) >= self.max_context:
            raise too_long(self.max_context, len(draft.context), ask.prompt_field)
        return draft

    def _put_over(self, turn: AgentTurn, future: "Future[Completion]") -> None:
        if turn.is_over:
            self.inbox.put(InboxEvent(self.work.fence.group, turn.call.episode, completion=future, turn=turn))

    def _leave(self, call: AgentCall, conversation: Conversation | None) -> None:
        """Handle a disconnected client: cancel turns without a client, or mark a partially sent response as undelivered."""
        if conversation is None or conversation.attempt != call.attempt:
            return
        if call.answered:
            if conversation.receivers.get(call.answered) is call:
                self._mark(call, conversation, conversation.answers(call.answered, call.ask.count), delivered=False)
            return
        for turn in conversation.open:
            if not turn.is_awaited and not turn.later:
                turn.stop()

    def _mark(self, call: AgentCall, conversation: Conversation, steps: Sequence[int], delivered: bool) -> None:
        own = [index for index in steps if index >= conversation.inherited]
        for index in own:
            if call.episode in self.recorder.episodes and conversation.lines.steps[index].delivered != delivered:
                self.recorder.mark_delivered(call.episode, index, delivered)
                conversation.refresh(self.recorder.episodes[call.episode])

    # commits

    def _commit(self, over: Sequence[AgentTurn]) -> None:
        """Commit sampled turns, then send the responses. If a server returned no valid turn for a served client, only the
        requests for this turn fail; the episode continues.
        """
        fresh = [turn for turn in dict.fromkeys(over) if turn in self._open_turns(turn.call.episode)]
        records: dict[AgentTurn, list[StepRecord]] = {}
        for turn in fresh:
            try:
                records[turn] = self.records.of(turn, self._conversations[turn.call.episode])
            except GrammarError as error:
                turn.refuse(_constraint_error(turn.ask.constraint, error))
                self._close_turn(turn)
            except (ModelError, InfraError, ConfigError) as error:
                if not (self.sampling.is_clients and self.experiment.engine.at_url):
                    raise
                log.warning("a call of episode %d failed: %s", turn.call.episode, error)
                turn.refuse(_upstream_error(error))
                self._close_turn(turn)
        if not records:
            return
        faultpoint("agent_call.sampled")
        steps = iter(self.recorder.commit_calls([record for turn_records in records.values() for record in turn_records]))
        faultpoint("agent_call.committed")
        for turn, turn_records in records.items():
            stored = [step for step in islice(steps, len(turn_records)) if step is not None]
            if stored or not turn_records:
                self._release_turn(turn, turn_records, stored)
            else:  # its agent has ended meanwhile
                turn.refuse(_attempt_over())
                self._close_turn(turn)
        faultpoint("agent_call.released")

    def _open_turns(self, number: int) -> Sequence[AgentTurn]:
        conversation = self._conversations.get(number)
        return conversation.open if conversation is not None and number in self.recorder.episodes else ()

    def _release_turn(self, turn: AgentTurn, records: Sequence[StepRecord], stored: Sequence[Step]) -> None:
        """Send the committed turn to the waiting requests."""
        number = turn.call.episode
        conversation = self._conversations[number]
        for record, step in zip(records, stored, strict=True):
            conversation.add(step, record.request)
            conversation.keep_session(step, turn.session)
            if number in self._replays:
                self._replays[number].add(messages_of(conversation.lines.steps, step.index))
        if number in self.recorder.episodes:  # a hook may have failed it
            conversation.refresh(self.recorder.episodes[number])
        if turn.cut:
            turn.leave()
        else:
            conversation.receivers[turn.call.request_id] = turn.waiting[-1]
            turn.answer(tuple(conversation.turn_of(step.index) for step in stored))
        self._close_turn(turn)

    def _close_turn(self, turn: AgentTurn) -> None:
        """Take the requests that came while the turn was being cancelled. End the episode if it waits for this turn only."""
        number = turn.call.episode
        conversation = self._conversations[number]
        conversation.open.remove(turn)
        self._arrived.update(turn.later)
        for call in turn.later:
            self._take(call)
        if conversation.is_ending and not conversation.open:
            self._end({number: self._ends[number]})

    # ends

    def _judge_agents(self, states: Mapping[int, AgentState]) -> None:
        """End the episodes whose agents have ended, and restart lost agents."""
        ended = {number: state for number, state in states.items() if state.status == "ended" and number in self._conversations}
        for number, state in ended.items():
            conversation = self._conversations[number]
            if conversation.is_ending or conversation.attempt != state.attempt:
                continue
            conversation.is_ending = True
            self._ends[number] = AgentOutcome(state.error_class, state.error, state.answer, state.rewards)
            for turn in conversation.open:
                turn.stop()
        self._end(
            {
                n: self._ends[n]
                for n in ended
                if n in self._ends and n in self._conversations and not self._conversations[n].open
            }
        )
        lost = [state for number, state in states.items() if number in self._conversations and _is_lost(state)]
        for state in lost:
            self._give_again(state)

    def _give_again(self, state: AgentState) -> None:
        """Start the episode's next attempt with a new agent. If `MAX_LOSSES` agents were lost, fail the episode instead."""
        if state.is_overdue and not agent_holds.lose_agent(self.db, self.work.fence, state, settings().lease_seconds):
            return
        if state.losses + state.is_overdue >= MAX_LOSSES:
            message = f"its agent was lost {MAX_LOSSES} times{f': {state.error}' if state.error else ''}"
            self._finish([Outcome(state.episode, "infra_error", error_class="lost", error=message)])
            return
        self._restart(state.episode)

    def _end_replay(self, number: int, reason: str) -> None:
        """End an attempt that contradicts its record. The next attempt has no record; without one, a fork cannot go on."""
        reason = f"the agent did not repeat its requests: {reason}"
        agent_holds.end_replay(self.db, self.work.fence, number, self._conversations[number].attempt, reason)
        if self.recorder.episodes[number].inherited:
            self._finish([Outcome(number, "failed", error_class=MISMATCH, error=reason)])
        else:
            self._restart(number)

    def _restart(self, number: int) -> None:
        """Start the episode's next attempt with a new agent."""
        attempt = self._conversations[number].attempt + 1
        self._drop(number)
        self.recorder.restart(number)
        requests = load_requests(self.db, [number]) if self.recorder.episodes[number].inherited else {}
        self._hold(number, Conversation.of(self.recorder.episodes[number], attempt, requests.get(number, {})))
        self.agents.give([number])

    def _end(self, ended: Mapping[int, AgentOutcome]) -> None:
        """End episodes whose agents have ended and that have no turn in flight. If an episode has judges, first send their
        questions.
        """
        stopped, failures = dict[int, StopReason](), list[Outcome]()
        for number, end in ended.items():
            episode = self.recorder.episodes.get(number)
            if episode is None or number in self.judging.by_episode:
                continue
            if end.answer is not None:
                episode = self.recorder.episodes[number] = replace(episode, answer=end.answer)
            self.recorder.own_rewards[number] = end.rewards or {}
            self.recorder.agent_errors[number] = (end.error_class, end.error)
            judged = judge_end(episode, end)
            if isinstance(judged, Outcome):
                failures.append(judged)
            else:
                stopped[number] = judged
        faultpoint("agent.rewarded")
        outcomes, judge_calls = self.recorder.ask_judges(stopped)
        for number, calls in judge_calls.items():
            self.judging.add(number, calls, self.experiment.judges)
        self._observe(judge_calls.keys())  # another worker may have asked the judges before
        self.judging.send(sorted(judge_calls.keys() & self.judging.by_episode.keys()))
        self._finish([*failures, *outcomes])

    def _observe(self, episodes: Set[int]) -> None:
        answered = self.judging.take_answered(episodes)
        if answered:
            self.recorder.commit_results(answered)

    def _finish(self, outcomes: Sequence[Outcome]) -> None:
        self.recorder.finish(outcomes)

    def _hold(self, number: int, conversation: Conversation) -> None:
        self._load_replay(number, conversation)
        self.server.hold(number, conversation.attempt, self)  # a request waits in the inbox until the conversation is there
        self._conversations[number] = conversation

    def _load_replay(self, number: int, conversation: Conversation) -> None:
        """Load the record from which the agent's requests are answered, if there is one."""
        agent, episode = self.sampling.agent, self.recorder.episodes[number]
        is_again = conversation.attempt > 0 and agent.resume == "replay"
        if not is_again and not episode.inherited:
            return
        earlier = load_earlier(self.db, episode, conversation.attempt) if is_again else []
        try:
            self._replays[number] = AgentReplay.of(agent.replay_ignore, conversation, episode.inherited, earlier)
        except Contradiction as error:
            agent_holds.end_replay(self.db, self.work.fence, number, conversation.attempt, str(error))

    def _drop(self, number: int) -> None:
        conversation = self._conversations.pop(number, None)
        if conversation is None:
            return
        self.server.drop(number, self)
        self._replays.pop(number, None)
        for call in [call for call in self._waiting if call.episode == number]:
            del self._waiting[call]
            self._arrived.discard(call)
            call.tell(AttemptGone())
        for turn in conversation.open:
            turn.stop()
            turn.leave()
        self._free(conversation)

    def _free(self, conversation: Conversation) -> None:
        for session in conversation.all_sessions:
            self.engine.release(session)

    def _release(self, episode: Episode) -> None:
        self._drop(episode.id)


def fingerprint_of(policy: PolicyRef) -> str:
    """Return a policy's `system_fingerprint`: a hash of its weights."""
    return f"fp_{sha256('/'.join(policy.weights).encode()).hexdigest()[:10]}"


def _is_lost(state: AgentState) -> bool:
    return state.status == "lost" or state.is_overdue


@dataclass(frozen=True)
class AgentSampling:
    """Decides how a group's turns are sampled: limits, random numbers and the client's options."""

    db: Database
    work: GroupWork
    limits: RolloutConfig
    agent: AgentConfig
    engine: Backend
    is_clients: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_clients", self.agent.name == CLIENTS)

    def check_count(self, conversation: Conversation) -> None:
        """Check that the episode is allowed another request.

        Raises:
            RequestError: the episode has made `agent.max_calls` requests, or too many of its requests are open.
        """
        if conversation.count >= self.agent.max_calls:
            message = f"This episode has used all of its {self.agent.max_calls} model calls (agent.max_calls)."
            raise RequestError(429, message, code="max_calls")
        max_open = settings().endpoint_calls if self.is_clients else MAX_OPEN
        if len(conversation.open) >= max_open:
            raise RequestError(
                429, f"{max_open} calls of this episode are open, which is the limit.", code="rate_limit_exceeded"
            )

    def check(self, ask: Ask) -> None:
        """Check that the engine supports the request's options.

        Raises:
            RequestError: the engine does not support an option.
        """
        if ask.top_logprobs and not self.engine.top_logprobs:
            message = f"The engine {self.engine.name!r} does not support top_logprobs."
            raise RequestError(400, message, code="unsupported_parameter", param="top_logprobs")
        if (ask.logprobs or ask.token_ids) and not self.engine.logprobs:
            message = f"The engine {self.engine.name!r} returns no token ids and no logprobs of its turns."
            raise RequestError(400, message, "unsupported_parameter", "logprobs" if ask.logprobs else "return_token_ids")
        if ask.stop and "stop" not in self.engine.options:
            message = f"The engine {self.engine.name!r} does not support stop strings."
            raise RequestError(400, message, code="unsupported_parameter", param="stop")
        try:
            engines.check_options(self.engine, self._limits(ask))
        except ConfigError as error:
            raise RequestError(400, error.message, code="unsupported_parameter") from error

    def constrain(self, ask: Ask, chat: Chat) -> Ask:
        """Return the request with the constraint that will be enforced. See `AgentRollout.constrain`."""
        constraint = ask.constraint
        if not constraint:
            return self._without_refused(ask)
        obstacle = self._find_obstacle(constraint, ask.tools, chat)
        names = ", ".join(constraint.field_names)
        if not obstacle:
            try:
                if constraint.needs_grammar:
                    limits = grammar.turn_grammar(constraint, ask.tools, chat, ())
                    grammar.check_schemas(constraint, ask.tools)
                    chat.grammars.matcher(limits)
            except ModelError as error:
                raise _constraint_error(constraint, error) from error
            return self._without_refused(replace(ask, enforced=True))
        if self.agent.strict_api:
            message = f"{names}: it cannot be enforced, because {obstacle}."
            raise RequestError(400, message, "unsupported_parameter", constraint.field_names[0])
        messages = grammar.with_wish(ask.messages, constraint)
        return replace(ask, messages=messages, not_applied=(*ask.not_applied, *constraint.field_names))

    def _find_obstacle(self, constraint: Constraint, tools: Sequence[Schema], chat: Chat) -> str:
        if constraint.needs_grammar and not self.engine.grammars:
            return f"the engine {self.engine.name!r} does not support grammars"
        if constraint.one_call and not constraint.needs_grammar and "stop" not in self.engine.options:
            return f"the engine {self.engine.name!r} does not support stop strings"
        return grammar.find_obstacle(constraint, tools, chat)

    def _without_refused(self, ask: Ask) -> Ask:
        """Return the request. Raise RequestError if it has fields without effect and `agent.strict_api` is set."""
        if ask.not_applied and self.agent.strict_api:
            message = f"{', '.join(ask.not_applied)}: it has no effect here, and agent.strict_api refuses such fields."
            raise RequestError(400, message, "unsupported_parameter", ask.not_applied[0])
        return ask

    def draws(self, conversation: Conversation, call: AgentCall, draft: Draft) -> Sequence[int]:
        """Return the draw number of each choice: its number among the samples of the same prompt. If a served client sent a
        seed, the numbers start at 0.
        """
        if self.is_clients and "seed" in call.ask.asked:
            return tuple(range(call.ask.count))
        return conversation.draws(call, prompt_hash(draft))

    def request(
        self, turn: AgentTurn, choice: int, draw: int, max_tokens: int, episode: Episode, chat: Chat
    ) -> GenerateRequest:
        """Return the request for the engine. If the run serves clients, all sampling options of the client apply. In other
        runs, only its stop strings and its token limit apply.
        """
        ask = turn.ask
        limits = with_stop(self._limits(ask), call_stops(ask, chat))
        keys = self.work.sampling_key(episode)
        keys = key_asked(keys, ask.asked) if self.is_clients else keys
        key = keys.of_turn(turn.draft.context, draw)
        request = GenerateRequest.within(limits, turn.draft.context, self.work.policy, key, session=turn.session)
        return replace(
            request,
            max_new_tokens=max_tokens,
            follows_length=True,
            heard=partial(turn.hear, choice),
            top_logprobs=ask.top_logprobs,
            grammar=turn.grammar,
        )

    def note_asked(self, ask: Ask) -> None:
        """Record an event that the run's sampling options replace those of its clients. Do nothing if the run serves clients,
        or if this process has already recorded the event for the run.
        """
        if ask.asked and not self.is_clients and self.work.run_id not in _told_runs:
            _told_runs.add(self.work.run_id)
            agent_holds.note_asked(self.db, self.work.run_id, ", ".join(sorted(ask.asked)))

    def _limits(self, ask: Ask) -> RolloutConfig:
        return with_stop(limits_asked(self.limits, ask.asked) if self.is_clients else self.limits, ask.stop)


@dataclass(frozen=True)
class AgentRecords:
    """The builder of the records of a group's turns, one record per choice."""

    work: GroupWork
    chat: Chat
    limits: RolloutConfig
    max_context: int

    def of(self, turn: AgentTurn, conversation: Conversation) -> list[StepRecord]:
        """Return the records of a finished turn, and set the turn's `completions` and `cut`.

        If the turn was cancelled, choices without a token have no record.

        Raises:
            AgentRLError: the engine could not sample the turn.
        """
        turn.completions = [_result(future) for future in turn.futures]
        turn.cut = any(done is None for done in turn.completions) or (turn.stopped and self._is_cut(turn))
        step_records: list[StepRecord] = []
        first = ""
        for choice, done in enumerate(turn.completions):
            if done is not None and (done.token_ids or not turn.cut):
                message = parse_turn(self.chat, turn.ask, turn.draft.context, done.token_ids)
                request = self._request(turn, conversation, choice, done, message)
                step_records.append(self._record(turn, conversation, done, request, message, first))
                first = first or request.id
        return step_records

    def most_tokens(self, turn: AgentTurn) -> int:
        """Return the most tokens that the turn may have. This is the smallest of the run's limit, the client's limit, and the
        number of tokens that the context still has room for.
        """
        limit = min(self.max_context - len(turn.draft.context), self.limits.max_new_tokens)
        return limit if turn.ask.max_tokens is None else min(limit, turn.ask.max_tokens)

    def _is_cut(self, turn: AgentTurn) -> bool:
        limit = self.most_tokens(turn)
        return any(done.finish_reason == "length" and len(done.token_ids) < limit for done in turn.completions if done)

    def _request(
        self, turn: AgentTurn, conversation: Conversation, choice: int, done: Completion, message: Message
    ) -> StepRequest:
        """Return the request in the form that is stored with the choice's step."""
        call = turn.call
        return StepRequest(
            id=choice_id(conversation.stopped_id(call.request_id) if turn.cut else call.request_id, choice),
            body_hash=call.body_hash,
            asked={**call.ask.asked, **self._kept(turn, done, message), "created": call.created, "draw": turn.draws[choice]},
            tools=call.ask.tools,
            template_options=call.ask.template_options,
        )

    def _record(
        self,
        turn: AgentTurn,
        conversation: Conversation,
        done: Completion,
        request: StepRequest,
        message: Message,
        first: str,
    ) -> StepRecord:
        """Return the record of one choice. `message` is the message of its tokens. `first` is the request id of the turn's
        first choice, whose prompt the other choices share; it is empty for the first choice itself.
        """
        draft = turn.draft.sibling(conversation.messages(turn.draft), ANOTHER_CHOICE) if first else turn.draft
        calls = tuple(CallRecord(parsed, "none", _refusal(parsed)) for parsed in message.tool_calls)
        refused = tuple(item.result for item in calls if item.result is not None)
        step = draft.step(
            len(conversation.lines.steps),
            done,
            message,
            self.work.policy.version,
            delivered=not turn.cut and turn.is_awaited,
            draw=request.asked["draw"],
            side_call=turn.ask.side_call,
        )
        return StepRecord(
            episode=turn.call.episode,
            step=replace(step, results=refused if calls and len(refused) == len(calls) else None),
            policy_id=self.work.policy_id,
            text=self.chat.decode(done.token_ids),
            calls=calls,
            request=request,
            shared_messages=draft.shared_messages,
            beside=first,
            earlier_results={} if first else conversation.shown(turn.ask),
            replayed=REPLAYED in turn.noted,
        )

    def _kept(self, turn: AgentTurn, done: Completion, message: Message) -> dict[str, Any]:
        """Return the values that the row stores besides the requested sampling options.

        The stop strings explain why the turn ended. The number of equal histories is stored if it is above one. The likeliest
        tokens of each position are stored if the client requested them, because a repeated request must get the same response.
        The constraint and the names of fields without effect are stored too.
        """
        ask = turn.ask
        stops = list(dict.fromkeys((*ask.stop, *call_stops(ask, self.chat))))
        fields = {"stop": stops, EQUAL: turn.draft.equal if turn.draft.equal > 1 else 0, TOP: done.top}
        fields |= {"not_applied": list(ask.not_applied), KEPT: dict(ask.kept)}
        fields |= {GRAMMAR: _constraint_record(turn, done, message, self.chat)}
        return {name: value for name, value in fields.items() if value} | dict(turn.noted)


def _attempt_over() -> RequestError:
    return RequestError(409, "This episode has ended, or has a newer attempt.", code="episode_over")


def _constraint_error(constraint: Constraint, error: ModelError) -> RequestError:
    """Return the error for a request whose constraint cannot be enforced."""
    names = constraint.field_names
    return RequestError(400, f"{', '.join(names)}: {error.message}", "invalid_constraint", names[0])


def _upstream_error(error: AgentRLError) -> RequestError:
    """Return the error for a request whose turn the engine's server did not sample correctly, or which that server refused. Its
    text does not have the server's address.
    """
    message = error.message
    for url in server_urls(settings()):
        message = message.replace(f" at {url}", "").replace(urlsplit(url).netloc, "[the server]")
    message = f"{message:.{MAX_ERROR}}"
    if isinstance(error, RequestRefused) and error.status == 400:  # a repetition would be refused too
        return RequestError(400, message, "upstream_refused")
    return RequestError(502, message, "upstream_failed", kind="server_error")


def _constraint_record(turn: AgentTurn, done: Completion, message: Message, chat: Chat) -> dict[str, Any]:
    """Return what the row stores of the turn's constraint: the constraint, and whether the turn keeps it. If a grammar kept it,
    also the grammar's hash, the library's version, and the indices of the tokens that the grammar chose.
    """
    ask = turn.ask
    if not ask.constraint:
        return {}
    open_call = done.finish_reason == "length" and grammar.has_open_call(message, chat.manner.tool_format)
    is_kept = grammar.is_kept(ask.constraint, message, ask.tools, open_call)
    record: dict[str, Any] = {**ask.constraint.stored, "kept": is_kept}
    if turn.grammar:
        record |= {"sha256": grammar.grammar_hash(turn.grammar), "library": grammar.library(), "guided": list(done.guided)}
    return record


def grammar_of(ask: Ask, prompt_ids: Sequence[int], chat: Chat) -> str:
    """Return the grammar of the request's turn; empty if no grammar limits it."""
    if not (ask.enforced and ask.constraint.needs_grammar):
        return ""
    return grammar.turn_grammar(ask.constraint, ask.tools, chat, prompt_ids)


def call_stops(ask: Ask, chat: Chat) -> tuple[str, ...]:
    """Return the stop strings that end the turn after its first call, if the request allows only one and has no grammar."""
    if not (ask.enforced and ask.constraint.one_call) or ask.constraint.needs_grammar:
        return ()
    return (grammar.call_end(ask.tools, chat.manner.tool_format),)


def _refusal(call: ToolCall) -> ToolResult | None:
    """Return the result that is stored for an unreadable call; None for a readable one. The agent receives an unreadable call
    as text.
    """
    return None if call.error is None else ToolResult(call.error, "parse_error")


def _result(future: "Future[Completion]") -> Completion | None:
    """Return the sampled completion; None if the choice was cancelled before it began."""
    try:
        return future.result()
    except CancelledError:
        return None
