"""Hooks: a user's code that runs at fixed points of a run.

Subclass `Hook`, override the methods that you need, and name the class in `hooks:` of the run. Hooks run inside the workers, in
the order of that list. If a hook raises an exception, its episode or its update fails.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from logging import getLogger
from typing import Any

from agentrl.workflow.errors import ConfigError
from agentrl.workflow.plugins import find, is_lent
from agentrl.workflow.trajectory import Episode, Rollout

log = getLogger("agentrl.hook")


class Hook:
    """The base class of hooks. Its methods do nothing; override the ones that you need."""

    def on_run_start(self, run: str, config: Mapping[str, object]) -> None:
        """Called once in the submitting process: after the run's rows are written, before the first Celery message is sent."""

    def on_rollout_start(self, episode: Episode) -> None:
        """Called before an episode starts. If the episode's worker is lost, called again before the episode continues."""

    def on_trace_start(self, episode: Episode) -> None:
        """Called before the next step of the episode is sampled."""

    def on_trace_end(self, episode: Episode) -> None:
        """Called after a step and the results of its tool calls are recorded."""

    def on_rollout_end(self, episode: Episode) -> Mapping[str, float | Sequence[float]] | None:
        """Called after the episode is scored. Return the reward parts to add, each with weight 1.

        A part is one number, or a list with one number per step. A part replaces an existing part of the same name. A hook may
        also be defined as `on_rollout_end(self, rollout, task)`, with a `Rollout` and the task. If such a hook sets a reward
        (`rollout.reward = 1.0`, `rollout.metadata["reward"]`), the reward becomes the part `reward`.
        """
        return {}

    def on_update_start(self, run: str, iteration: int) -> None:
        """Called before the update of an iteration is computed. If the worker is lost, called again in the next attempt."""

    def on_update_end(self, run: str, iteration: int, metrics: Mapping[str, float]) -> None:
        """Called after an update is committed and its policy is published. Iteration k, counted from 1, makes version k."""

    def on_eval_end(self, run: str, version: int, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation. `run` is the run of the evaluation, `version` the policy version that was evaluated."""

    def on_run_end(self, run: str, status: str) -> None:
        """Called after the run has ended with the status done or failed.

        Like the other methods that are called after a commit, this method is not called again if its worker is lost.
        """


class LoggingHook(Hook):
    """A hook that logs the rewards of rollouts, the updates, the evaluations and the end of a run (`agentrl logs`)."""

    def on_rollout_end(self, episode: Episode) -> None:
        log.info("episode %d of %s: reward %g, %s", episode.id, episode.task.key, episode.reward or 0.0, episode.stop_reason)

    def on_update_start(self, run: str, iteration: int) -> None:
        log.info("%s: update %d begins", run, iteration)

    def on_update_end(self, run: str, iteration: int, metrics: Mapping[str, float]) -> None:
        log.info("%s: update %d: %s", run, iteration, _numbers(metrics))

    def on_eval_end(self, run: str, version: int, metrics: Mapping[str, float]) -> None:
        log.info("%s: version %d measured: %s", run, version, _numbers(metrics))

    def on_run_end(self, run: str, status: str) -> None:
        log.info("%s: %s", run, status)


def _numbers(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if isinstance(value, int | float))


def parts_told(hook: Hook, episode: Episode) -> Mapping[str, object]:
    """Call `on_rollout_end` of a hook, in either of its forms, and return the reward parts that it adds."""
    call: Callable[..., Any] = hook.on_rollout_end
    if len(inspect.signature(call).parameters) < 2:
        return call(episode) or {}
    question = episode.task.messages[-1].content if episode.task.messages else ""
    rollout = Rollout(question, episode.final_answer, dict(episode.task.metadata), episode.steps, episode)
    rollout.metadata.pop("reward", None)  # a task's own is none
    result = call(rollout, episode.task)
    reward = (result if isinstance(result, Rollout) else rollout).reward
    return {} if reward is None else {"reward": reward}


def load_hooks(paths: Sequence[str]) -> tuple[Hook, ...]:
    """Load the hooks.

    A path to a class (`package.module:ClassName`) gives a new instance. A path to an object gives a copy, except for an object
    of this process (see `plugins.lend`), which is used directly.

    Raises:
        ConfigError: a path does not lead to a hook, or its class cannot be instantiated without arguments.
    """
    return tuple(_make_hook(path) for path in paths)


def _make_hook(path: str) -> Hook:
    hook = find("hooks", path)
    if not (isinstance(hook, Hook) or (isinstance(hook, type) and issubclass(hook, Hook))):
        raise ConfigError(
            f"{path!r} (hooks) is not a class derived from Hook.", "Derive it from Hook: class Mine(agentrl.Hook)."
        )
    if isinstance(hook, Hook):
        return hook if is_lent(path) else deepcopy(hook)
    try:
        return hook()
    except Exception as error:
        raise ConfigError(f"Cannot create the hook {path!r}: {type(error).__name__}: {error}.", "Correct the class.") from error
