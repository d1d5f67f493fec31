"""Computes the outcome of an episode from its env, its judges and the run's hooks."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from agentrl.workflow.envs import Env, optional_rewards, score_episode
from agentrl.workflow.errors import RewardError
from agentrl.workflow.hooks import Hook, parts_told
from agentrl.workflow.rewards import Judge, Part, assign_rewards, check_parts, numbers, spread, total_reward, verdicts
from agentrl.workflow.store.rollout_claims import GroupWork, Outcome
from agentrl.workflow.token_chains import as_read
from agentrl.workflow.trajectory import Episode, ToolResult


def scored_outcome(
    ended: Episode,
    work: GroupWork,
    env: Env,
    hooks: Sequence[Hook],
    judges: Mapping[str, Judge],
    judge_results: Mapping[str, ToolResult],
    own: Mapping[str, float | Sequence[float]] = MappingProxyType({}),
    own_weight: float = 0.0,
) -> Outcome:
    """Return the outcome of a finished episode: `done` with the reward, or `failed` if a reward, the env or a hook raised an
    exception. Raise InfraError if the system, not the reward's code, prevented the score.

    Args:
        judge_results: the results of the questions to the judges, by judge.
        own, own_weight: the rewards that the episode's agent and its tools gave, by name, and the weight of each of these
            rewards.
    """
    try:
        parts = score_episode(env, ended, work.weights, verdicts(judges, judge_results, optional_rewards(env, work.weights)))
        parts |= _parts_from_agent(own, parts, len(ended.steps))
        own_weights = dict.fromkeys(own, own_weight)
        weights = {**own_weights, **work.weights}
        rewarded = assign_rewards(ended, parts, weights)
        for hook in hooks:
            parts |= _parts_from_hook(hook, rewarded)
        reward = total_reward(parts, weights)
        return Outcome(
            *(ended.id, "done", ended.stop_reason, reward, parts, ended.final_answer),
            own_weights=own_weights,
            answer_step=ended.answer_step,
        )
    except RewardError as error:
        return unscored_outcome(ended, error)


def unscored_outcome(ended: Episode, error: RewardError) -> Outcome:
    """Return the `failed` outcome of an episode whose rewards could not be computed."""
    return Outcome(ended.id, "failed", error_class="RewardError", error=str(error))


def _parts_from_agent(own: Mapping[str, float | Sequence[float]], parts: Mapping[str, Part], steps: int) -> dict[str, Part]:
    if twice := parts.keys() & own.keys():
        raise RewardError(f"the agent returned a reward called {min(twice)!r}, which is the name of a reward of the run")
    return check_parts({name: numbers(value) for name, value in own.items()}, steps, "the agent")


def _parts_from_hook(hook: Hook, episode: Episode) -> dict[str, Part]:
    source, (read, places) = f"{type(hook).__name__}.on_rollout_end", as_read(episode)
    try:
        parts = {str(name): numbers(value) for name, value in parts_told(hook, read).items()}
    except Exception as error:
        raise RewardError(f"{source} raised {type(error).__name__}: {error}") from error
    return spread(check_parts(parts, len(places), source), places, len(episode.steps))
