"""Places where a user's own code is called: subclass `Hook`, override what you need, name it in `hooks:` of the run.

Hooks run inside the workers, in the order given. A hook that raises fails its episode (or the update) loudly.
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
    """A hook that does nothing at every place; override the ones you need."""

    def on_run_start(self, run: str, config: Mapping[str, object]) -> None:
        """The run's rows exist; nothing has been sent yet. Called once, by the process that submits."""

    def on_rollout_start(self, episode: Episode) -> None:
        """An episode is about to start, or to go on after a worker was lost."""

    def on_trace_start(self, episode: Episode) -> None:
        """The next step of the episode is about to be sampled."""

    def on_trace_end(self, episode: Episode) -> None:
        """A step and its tool results are recorded."""

    def on_rollout_end(self, episode: Episode) -> Mapping[str, float | Sequence[float]] | None:
        """Return the episode is over and scored; what is returned is added to its reward parts (weight 1).

        A part is one number, or a list with one for each step. One of a name that is there already takes its place. A hook
        that is written `on_rollout_end(self, rollout, task)` is given a `Rollout` and the task; a reward that it sets there
        (`rollout.reward = 1.0`, `rollout.metadata["reward"]`) is the part `reward`.
        """
        return {}

    def on_update_start(self, run: str, iteration: int) -> None:
        """The update of iteration k is about to be computed; after a lost worker once more."""

    def on_update_end(self, run: str, iteration: int, metrics: Mapping[str, float]) -> None:
        """An update is committed and its policy published: iteration k, counted from 1, makes version k."""

    def on_eval_end(self, run: str, version: int, metrics: Mapping[str, float]) -> None:
        """An evaluation is over: `run` is its own name, the version that of the policy that it measured."""

    def on_run_end(self, run: str, status: str) -> None:
        """The run has ended, done or failed. Like what comes after a commit it is not called again where its worker is lost."""


class LoggingHook(Hook):
    """A hook that logs rollouts with their rewards, updates, evaluations and ends of runs (`agentrl logs`)."""

    def on_rollout_end(self, episode: Episode) -> None:
        """Log its reward."""
        log.info("episode %d of %s: reward %g, %s", episode.id, episode.task.key, episode.reward or 0.0, episode.stop_reason)

    def on_update_start(self, run: str, iteration: int) -> None:
        """Log that it begins."""
        log.info("%s: update %d begins", run, iteration)

    def on_update_end(self, run: str, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log its numbers."""
        log.info("%s: update %d: %s", run, iteration, _numbers(metrics))

    def on_eval_end(self, run: str, version: int, metrics: Mapping[str, float]) -> None:
        """Log its numbers."""
        log.info("%s: version %d measured: %s", run, version, _numbers(metrics))

    def on_run_end(self, run: str, status: str) -> None:
        """Log how it ended."""
        log.info("%s: %s", run, status)


def _numbers(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if isinstance(value, int | float))


def parts_told(hook: Hook, episode: Episode) -> Mapping[str, object]:
    """Return the reward parts that a hook adds to an episode that is over, by either form of its `on_rollout_end`."""
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
    """Return an instance of each hook: of its class (`package.module:ClassName`), or a copy of the object.

    Raises:
        ConfigError: a path leads to no hook, or the class cannot be made without arguments.
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
