"""The rollout of one group whose turns agents from outside decide: each call of the model is sampled, committed, released.

An agent is a process of its own, one per episode (`agentrl worker agents`); it calls the endpoint, which forwards to this
process. A call is matched with the episode's record, so that its tokens go on from those that were sampled, or opens a chain.
It is committed before its reply is whole. When the agent has ended its episode is scored, and ends.
"""

from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from logging import getLogger

from agentrl.workers.jobs.agent_calls import Accepted, AgentCall, Answered, Left, Refused
from agentrl.workers.jobs.agent_ends import AgentEnd, judge_end
from agentrl.workers.jobs.agent_records import AgentRecords
from agentrl.workers.jobs.agent_sampling import AgentSampling
from agentrl.workers.jobs.agent_turns import AgentTurn, EpisodeTurns, too_long, turn_of
from agentrl.workers.jobs.episode_recorder import EpisodeRecorder
from agentrl.workers.jobs.inbox import Event, Inbox
from agentrl.workers.jobs.pending_agents import Agents, PendingAgents
from agentrl.workers.jobs.pending_calls import PendingCalls
from agentrl.workers.jobs.sampling_server import SamplingServer, sampling_server
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.dialects import RequestError
from agentrl.workflow.engines import Completion, Engine
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.hooks import load_hooks
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.settings import settings
from agentrl.workflow.store import agent_holds, agent_steps
from agentrl.workflow.store.agent_holds import AgentState
from agentrl.workflow.store.agent_steps import CallStep, RequestMark
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.rollout_claims import MAX_LOSSES, Fence, GroupWork, Outcome
from agentrl.workflow.trajectory import Episode, PolicyRef, Step, StopReason

log = getLogger("agentrl.agent_rollout")


@dataclass
class AgentRollout:
    """Drives the unfinished episodes of one group, and `is_live` until they end or the group's fence is among the `lost`.

    Args:
        max_context: the most tokens that fit into one row of the model.
        server: where its agents' calls come.
        served: who runs its agents; unset: the agents workers, to which they are sent.
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
    _turns: dict[int, EpisodeTurns] = field(default_factory=dict)
    _ends: dict[int, AgentEnd] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.experiment.config
        assert config.agent is not None
        self.limits, self.model = config.rollout, self.work.run
        self.fingerprint = fingerprint_of(self.work.policy)
        env, judges = self.experiment.env, self.experiment.judges
        hooks = load_hooks(config.hooks)
        self.recorder = EpisodeRecorder(self.db, self.work, env, hooks, judges, self.limits, self._release)
        self.recorder.of_agents = True
        self.recorder.counts_own = config.agent.own_rewards
        self.records = AgentRecords(self.work, self.chat, self.limits, self.max_context)
        self.sampling = AgentSampling(self.db, self.work, self.limits, config.agent, self.experiment.engine)
        self.judging = PendingCalls(self.db, self.work.fence.group, self.inbox, self.recorder.report_wait)
        self.agents: Agents = self.served or PendingAgents(self.db, self.work.fence, self.inbox, self.recorder.report_wait)

    @property
    def is_live(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.recorder.episodes) and self.work.fence not in self.lost

    @property
    def may_gather(self) -> bool:
        """Whether several turns are sampled, which may end in the same decoding step."""
        return sum(len(turns.open) for turns in self._turns.values()) > 1

    def lose(self) -> None:
        """Stops all writing, since another worker has the group or this attempt is over."""
        self.lost.add(self.work.fence)
        self.close()

    def close(self) -> None:
        """Serves these episodes no more, waits for nothing, and stops what is sampled for them."""
        self._is_closed = True
        self.judging.forget()
        self.agents.forget()
        for number, turns in self._turns.items():
            self.server.drop(number, self)
            for turn in turns.open:
                turn.stop()
                turn.leave()
        for call in list(self._arrived):
            call.tell(Left())

    def start(self) -> None:
        """Serves every episode from the end of its record, and gives those to agents that have none."""
        numbers = list(self.recorder.episodes)
        attempts = agent_holds.current_attempts(self.db, self.work.fence.group)
        marks = agent_steps.load_marks(self.db, numbers)
        agent_holds.publish_address(self.db, self.work.fence, self.server.address)
        self.recorder.begin_with_agents()
        for number, episode in self.recorder.episodes.items():
            self._hold(number, EpisodeTurns.of(episode, attempts[number], marks.get(number, [])))
        self.agents.give(list(self.recorder.episodes))
        self._judge_agents(self.agents.load())

    def take(self, call: AgentCall) -> None:
        """Puts a call into the inbox; from any thread."""
        self._arrived.add(call)
        self.inbox.put(Event(self.work.fence.group, call.episode, request=call))
        if self._is_closed:  # nobody reads the inbox any more
            call.tell(Left())

    def left(self, call: AgentCall) -> None:
        """Nobody waits for this call any more; from any thread."""
        call.gone.set()
        self.inbox.put(Event(self.work.fence.group, call.episode, request=call))

    def handle(self, events: Sequence[Event]) -> None:
        """Commits sampled turns, begins those that are asked for, and ends the episodes of agents that have ended."""
        self._commit([event.turn for event in events if event.turn is not None])
        for event in events:
            if event.request is not None:
                self._take(event.request)
            if event.reason:
                self.judging.note_refusal(event.episode, event.call, event.reason)
        self._observe({event.episode for event in events if event.call and not event.reason})
        if woken := {event.episode for event in events if event.woken}:
            self._judge_agents(self.agents.load(woken))

    def poll_calls(self) -> None:
        """Reads the rows of agents and of judges' calls without a wake-up, and sends again what seems lost.

        Raises:
            ServiceError, InfraError: no worker serves the tools, or runs agents.
        """
        self._observe(self.judging.by_episode.keys())
        self.judging.send_overdue()
        states = self.agents.load()
        self._judge_agents(states)
        self.agents.send_overdue([state for number, state in states.items() if number in self._turns])

    # calls

    def _take(self, call: AgentCall) -> None:
        """Answers a call: joins it to what is sampled, says again what was, or begins a turn.

        One that cannot be answered, since something fails here, stays among those that have arrived: `close` sends it away.
        """
        turns = self._turns.get(call.episode)
        if call.gone.is_set():
            self._arrived.discard(call)
            self._leave(call, turns)
            return
        faultpoint("agent_call.in")
        try:
            self._answer(call, turns)
        except RequestError as error:
            call.tell(Refused(error))
        self._arrived.discard(call)

    def _answer(self, call: AgentCall, turns: EpisodeTurns | None) -> None:
        if turns is None or turns.is_ending or turns.attempt != call.attempt or call.episode not in self.recorder.episodes:
            raise RequestError(409, "This episode is over, or another attempt of it is on.", code="episode_over")
        if turns.is_other(call):
            said = "This Idempotency-Key came with another body before."
            raise RequestError(422, said, code="idempotency_key_reused")
        flying = turns.in_flight(call)
        if flying is not None:
            flying.later.append(call) if flying.stopped else flying.join(call)
            return
        if recorded := turns.recorded(call):
            self._answer_again(call, turns, recorded)
            return
        self.sampling.check_count(turns)
        self._begin(call, turns)

    def _answer_again(self, call: AgentCall, turns: EpisodeTurns, marks: Sequence[RequestMark]) -> None:
        """Gives the recorded answer, which is delivered now if it was not."""
        stored = [turns.lines.steps[mark.step] for mark in marks]
        prompt = turns.prompt(stored[0])
        created = int(marks[0].asked.get("created", call.created))
        self._mark(call, turns, marks, delivered=True)
        turns.given[marks[0].request_id] = call
        call.answered = marks[0].request_id
        call.tell(Accepted(prompt, marks[0].request_id, created, len(prompt) - len(stored[0].prompt_ids)))
        call.tell(Answered(tuple(turn_of(step, mark.asked) for step, mark in zip(stored, marks, strict=True))))

    def _begin(self, call: AgentCall, turns: EpisodeTurns) -> None:
        """Submits the choices of a new turn."""
        self.sampling.check(call.ask)
        draft = turns.draft(self.chat, call.ask, self.max_context)
        if len(draft.context) >= self.max_context:
            raise too_long(self.max_context, len(draft.context))
        if not self.recorder.begin_step(self.recorder.episodes[call.episode]):
            self._drop(call.episode)
            raise RequestError(409, "This episode is over.", code="episode_over")
        turn = AgentTurn(call, draft, tuple(self.sampling.draws(turns, call, draft)), turns.session(draft))
        turns.open.append(turn)
        turn.join(call)
        self.sampling.note_asked(call.ask)
        most, episode = self.records.most_tokens(turn), self.recorder.episodes[call.episode]
        for choice, draw in enumerate(turn.draws):
            turn.futures.append(self.engine.submit(self.sampling.request(turn, choice, draw, most, episode)))
        for future in list(turn.futures):
            future.add_done_callback(partial(self._put_over, turn))
        faultpoint("generate.sent")

    def _put_over(self, turn: AgentTurn, future: "Future[Completion]") -> None:
        if turn.is_over:
            self.inbox.put(Event(self.work.fence.group, turn.call.episode, completion=future, turn=turn))

    def _leave(self, call: AgentCall, turns: EpisodeTurns | None) -> None:
        """Stops what nobody waits for any more; an answer that the call did not get whole was not delivered."""
        if turns is None or turns.attempt != call.attempt:
            return
        if call.answered:
            if turns.given.get(call.answered) is call:
                self._mark(call, turns, turns.answers(call.answered, call.ask.count), delivered=False)
            return
        for turn in turns.open:
            if not turn.is_awaited and not turn.later:
                turn.stop()

    def _mark(self, call: AgentCall, turns: EpisodeTurns, marks: Sequence[RequestMark], delivered: bool) -> None:
        for mark in marks:
            if call.episode in self.recorder.episodes and turns.lines.steps[mark.step].delivered != delivered:
                self.recorder.mark_delivered(call.episode, mark.step, delivered)
                turns.refresh(self.recorder.episodes[call.episode])

    # commits

    def _commit(self, over: Sequence[AgentTurn]) -> None:
        """Commits turns that are sampled, then releases their replies."""
        fresh = [turn for turn in dict.fromkeys(over) if turn in self._open_turns(turn.call.episode)]
        records = {turn: self.records.of(turn, self._turns[turn.call.episode]) for turn in fresh}
        if not fresh:
            return
        faultpoint("agent_call.sampled")
        made = iter(self.recorder.commit_calls([record for turn in fresh for record in records[turn]]))
        faultpoint("agent_call.committed")
        for turn in fresh:
            stored = [next(made) for _ in records[turn]]
            self._release_turn(turn, records[turn], stored)
        faultpoint("agent_call.released")

    def _open_turns(self, number: int) -> Sequence[AgentTurn]:
        turns = self._turns.get(number)
        return turns.open if turns is not None and number in self.recorder.episodes else ()

    def _release_turn(self, turn: AgentTurn, records: Sequence[CallStep], stored: Sequence[Step]) -> None:
        """Gives the reply to whoever waits; one that nobody got is marked so."""
        number = turn.call.episode
        turns = self._turns[number]
        turns.open.remove(turn)
        for record, step in zip(records, stored, strict=True):
            asked, tools = record.asked, tuple(record.tools)
            mark = RequestMark(step.index, record.request_id, record.request_hash, asked, tools, record.template_options)
            turns.add(step, mark)
            turns.keep_session(step, turn.session)
        if number in self.recorder.episodes:  # a hook may have failed it
            turns.refresh(self.recorder.episodes[number])
        if turn.cut:
            turn.leave()
        else:
            turns.given[turn.call.request_id] = turn.waiting[-1]
            turn.answer(tuple(turn_of(step, record.asked) for step, record in zip(stored, records, strict=True)))
        self._arrived.update(turn.later)
        for call in turn.later:
            self._take(call)
        if turns.is_ending and not turns.open:
            self._end({number: self._ends[number]})

    # ends

    def _judge_agents(self, states: Mapping[int, AgentState]) -> None:
        """Ends the episodes of agents that have ended, and gives those of lost agents to others."""
        ended = {number: state for number, state in states.items() if state.status == "ended" and number in self._turns}
        for number, state in ended.items():
            turns = self._turns[number]
            if turns.is_ending or turns.attempt != state.attempt:
                continue
            turns.is_ending = True
            self._ends[number] = AgentEnd(state.error_class, state.error, state.answer, state.rewards)
            for turn in turns.open:
                turn.stop()
        self._end({n: self._ends[n] for n in ended if n in self._ends and n in self._turns and not self._turns[n].open})
        lost = [state for number, state in states.items() if number in self._turns and _is_lost(state)]
        for state in lost:
            self._give_again(state)

    def _give_again(self, state: AgentState) -> None:
        """The agent begins anew: the next attempt of the episode, with an agent of its own."""
        if state.is_overdue and not agent_holds.lose_agent(self.db, self.work.fence, state, settings().lease_seconds):
            return
        number, turns = state.episode, self._turns[state.episode]
        for turn in turns.open:
            turn.stop()
            turn.leave()
        if state.losses + state.is_overdue >= MAX_LOSSES:
            said = f"its agent was lost {MAX_LOSSES} times{f': {state.error}' if state.error else ''}"
            self._finish([Outcome(number, "infra_error", error_class="lost", error=said)])
            return
        self._free(turns)
        self.recorder.restart(number)
        self._hold(number, EpisodeTurns(turns.attempt + 1))
        self.agents.give([number])

    def _end(self, ended: Mapping[int, AgentEnd]) -> None:
        """Ends episodes whose agents have ended and for which nothing is sampled; judges are asked first."""
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
        outcomes, asked = self.recorder.ask_judges(stopped)
        for number, calls in asked.items():
            self.judging.add(number, calls, self.experiment.judges)
        self._observe(asked.keys())  # another worker may have asked the judges before
        for number in asked.keys() & self.judging.by_episode.keys():
            self.judging.send(number)
        self._finish([*failures, *outcomes])

    def _observe(self, episodes: Set[int]) -> None:
        answered = self.judging.take_answered(episodes)
        if answered:
            self.recorder.commit_results(answered)

    def _finish(self, outcomes: Sequence[Outcome]) -> None:
        self.recorder.finish(outcomes)

    def _hold(self, number: int, turns: EpisodeTurns) -> None:
        self._turns[number] = turns
        self.server.hold(number, turns.attempt, self)

    def _drop(self, number: int) -> None:
        turns = self._turns.pop(number, None)
        if turns is None:
            return
        self.server.drop(number, self)
        for turn in turns.open:
            turn.stop()
            turn.leave()
        self._free(turns)

    def _free(self, turns: EpisodeTurns) -> None:
        for session in turns.all_sessions:
            self.engine.release(session)

    def _release(self, episode: Episode) -> None:
        """The episode has ended."""
        self._drop(episode.id)


def fingerprint_of(policy: PolicyRef) -> str:
    """Return the `system_fingerprint` of a policy: the same for the same weights, and only a hash of them."""
    return f"fp_{sha256('/'.join(policy.weights).encode()).hexdigest()[:10]}"


def _is_lost(state: AgentState) -> bool:
    return state.status == "lost" or state.is_overdue
