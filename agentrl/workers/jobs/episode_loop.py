"""The built-in loop of one group. For each episode, it asks `next_action` for the next action, performs the action and commits
the result.

- *Generate*: sample a turn, commit it, then send its calls.
- *CallTools*: wait for the calls and commit their results. The policy then reads the results.
- *Finish*: send the questions to the judges as calls too, then end the episode with its reward.

`EpisodeRecorder` writes the commits, and `PendingCalls` waits for the calls. The loop itself holds only the turns that are
being sampled.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from agentrl.workers.jobs.episode_recorder import EpisodeRecorder
from agentrl.workers.jobs.inbox import Inbox, InboxEvent, put_completion
from agentrl.workers.jobs.pending_calls import PendingCalls
from agentrl.workflow.agent import Action, CallTools, Finish, Generate, next_action, refusal
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.engines import Completion, Engine, GenerateRequest
from agentrl.workflow.errors import InfraError, RefusedMessages
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.hooks import load_hooks
from agentrl.workflow.inference.prompt_draft import Draft, draft_turn
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.store import steps
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.rollout_claims import Fence, GroupWork, Outcome
from agentrl.workflow.trajectory import CallRecord, Episode, Message, Step, StepRecord, StopReason


@dataclass
class GroupRollout:
    """Drives a group's unfinished episodes in the built-in loop, until all of them end or another worker claims the group."""

    db: Database
    work: GroupWork
    experiment: Experiment
    engine: Engine
    chat: Chat
    inbox: Inbox
    lost: set[Fence]
    _drafts: dict[int, Draft] = field(default_factory=dict)
    _turns: dict[int, Future[Completion]] = field(default_factory=dict)
    _opening: Draft | None = None

    def __post_init__(self) -> None:
        self.env, self.tools, self.judges = self.experiment.env, self.experiment.tools, self.experiment.judges
        self.limits = self.experiment.config.rollout
        hooks = load_hooks(self.experiment.config.hooks)
        self.schemas = [tool.schema for tool in self.tools.values()]
        self.recorder = EpisodeRecorder(self.db, self.work, self.env, hooks, self.judges, self.limits, self._release)
        self.calls = PendingCalls(self.db, self.work.fence.group, self.inbox, self.recorder.report_wait)

    @property
    def is_live(self) -> bool:
        """True if this worker still has an episode of the group to drive."""
        return bool(self.recorder.episodes) and self.work.fence not in self.lost

    may_gather = True
    """True, because concurrent turns of a group can be committed together."""

    def lose(self) -> None:
        """Write nothing more, because another worker holds the group or the attempt is over."""
        self.lost.add(self.work.fence)
        self.close()

    def close(self) -> None:
        """Stop waiting for calls, and cancel the turns that the engine has not begun."""
        self.calls.forget()
        for turn in self._turns.values():
            turn.cancel()

    def start(self) -> None:
        """Start every episode, continuing after its last stored step."""
        self.recorder.begin()
        self._advance(list(self.recorder.episodes))

    def handle(self, events: Sequence[InboxEvent]) -> None:
        """Commit sampled turns and answered calls, then perform the next action of these episodes."""
        turns = [event for event in events if event.completion is not None and event.episode in self._drafts]
        if turns:
            self._commit_sampled(turns)
        for event in events:
            if event.reason:
                self.calls.note_refusal(event.episode, event.call, event.reason)
        self._observe({event.episode for event in events if event.call and not event.reason})

    def poll_calls(self) -> None:
        """Read the rows of calls without waiting for a message, and send calls again that seem lost. Raise ServiceError if a
        tools worker reports that it cannot run a call; see `PendingCalls.send_overdue`. Raise InfraError if calls were sent
        several times without an answer.
        """
        self._observe(self.calls.by_episode.keys())
        self.calls.send_overdue()

    def _advance(self, episodes: Iterable[int]) -> None:
        """Perform the next action of each episode. Skip episodes that a hook has failed. End an episode as failed if its env
        raises, or if the chat template refuses a message after the first turn.
        """
        failures, ended = list[Outcome](), dict[int, StopReason]()
        for number in episodes:
            episode = self.recorder.episodes.get(number)
            if episode is None:
                continue
            match self._next_action(episode):
                case Outcome() as failure:
                    failures.append(failure)
                case Generate(messages):
                    if refused := self._generate(episode, messages):
                        failures.append(refused)
                case CallTools(step):
                    self._resume_calls(episode, step)
                case Finish(stop_reason):
                    ended[number] = stop_reason
        self._end(ended, failures)

    def _next_action(self, episode: Episode) -> Action | Outcome:
        """Return the episode's next action. If the env raised an exception, return the failed outcome instead."""
        try:
            action = next_action(episode, self.env, self.limits)
            if isinstance(action, Generate) and self.work.opening and not episode.begun:
                action = Generate(self.work.opening)
        except InfraError:  # raised by the env itself: another attempt may succeed
            raise
        except Exception as error:  # noqa: BLE001 - a user's `reset` and `step`; the episode fails with their message
            return Outcome(episode.id, "failed", error_class="EnvError", error=f"{type(error).__name__}: {error}")
        return action

    def _generate(self, episode: Episode, messages: tuple[Message, ...]) -> Outcome | None:
        """Let the engine sample the next turn. Return the failed outcome if the chat template refuses what the model or a tool
        wrote. Raise RefusedMessages if the template refuses the first prompt, because then it does not fit the run.
        """
        try:
            draft = self._draft(episode, messages)
        except RefusedMessages as error:
            if not episode.steps:
                raise
            return Outcome(episode.id, "failed", error_class=type(error).__name__, error=str(error))
        if not self.recorder.begin_step(episode):
            return None
        self._drafts[episode.id] = draft
        follows = len(episode.steps) + 1 < self.limits.max_steps
        key = self.work.sampling_key(episode).of_next(episode, draft.context)
        request = GenerateRequest.within(self.limits, draft.context, self.work.policy, key, follows, episode.id)
        self._turns[episode.id] = future = self.engine.submit(request)
        future.add_done_callback(partial(put_completion, self.inbox, self.work.fence.group, episode.id))
        faultpoint("generate.sent")
        return None

    def _draft(self, episode: Episode, messages: tuple[Message, ...]) -> Draft:
        """Return the next turn's prompt. The first prompt is rendered once for the whole group."""
        if episode.steps:
            return draft_turn(self.chat, episode, messages, self.schemas)
        if self._opening is None or self._opening.messages != messages:
            self._opening = draft_turn(self.chat, episode, messages, self.schemas)
        return self._opening

    def _commit_sampled(self, events: Sequence[InboxEvent]) -> None:
        """Commit the sampled steps (T1), then send their calls."""
        records = [self._sampled_step(event) for event in events]
        refused, sent, others = set[int](), list[int](), list[int]()
        for record, calls in zip(records, self.recorder.commit_sampled(records), strict=True):
            answered = [call for call, item in zip(calls, record.calls, strict=True) if item.result]
            if record.step.pending and len(answered) == len(calls):
                self.calls.add(record.episode, calls, self.tools)
                refused.add(record.episode)
            elif record.step.pending and self._needs_tools(record.episode):
                self.calls.add(record.episode, calls, self.tools, answered)
                sent.append(record.episode)
            else:
                others.append(record.episode)
        self.calls.send(sent)
        self._observe(refused)
        self._advance(others)

    def _needs_tools(self, episode: int) -> bool:
        return isinstance(next_action(self.recorder.episodes[episode], self.env, self.limits), CallTools)

    def _sampled_step(self, event: InboxEvent) -> StepRecord:
        assert event.completion is not None
        completion = event.completion.result()
        message = self.chat.parse(completion.token_ids, self.schemas)
        calls = tuple(
            CallRecord(
                call,
                self.tools[call.name].effects if call.name in self.tools else "none",
                refusal(call, number, self.tools, self.limits),
            )
            for number, call in enumerate(message.tool_calls)
        )
        index = len(self.recorder.episodes[event.episode].steps)
        self._turns.pop(event.episode, None)
        step = self._drafts.pop(event.episode).step(index, completion, message, self.work.policy.version)
        return StepRecord(event.episode, step, self.work.policy_id, self.chat.decode(completion.token_ids), calls)

    def _resume_calls(self, episode: Episode, step: Step) -> None:
        """Wait for calls that another worker may have sent, and send the unanswered ones again."""
        self.calls.add(episode.id, steps.list_calls(self.db, episode.id, step.index), self.tools)
        if not self._observe({episode.id}):
            self.calls.send_again(episode.id)

    def _observe(self, episodes: Set[int]) -> bool:
        """Commit the results of episodes whose calls are all answered, and perform the next actions of these episodes."""
        answered = self.calls.take_answered(episodes)
        if answered:
            self._advance(self.recorder.commit_results(answered))
        return bool(answered)

    def _end(self, ended: Mapping[int, StopReason], failures: Sequence[Outcome]) -> None:
        outcomes, judge_calls = self.recorder.ask_judges(ended)
        for episode, calls in judge_calls.items():
            self.calls.add(episode, calls, self.judges)
        self._observe(judge_calls.keys())  # another worker may have asked the judges before
        self.calls.send(sorted(judge_calls.keys() & self.calls.by_episode.keys()))
        self.recorder.finish([*failures, *outcomes])

    def _release(self, episode: Episode) -> None:
        self.engine.release(episode.id)
