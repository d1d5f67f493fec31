"""The commits of a group's episodes, for the built-in loop and for external agents.

A step is two transactions. *Sampled* (T1) writes the prompt, the token ids, the logprobs and one pending row per tool call;
only after T1 may the calls be sent. *Observed* (T2) writes all results in the order of the calls; only after T2 may the policy
read them. At the end of an episode, the questions to its judges are written as rows too, and the episode ends with its reward.
The recorder samples nothing and sends no messages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl.workers.jobs.episode_scoring import scored_outcome, unscored_outcome
from agentrl.workflow import emitters
from agentrl.workflow.annotations import Annotation, rewards_of
from agentrl.workflow.config import RolloutConfig
from agentrl.workflow.envs import Env, gives_rewards, optional_rewards
from agentrl.workflow.errors import RewardError
from agentrl.workflow.hooks import Hook
from agentrl.workflow.rewards import Judge, questions
from agentrl.workflow.store import blocked_runs, episode_annotations, steps
from agentrl.workflow.store import rollout_claims as store
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.rollout_claims import GroupWork, Outcome
from agentrl.workflow.store.steps import JudgeQuestions
from agentrl.workflow.trajectory import Episode, Step, StepRecord, StopReason, ToolCall, ToolResult, storable


@dataclass
class EpisodeRecorder:
    """The unfinished episodes of a claimed group, as their rows describe them, and the commits that change these rows.

    Args:
        on_end: called with each episode that ends.
        has_ended: whether the group has ended.
        own_rewards: the rewards that external agents returned, by episode. These rewards, and the rewards that tools emit, have
            weight 1 if the run has no other rewards or `counts_own` is True; otherwise they have weight 0.
        of_agents: True if external agents decide the turns.
        agent_errors: the (error class, error) of each episode's agent; both are empty if the agent did not fail.
    """

    db: Database
    work: GroupWork
    env: Env
    hooks: Sequence[Hook]
    judges: Mapping[str, Judge]
    limits: RolloutConfig
    on_end: Callable[[Episode], None]
    has_ended: bool = False
    own_rewards: dict[int, Mapping[str, float]] = field(default_factory=dict)
    counts_own: bool = False
    of_agents: bool = False
    agent_errors: dict[int, tuple[str, str]] = field(default_factory=dict)
    episodes: dict[int, Episode] = field(init=False)
    _judged: dict[int, tuple[Episode, tuple[str, ...]]] = field(default_factory=dict)
    _says_waiting: bool = False
    _shown: dict[int, dict[tuple[int, int], str]] = field(default_factory=dict)
    _annotated: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.episodes = {episode.id: replace(episode, limits=self.limits) for episode in self.work.episodes}
        if self.work.fence.attempt > 1:  # the worker of an earlier claim may have stored annotations
            self._annotated |= self.episodes.keys()

    def begin(self) -> None:
        """Resume every episode after its last stored step. If the env cannot resume, restart the episode."""
        for episode in list(self.episodes.values()):
            if episode.begun and self.env.resumability == "restart":
                steps.restart_episode(self.db, self.work.fence, episode.id)
                episode = replace(episode, steps=episode.steps[: episode.inherited], status="running")
                self.episodes[episode.id] = episode
            self._call_hooks("on_rollout_start", episode)

    def begin_with_agents(self) -> None:
        """Resume every episode, and restart none: the agent of an episode is another process and may still be working."""
        for episode in list(self.episodes.values()):
            self._call_hooks("on_rollout_start", episode)

    def restart(self, number: int) -> None:
        """Restart the episode under its next attempt number. The rows of old steps stay. A fork keeps its inherited steps."""
        steps.restart_episode(self.db, self.work.fence, number)
        episode = self.episodes[number]
        self.episodes[number] = replace(episode, steps=episode.steps[: episode.inherited], status="running")
        self._shown.pop(number, None)

    def begin_step(self, episode: Episode) -> bool:
        """Call the hooks before a step is sampled. Return False if a hook has failed the episode."""
        self._call_hooks("on_trace_start", episode)
        return episode.id in self.episodes

    def commit_sampled(self, records: Sequence[StepRecord]) -> list[list[int]]:
        """Commit these steps (T1). Return the ids of each step's calls, which may now be sent."""
        calls = steps.commit_sampled(self.db, self.work.fence, records)
        for record in records:
            self._add_step(record.episode, record.step)
        return calls

    def commit_calls(self, records: Sequence[StepRecord]) -> list[Step | None]:
        """Commit the turns that were sampled for external agents. Also commit the tool results that the agents sent.

        Returns:
            The stored steps, in the order of `records`; None for a turn of an agent that has ended or is lost.
        """
        committed = steps.commit_calls(self.db, self.work.fence, records)
        for record, step in zip(records, committed, strict=True):
            number = record.episode
            if step is not None and number in self.episodes and step.index == len(self.episodes[number].steps):
                self._show_results(number, record.earlier_results)
                self._add_step(number, step)
        self._report_going_on()
        return committed

    def mark_delivered(self, number: int, index: int, delivered: bool) -> None:
        """Record whether the client has received the step completely."""
        steps.mark_delivered(self.db, self.work.fence, {(number, index): delivered})
        self._change_step(number, replace(self.episodes[number].steps[index], delivered=delivered))

    def commit_results(self, answered: Mapping[int, tuple[ToolResult, ...]]) -> list[int]:
        """Commit results of calls (T2), and end the episodes whose judges have answered. Return the ids of the episodes in
        `answered` that have not ended.
        """
        judged = answered.keys() & self._judged.keys()
        self.finish([self._score(*self._judged[episode], answered[episode]) for episode in sorted(judged)])
        going_on = [episode for episode in answered if episode not in judged]
        observed = [(episode, replace(self.episodes[episode].steps[-1], results=answered[episode])) for episode in going_on]
        if observed:
            steps.commit_observed(self.db, self.work.fence, observed)
            self._report_going_on()
        for episode, step in observed:
            if any(result.annotations for result in step.results or ()):
                self._annotated.add(episode)
            self._add_step(episode, step)
        return going_on

    def ask_judges(self, ended: Mapping[int, StopReason]) -> tuple[list[Outcome], dict[int, list[int]]]:
        """Store, in one commit, what the judges of finished episodes are asked.

        Returns:
            Two values: the outcomes of episodes without judges, which the caller passes to `finish`; and for each other
                episode, the ids of its questions, which may now be sent.
        """
        outcomes, judge_questions = [], []
        annotated = [number for number in ended if self.of_agents or number in self._annotated]
        by_episode = episode_annotations.load_annotations(self.db, annotated) if annotated else {}
        for number, stop_reason in ended.items():
            annotations = by_episode.get(number, ())
            episode = replace(self.episodes[number], status="done", stop_reason=stop_reason, annotations=annotations)
            try:
                about = questions(episode, self.judges, optional_rewards(self.env, self.work.weights))
            except RewardError as error:
                outcomes.append(unscored_outcome(episode, error))
                continue
            if about:
                self._judged[number] = (episode, tuple(about))
                judge_questions.append(JudgeQuestions(number, episode.steps[-1].index, about))
            else:
                outcomes.append(self._score(episode))
        calls = steps.commit_asked(self.db, self.work.fence, judge_questions) if judge_questions else []
        return outcomes, {one.episode: ids for one, ids in zip(judge_questions, calls, strict=True)}

    def finish(self, outcomes: Sequence[Outcome]) -> None:
        """End these episodes with their rewards."""
        if not outcomes:
            return
        outcomes = [self._of_agent(outcome) if self.of_agents else outcome for outcome in outcomes]
        self.has_ended = store.finish_episodes(self.db, self.work.fence, outcomes, self.work.reward_set, self.work.weights)
        self._report_going_on()
        for outcome in outcomes:
            episode = self.episodes.pop(outcome.episode, None)
            if episode is not None:
                self.on_end(episode)

    def _of_agent(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the agent's error. If the outcome already has an error of another cause, that error stays."""
        error_class, error = self.agent_errors.get(outcome.episode, ("", ""))
        if outcome.error_class:
            error_class, error = outcome.error_class, outcome.error
        return replace(outcome, of_agent=True, error_class=error_class, error=error)

    def report_wait(self, what: str) -> None:
        """Record an event that says why the calls wait. After the next commit, another event says that the run continues."""
        self._says_waiting = True
        blocked_runs.wait_for(self.db, self.work.run_id, what)

    def _report_going_on(self) -> None:
        if self._says_waiting:
            self._says_waiting = False
            blocked_runs.wait_no_more(self.db, self.work.run_id)

    def _add_step(self, number: int, step: Step) -> None:
        """Add a step that was just committed. If the step waits for no results, call the hooks."""
        self.episodes[number] = episode = self.episodes[number].with_step(step)
        if not step.pending:
            self._call_hooks("on_trace_end", episode)

    def _show_results(self, number: int, contained: Mapping[tuple[int, int], str]) -> None:
        """Add the results of earlier calls that a request contained, in the form in which `steps.commit_calls` stored them."""
        stored = self._shown.setdefault(number, {})
        for key, content in contained.items():
            stored.setdefault(key, storable(content))
        for index in sorted({index for index, _ in contained}):
            step = self.episodes[number].steps[index]
            results = [_agent_result(call, stored.get((index, n))) for n, call in enumerate(step.message.tool_calls)]
            if step.pending and all(result is not None for result in results):
                self._change_step(number, replace(step, results=tuple(result for result in results if result is not None)))

    def _change_step(self, number: int, step: Step) -> None:
        episode = self.episodes[number]
        changed = (*episode.steps[: step.index], step, *episode.steps[step.index + 1 :])
        self.episodes[number] = replace(episode, steps=changed)

    def _score(self, ended: Episode, judges: Sequence[str] = (), results: Sequence[ToolResult] = ()) -> Outcome:
        answers = dict(zip(judges, results, strict=True))
        own = {**rewards_of(ended.annotations, len(ended.steps)), **self.own_rewards.get(ended.id, {})}
        weight = 1.0 if self.counts_own or not (self.work.weights or gives_rewards(self.env)) else 0.0
        annotations: list[Annotation] = []
        with emitters.collected(annotations, "hook", "hook:score"):
            outcome = scored_outcome(ended, self.work, self.env, self.hooks, self.judges, answers, own, weight)
        self._note(ended, annotations)
        return outcome

    def _call_hooks(self, place: str, episode: Episode) -> None:
        for number, hook in enumerate(self.hooks):
            annotations: list[Annotation] = []
            try:
                with emitters.collected(annotations, "hook", f"hook:{number}:{place}:{len(episode.steps)}"):
                    getattr(hook, place)(episode)
            except Exception as error:  # noqa: BLE001 - a user's code; the episode fails with its message
                failure = Outcome(episode.id, "failed", error_class="HookError", error=f"{type(error).__name__}: {error}")
                self.finish([failure])
                return
            self._note(episode, annotations)

    def _note(self, episode: Episode, annotations: Sequence[Annotation]) -> None:
        """Store the hooks' annotations of the episode. Annotations that are stored already stay as they are."""
        if annotations:
            self._annotated.add(episode.id)
            episode_annotations.note_annotations(self.db, self.work.fence, episode.id, len(episode.steps), annotations)


def _agent_result(call: ToolCall, result: str | None) -> ToolResult | None:
    """Return the result of a call that the agent ran itself; None if the result is not known yet."""
    if call.error is not None:
        return ToolResult(call.error, "parse_error")
    return None if result is None else ToolResult(result)
