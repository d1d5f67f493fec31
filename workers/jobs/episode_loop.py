"""One claimed group at work: load the record, ask `next_action`, act, commit; nothing is remembered that is not in the rows.

A step is two transactions. *Sampled*: prompt, ids, logprobs and one pending row per tool call; only then are the calls sent.
*Observed*: all results, in the order of the calls; only then does the policy read them. An episode that is over waits for what
its judges say, who are asked in the same way.
"""

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from agentrl.workers.jobs.episode_scoring import scored_outcome, unscored_outcome
from agentrl.workers.jobs.inbox import Event, Inbox, put_completion, put_reply
from agentrl.workers.stack.dispatch import send_call
from agentrl.workers.stack.replies import Replies
from agentrl.workflow.agent import Action, CallTools, Finish, Generate, next_action, refusal
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.engines import Engine, GenerateRequest
from agentrl.workflow.errors import InfraError, RewardError, ServiceError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.hooks import Hook, load_hooks
from agentrl.workflow.inference.turns import Draft, draft_turn
from agentrl.workflow.rewards import questions
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.runtime.lazy import Once
from agentrl.workflow.settings import settings
from agentrl.workflow.store import rollout_claims as store
from agentrl.workflow.store import steps
from agentrl.workflow.store import waiting_runs as run_events
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.rollout_claims import Fence, GroupWork, Outcome
from agentrl.workflow.store.steps import CallRecord, JudgeQuestions, SampledStep
from agentrl.workflow.store.tool_calls import count_sending
from agentrl.workflow.trajectory import Episode, Message, SamplingKey, ToolResult

RESEND_SECONDS = 30.0
"""A call without a result is sent again after a lease, at most this long, and its tool's limit; the first answer counts."""

RESENDS = 5
"""After so many of them in vain nobody seems to serve the tools: the group fails an attempt instead of waiting for ever."""

_TOOLS_WORKER_HINT = "Is a tools worker running? Start one: agentrl worker tools"


@dataclass
class _PendingCalls:
    """A step whose calls are out: their ids in order, when they were last sent, how often, and why a worker cannot run one of
    them since; `ended` and the names of its judges in order, where they are what is asked of an episode that is over."""

    calls: list[int]
    ended: Episode | None = None
    judges: tuple[str, ...] = ()
    sent: float = 0.0
    sendings: int = 0
    refused: str = ""


@dataclass
class GroupRollout:
    """Drives the unfinished episodes of one group, and `is_live` until they end or the group's fence is among the `lost`."""

    db: Database
    work: GroupWork
    experiment: Experiment
    engine: Engine
    chat: Chat
    inbox: Inbox
    lost: set[Fence]
    iteration_ready: int | None = None
    _episodes: dict[int, Episode] = field(default_factory=dict)
    _drafts: dict[int, Draft] = field(default_factory=dict)
    _opening: Draft | None = None
    _waiting: dict[int, _PendingCalls] = field(default_factory=dict)
    _says_waiting: bool = False

    def __post_init__(self) -> None:
        self.config, self.env = self.experiment.config, self.experiment.env
        self.tools, self.judges = self.experiment.tools, self.experiment.judges
        self.schemas = [tool.schema for tool in self.tools.values()]
        self.hooks: tuple[Hook, ...] = load_hooks(self.config.hooks)
        limits = self.config.rollout
        self._episodes = {episode.id: replace(episode, limits=limits) for episode in self.work.episodes}

    @property
    def is_live(self) -> bool:
        """Whether there is something left to do."""
        return bool(self._episodes) and self.work.fence not in self.lost

    def lose(self) -> None:
        """Another worker has the group, or this attempt is over: nothing more is written."""
        self.lost.add(self.work.fence)
        for waiting in list(self._waiting.values()):
            for call in waiting.calls:
                _replies().forget(call)

    def start(self) -> None:
        """Sets every episode going from where its record stands."""
        for episode in list(self._episodes.values()):
            if episode.begun and self.env.resumability == "restart":
                steps.restart_episode(self.db, self.work.fence, episode.id)
                episode = replace(episode, steps=episode.steps[: episode.inherited], status="running")
                self._episodes[episode.id] = episode
            self._call_hooks(episode, lambda hook, episode=episode: hook.on_rollout_start(episode))  # type: ignore[misc]
        self._advance(list(self._episodes.values()))

    def handle(self, events: Sequence[Event]) -> None:
        """Commits what was sampled and observed, and goes on."""
        turns = [event for event in events if event.completion is not None and event.episode in self._drafts]
        if turns:
            self._commit_sampled(turns)
        for event in events:
            self._note_refusal(event)
        told = {event.episode for event in events if event.call and not event.reason}
        if told:
            self._commit_observed(told)

    def _note_refusal(self, event: Event) -> None:
        """Tells the run's events what a tools worker lacks for a call that is still waited for."""
        waiting = self._waiting.get(event.episode)
        if event.reason and waiting is not None and event.call in waiting.calls:
            waiting.refused = event.reason
            self._report_wait(event.reason)

    def poll_calls(self) -> None:
        """Reads the rows of calls that nobody woke us for, and sends again what seems lost: then the run's events say so.

        Raises:
            ServiceError: a call was sent again and again, and who got it last cannot run it, as it says.
            InfraError: it was not answered, whoever had it: nobody has it, it never ends, or the system fails it each time.
        """
        self._commit_observed(set(self._waiting))
        now = time.monotonic()
        for waiting in self._waiting.values():
            if now - waiting.sent <= self._patience(waiting):
                continue
            if waiting.sendings > RESENDS:
                raise (
                    ServiceError(waiting.refused)
                    if waiting.refused
                    else InfraError(_describe_unanswered(waiting), _TOOLS_WORKER_HINT)
                )
            if not waiting.refused:
                self._report_wait(f"{_describe_unanswered(waiting)} {_TOOLS_WORKER_HINT}")
            count_sending(self.db, waiting.calls)
            self._send_calls(waiting)

    def _report_wait(self, what: str) -> None:
        """Tells the run's events what its calls wait for."""
        self._says_waiting = True
        run_events.wait_for(self.db, self.work.run_id, what)

    def _patience(self, waiting: _PendingCalls) -> float:
        asked = self.judges if waiting.ended else self.tools
        longest = max((tool.timeout_seconds for tool in asked.values()), default=0.0)
        return min(RESEND_SECONDS, settings().lease_seconds) + longest

    # acting

    def _advance(self, episodes: Sequence[Episode]) -> None:
        outcomes, ended = [], []
        for episode in episodes:
            if episode.id not in self._episodes:
                continue
            match self._next_action(episode):
                case Outcome() as failure:
                    outcomes.append(failure)
                case Generate(messages):
                    self._generate(episode, messages)
                case CallTools(step):
                    self._resume_calls(episode, steps.list_calls(self.db, episode.id, step.index))
                case Finish(stop_reason):
                    ended.append(replace(episode, status="done", stop_reason=stop_reason))
        self._finish(outcomes + self._start_judges(ended))

    def _next_action(self, episode: Episode) -> Action | Outcome:
        """What follows, or how the episode ends because its env failed it."""
        try:
            action = next_action(episode, self.env, self.config.rollout)
            if isinstance(action, Generate) and self.work.opening and not episode.begun:
                action = Generate(self.work.opening)
        except InfraError:  # the env says so itself: another attempt may go well
            raise
        except Exception as error:  # noqa: BLE001 - anybody's `reset` and `step`; the episode fails with their words
            return Outcome(episode.id, "failed", error_class="EnvError", error=f"{type(error).__name__}: {error}")
        return action

    def _generate(self, episode: Episode, messages: tuple[Message, ...]) -> None:
        self._call_hooks(episode, lambda hook: hook.on_trace_start(episode))
        if episode.id not in self._episodes:
            return
        drafted = self._draft(episode, messages)
        self._drafts[episode.id] = drafted
        limits = self.config.rollout
        follows = len(episode.steps) + 1 < limits.max_steps
        policy, key = self.work.policy, self._sampling_key(episode)
        request = GenerateRequest.within(limits, drafted.context(episode), policy, key, episode.sampled_count, follows)
        future = self.engine.submit(request)
        future.add_done_callback(partial(put_completion, self.inbox, self.work.fence.group, episode.id))
        faultpoint("generate.sent")

    def _sampling_key(self, episode: Episode) -> int:
        return SamplingKey.of(episode, self.work.seed, self.work.kind, self.work.iteration).bits

    def _draft(self, episode: Episode, messages: tuple[Message, ...]) -> Draft:
        """The next turn's prompt; the one that an episode begins with is rendered once, for the siblings read the same."""
        if episode.steps:
            return draft_turn(self.chat, episode, messages, self.schemas)
        if self._opening is None or self._opening.messages != messages:
            self._opening = draft_turn(self.chat, episode, messages, self.schemas)
        return self._opening

    def _resume_calls(self, episode: Episode, calls: list[int]) -> None:
        """Goes on with calls that another worker may have sent."""
        answered = steps.load_results(self.db, calls)
        if len(answered) < len(calls):
            count_sending(self.db, calls)
            self._start_calls(episode, calls, answered)
        else:
            self._waiting[episode.id] = _PendingCalls(calls)
            self._commit_observed({episode.id})

    def _start_calls(self, episode: Episode, calls: list[int], answered: Container[int]) -> None:
        self._waiting[episode.id] = _PendingCalls(calls)
        self._expect_replies(episode.id, answered)

    def _expect_replies(self, episode: int, answered: Container[int] = ()) -> None:
        waiting = self._waiting[episode]
        for call in waiting.calls:
            if call not in answered:
                _replies().expect(call, partial(put_reply, self.inbox, self.work.fence.group, episode))
        self._send_calls(waiting, answered)

    def _start_judges(self, ended: Sequence[Episode]) -> list[Outcome]:
        """Asks the judges of episodes that are over; the outcomes of those that have none to ask."""
        outcomes, asked = [], {}
        for episode in ended:
            try:
                about = questions(episode, self.judges)
            except RewardError as error:
                outcomes.append(unscored_outcome(episode, error))
                continue
            if about:
                asked[episode.id] = (episode, JudgeQuestions(episode.id, episode.steps[-1].index, about))
            else:
                outcomes.append(self._score(episode, {}))
        if asked:
            rows = steps.commit_asked(self.db, self.work.fence, [one for _, one in asked.values()])
            for (episode, one), calls in zip(asked.values(), rows, strict=True):
                self._waiting[episode.id] = _PendingCalls(calls, episode, tuple(one.questions))
            self._commit_observed(set(asked))  # another worker may have asked them before
            for number in asked.keys() & self._waiting.keys():
                self._expect_replies(number)
        return outcomes

    def _send_calls(self, waiting: _PendingCalls, answered: Container[int] = ()) -> None:
        waiting.sent = time.monotonic()
        waiting.sendings, waiting.refused = waiting.sendings + 1, ""
        for call in waiting.calls:
            if call not in answered:
                send_call(call, _replies().address)

    # committing

    def _commit_sampled(self, events: Sequence[Event]) -> None:
        records = [self._sampled_step(event) for event in events]
        calls = steps.commit_sampled(self.db, self.work.fence, records)
        plain = []
        for record, ids in zip(records, calls, strict=True):
            episode = self._episodes[record.episode].with_step(record.step)
            self._episodes[episode.id] = episode
            if record.step.pending:
                # All of them may be answered already: a call that cannot be sent is answered as it is recorded.
                if all(item.result for item in record.calls):
                    self._waiting[episode.id] = _PendingCalls(ids)
                elif isinstance(next_action(episode, self.env, self.config.rollout), CallTools):
                    refused = {call for call, item in zip(ids, record.calls, strict=True) if item.result}
                    self._start_calls(episode, ids, refused)
                    continue
            else:
                self._call_hooks(episode, lambda hook, episode=episode: hook.on_trace_end(episode))  # type: ignore[misc]
            plain.append(episode)
        ready = {episode.id for episode in plain if episode.id in self._waiting}
        if ready:
            self._commit_observed(ready)
        self._advance([episode for episode in plain if episode.id not in ready])

    def _sampled_step(self, event: Event) -> SampledStep:
        assert event.completion is not None
        completion = event.completion.result()
        message = self.chat.parse(completion.token_ids, self.schemas)
        drafted = self._drafts.pop(event.episode)
        step = drafted.step(len(self._episodes[event.episode].steps), completion, message, self.work.policy.version)
        calls = tuple(
            CallRecord(
                call,
                self.tools[call.name].effects if call.name in self.tools else "none",
                refusal(call, index, self.tools, self.config.rollout),
            )
            for index, call in enumerate(message.tool_calls)
        )
        text = self.chat.decode(completion.token_ids)
        return SampledStep(event.episode, step, self.work.policy_id, text, calls)

    def _commit_observed(self, candidates: set[int]) -> None:
        """T2 for those whose calls are all answered, in one transaction."""
        open_calls = [call for episode in candidates & self._waiting.keys() for call in self._waiting[episode].calls]
        if not open_calls:
            return
        results = steps.load_results(self.db, open_calls)
        observed, judged = [], []
        for episode_id in sorted(candidates & self._waiting.keys()):
            waiting = self._waiting[episode_id]
            if any(call not in results for call in waiting.calls):
                continue
            told = tuple(results[call] for call in waiting.calls)
            if waiting.ended is not None:
                judged.append((waiting.ended, dict(zip(waiting.judges, told, strict=True))))
            else:
                observed.append((episode_id, replace(self._episodes[episode_id].steps[-1], results=told)))
        self._finish([self._score(episode, said) for episode, said in judged])
        if not observed:
            return
        steps.commit_observed(self.db, self.work.fence, observed)
        for episode_id, step in observed:
            self._stop_waiting(episode_id)
            self._episodes[episode_id] = episode = self._episodes[episode_id].with_step(step)
            self._call_hooks(episode, lambda hook, episode=episode: hook.on_trace_end(episode))  # type: ignore[misc]
        self._advance([self._episodes[episode_id] for episode_id, _ in observed if episode_id in self._episodes])

    def _stop_waiting(self, episode: int) -> None:
        """Waits no longer for its calls."""
        if self._says_waiting:
            self._says_waiting = False
            run_events.wait_no_more(self.db, self.work.run_id)
        waiting = self._waiting.pop(episode, None)
        for call in waiting.calls if waiting else ():
            _replies().forget(call)

    def _score(self, ended: Episode, said: Mapping[str, ToolResult]) -> Outcome:
        return scored_outcome(ended, self.work, self.env, self.hooks, self.judges, said)

    def _finish(self, outcomes: Sequence[Outcome]) -> None:
        if not outcomes:
            return
        finished = store.finish_episodes(self.db, self.work.fence, outcomes, self.work.reward_set, self.work.weights)
        for outcome in outcomes:
            self._stop_waiting(outcome.episode)
            episode = self._episodes.pop(outcome.episode, None)
            if episode is not None:
                self.engine.release(self._sampling_key(episode))
        if finished.iteration is not None:
            self.iteration_ready = finished.iteration

    def _call_hooks(self, episode: Episode, call: Callable[[Hook], None]) -> None:
        """Calls every hook; one that raises fails the episode, loudly."""
        for hook in self.hooks:
            try:
                call(hook)
            except Exception as error:  # noqa: BLE001 - anybody's code; the episode fails with its words
                failure = Outcome(episode.id, "failed", error_class="HookError", error=f"{type(error).__name__}: {error}")
                self._finish([failure])
                return


def _describe_unanswered(waiting: _PendingCalls) -> str:
    times = "once" if waiting.sendings == 1 else f"{waiting.sendings} times"
    return f"Tool calls {waiting.calls} were sent {times} and not answered."


@Once
def _replies() -> Replies:
    return Replies(settings())
