"""Places where a user's own code is called: subclass `Hook`, override what you need, name it in `hooks:` of the run.

Hooks run inside the workers, in the order given. A hook that raises fails its episode (or the update) loudly.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy

from agentrl.workflow.errors import ConfigError
from agentrl.workflow.plugins import find
from agentrl.workflow.trajectory import Episode


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

    def on_rollout_end(self, episode: Episode) -> Mapping[str, float | Sequence[float]]:
        """The episode is over and scored; what is returned is added to its reward parts (weight 1).

        A part is one number, or a list with one for each step. One of a name that is there already takes its place.
        """
        return {}

    def on_update_end(self, run: str, iteration: int, metrics: Mapping[str, float]) -> None:
        """An update is committed and its policy published: iteration k, counted from 1, makes version k."""


def load_hooks(paths: Sequence[str]) -> tuple[Hook, ...]:
    """One instance of each named hook: of a class (`package.module:ClassName`), or a copy of what stands there.

    Raises:
        ConfigError: a path leads to no hook, or the class cannot be made without arguments.
    """
    return tuple(_make_hook(path) for path in paths)


def _make_hook(path: str) -> Hook:
    found = find("hooks", path)
    if not (isinstance(found, Hook) or (isinstance(found, type) and issubclass(found, Hook))):
        raise ConfigError(f"{path!r} (hooks) is no class derived from Hook.", "Derive it: class Mine(agentrl.Hook).")
    if isinstance(found, Hook):
        return deepcopy(found)
    try:
        return found()
    except Exception as error:
        raise ConfigError(
            f"The hook {path!r} cannot be made: {type(error).__name__}: {error}.", "Correct the class."
        ) from error
