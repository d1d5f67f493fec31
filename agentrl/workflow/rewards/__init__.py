"""Rewards. Each file of this folder defines a function that scores an `Episode`. See `Reward` and `score`; a reward that must
run model-written code is a `Judge`.

The rewards that a run names (`--reward NAME=WEIGHT`) are its objective. The env's other rewards are recorded with weight 0.
Your own reward is a function in your own file, which `--reward mine:polite=0.2` selects. It returns one number for the episode,
or a list with one number for each step:

  def polite(episode):
      return [float("please" in step.message.content) for step in episode.steps]

The numbers of a list are stored per step (column `step` of the table `rewards`). An algorithm that assigns credit to turns uses
the number of each turn.
"""

import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, SupportsFloat

from agentrl.workflow.errors import AgentRLError, ConfigError, InfraError, RewardError, SandboxUnavailable
from agentrl.workflow.plugins import find, hashed_source
from agentrl.workflow.token_chains import as_read
from agentrl.workflow.tools import Tool
from agentrl.workflow.trajectory import Episode, ToolResult

Value = float | Sequence[float]
"""The value of a reward: a finite number for the episode, or a list with one number for each step. The sum of a list is the
value of the episode.
"""

Part = float | tuple[float, ...]
"""A `Value` after validation."""

Reward = Callable[[Episode], Value]
"""A function from a finished episode to its value. If the function raises an exception, the episode fails; its reward does not
become 0. `episode.limits` are the rollout options of the run.
"""

MAX_REWARD = 1e30
"""The largest absolute value of a reward. The standard deviation of a group squares rewards, so larger values could overflow.
"""

MAX_NAME = 64
"""The most characters in the name of a reward part that a hook or an env returns."""

MAX_JUDGE = 128
"""The most characters in the name of a judge. The row of a call cannot store a longer name."""


@dataclass(frozen=True)
class Judge(Tool):
    """A reward that must run model-written code. It runs in a tools worker, in the same way as a tool.

    When an episode has ended, the rollout calls its judges like tools: each call has one row and one result, goes to the queue
    `tools`, and is sent again if a worker is lost. The model does not see these calls, and they are not counted as the model's
    calls. `agentrl rescore` and `replay --verify` run a judge in their own process.

    Args:
        function: a function that judges its arguments. It returns a text, or a ToolResult with that text and the sandbox's
            data.
        asks: a function that returns the arguments of `function` for a finished episode, as JSON values. If no code needs to
            run, it returns the reward's value instead.
        reads: a function that converts the text to the reward's value.
        reference_form: the form of an answer that is made from a task's reference, such as `"#### {}"`. This answer must earn 1
            (`reference_check`). Empty if the judge does not compare answers with references.
    """

    asks: Callable[[Episode], Mapping[str, Any] | Value] = field(kw_only=True)
    reads: Callable[[str], Value] = float
    reference_form: str = ""

    def __call__(self, episode: Episode) -> Value:
        """Judge the episode in this process, and return the value. Raise SandboxUnavailable if this machine has no sandbox for
        model-written code. Raise InfraError if the system failed.
        """
        question = self.asks(episode)
        return self.reads(self.run(question).content) if isinstance(question, Mapping) else question

    def run(self, arguments: Mapping[str, Any]) -> ToolResult:
        """See `Tool.run`."""
        result = self.returned(arguments)
        return result if isinstance(result, ToolResult) else ToolResult(str(result))

    def overdue(self) -> AgentRLError:
        """Return an InfraError for a judge that took too long: judged code has its own limits, so the system is at fault."""
        return InfraError(f"{self.name} did not judge within {self.timeout_seconds:g} s.")


def judges_of(weights: Mapping[str, float]) -> dict[str, Judge]:
    """Return the rewards that are judges, by name. Raise ConfigError if a judge's name is too long."""
    rewards = {name: find("rewards", name) for name in weights}
    judges = {name: reward for name, reward in rewards.items() if isinstance(reward, Judge)}
    for name in judges:
        if len(name) > MAX_JUDGE:
            raise ConfigError(f"The name of the judge {name[:60]!r}... has {len(name)} characters.", f"At most {MAX_JUDGE}.")
    return judges


def check_rewards(weights: Mapping[str, float]) -> None:
    """Raise ConfigError if a reward cannot be called with only an episode."""
    for name in weights:
        if problem := _uncallable(find("rewards", name)):
            raise ConfigError(f"The reward {name!r} {problem}.", "Write it as def reward(episode): return 1.0")


def _uncallable(reward: Reward) -> str:
    if inspect.iscoroutinefunction(reward):
        return "is an async function, which is not supported"
    try:
        signature = inspect.signature(reward, follow_wrapped=False)
    except ValueError:  # of some built-in ones nothing is known
        return ""
    try:
        signature.bind(None)
    except TypeError as error:
        return f"cannot be called with an episode alone: {error}"
    return ""


def questions(episode: Episode, judges: Mapping[str, Judge], optional: Collection[str] = ()) -> dict[str, Mapping[str, Any]]:
    """Return the arguments for each judge that must run to score the ended episode, by the judge's name. Raise RewardError if a
    judge that is not optional raised an exception.

    Args:
        episode: the ended episode.
        judges: the judges by name.
        optional: as in `score`.
    """
    calls, (read, _) = {}, as_read(episode)
    for name, judge in judges.items():
        with _passed_over(name in optional), _raise_reward_errors(name):
            question = judge.asks(read)
            if isinstance(question, Mapping):
                calls[name] = question
    return calls


def verdicts(
    judges: Mapping[str, Judge], results: Mapping[str, ToolResult], optional: Collection[str] = ()
) -> dict[str, Value | None]:
    """Convert the results of judge calls to values, by the judge's name. The value is None for an optional judge that failed.
    Raise RewardError if a judge that is not optional failed.

    Args:
        judges: the judges by name.
        results: the results by the judge's name.
        optional: as in `score`.
    """
    values: dict[str, Value | None] = {}
    for name, result in results.items():
        values[name] = None
        with _passed_over(name in optional), _raise_reward_errors(name):
            if result.error_class is not None:
                raise RewardError(f"reward {name!r} did not judge: {result.content}")
            values[name] = judges[name].reads(result.content)
    return values


def score(
    episode: Episode,
    weights: Mapping[str, float],
    judged: Mapping[str, Value | None] = MappingProxyType({}),
    optional: Collection[str] = (),
) -> dict[str, Part]:
    """Call the rewards, and return the named parts of the episode's reward.

    Args:
        episode: the ended episode.
        weights: the weights of the rewards by name.
        judged: the values of judges that have already run. The other rewards are called here.
        optional: the env's rewards that are recorded although the user named other rewards (`envs.optional_rewards`). If one of
            these rewards fails, for example because it cannot read the task's reference, the episode has no reward part with
            this reward's name.

    Raises:
        RewardError: a reward that is not optional raised an exception, or returned neither a finite number nor one for each
            step.
        InfraError: the system failed during a reward.
        SandboxUnavailable: a reward must run code, and this machine has no sandbox.
    """
    parts, (read, places) = {}, as_read(episode)
    for name in weights:
        with _passed_over(name in optional):
            with _raise_reward_errors(name):
                value = judged[name] if name in judged else find("rewards", name)(read)
                values = None if value is None and name in judged else numbers(value)
            if values is not None:
                parts[name] = part_of(values, len(places), f"reward {name!r}")
    return spread(parts, places, len(episode.steps))


def spread(parts: Mapping[str, Part], places: Sequence[int], steps: int) -> dict[str, Part]:
    """Extend the parts of the scored steps to all steps of the episode.

    Args:
        places: the indices of the scored steps. All other steps get 0.
        steps: the number of steps of the episode.
    """
    if len(places) == steps:
        return dict(parts)

    def at(part: tuple[float, ...]) -> Part:
        earned = dict(zip(places, part, strict=True))
        return tuple(earned.get(index, 0.0) for index in range(steps))

    return {name: at(part) if isinstance(part, tuple) else part for name, part in parts.items()}


def numbers(value: object) -> Part:
    """Convert one number or several numbers to plain floats. Raise TypeError for any other value, also for text."""
    return tuple(map(_number, value)) if isinstance(value, list | tuple) else _number(value)


def _number(value: object) -> float:
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"a reward must be a number, not {type(value).__name__!r}")
    return float(value)


def part_of(value: Part, steps: int, source: str, name: str = "") -> Part:
    """Validate the numbers of a reward part, and return the part. Raise RewardError if a number is not finite or exceeds
    `MAX_REWARD`, or a list does not have one number for each step.

    Args:
        value: one number, or the numbers of the steps.
        steps: the number of steps.
        source: the name of the reward, hook or env that returned the value, for the error message.
        name: the name of the part, if the source returns several parts.
    """
    about = f" for {name!r}" if name else ""
    if isinstance(value, float):
        if not _is_usable(value):
            raise RewardError(f"{source} returned {value}{about}{_why_unusable(value)}")
        return value
    if len(value) != steps:
        raise RewardError(f"{source} returned {len(value)} numbers{about}, and the episode has {steps} steps")
    for step, number in enumerate(value):
        if not _is_usable(number):
            raise RewardError(f"{source} returned {number}{about} at step {step}{_why_unusable(number)}")
    if not _is_usable(sum(value)):
        raise RewardError(f"{source} returned numbers{about} whose sum is {sum(value)}{_why_unusable(sum(value))}")
    return value or 0.0


def _is_usable(value: float) -> bool:
    return abs(value) <= MAX_REWARD  # no NaN is


def _why_unusable(value: float) -> str:
    return f"; the largest that can be trained on is {MAX_REWARD:g}" if math.isfinite(value) else ""


def part_sum(part: Part) -> float:
    """Return the part's value for the whole episode: the number itself, or the sum over the steps."""
    return part if isinstance(part, float) else math.fsum(part)


def _passed_over(optional: bool) -> AbstractContextManager[None]:
    """Suppress RewardError in the `with` block if the reward is optional."""
    return suppress(RewardError) if optional else nullcontext()


@contextmanager
def _raise_reward_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (InfraError, SandboxUnavailable, RewardError):  # it says so itself: another attempt, or another machine, may do well
        raise
    except (Exception, SystemExit) as error:
        raise RewardError(f"reward {name!r} raised {type(error).__name__}: {error}") from error


def check_parts(parts: Mapping[str, Part], steps: int, source: str) -> dict[str, Part]:
    """Validate the reward parts that a hook or an env returned, and return them. Raise RewardError if a value is neither a
    finite number nor one number for each step, or a name is empty, too long or not printable.

    Args:
        steps: the number of steps of the episode.
        source: the name of the hook or env, for the error message.
    """
    for name in parts:
        if not name.isprintable() or not 0 < len(name) <= MAX_NAME:
            raise RewardError(
                f"{source} returned the part {name[:200]!r}: a name must have 1 to {MAX_NAME} printable characters"
            )
    return {name: part_of(value, steps, source, name) for name, value in parts.items()}


def assign_rewards(episode: Episode, parts: Mapping[str, Part], weights: Mapping[str, float]) -> Episode:
    """Return the episode with its reward, parts and steps' rewards. Raise RewardError if the sum exceeds `MAX_REWARD`."""
    by_step = {name: part for name, part in parts.items() if isinstance(part, tuple)}
    steps = tuple(
        replace(step, reward=sum(part[index] * weights.get(name, 1.0) for name, part in by_step.items()))
        for index, step in enumerate(episode.steps)
    )
    rewards = {name: part_sum(part) for name, part in parts.items()}
    return replace(episode, steps=steps, rewards=rewards, reward=total_reward(parts, weights))


def total_reward(parts: Mapping[str, Part], weights: Mapping[str, float]) -> float:
    """Return the weighted sum of the parts (weight 1 by default). Raise RewardError if the absolute value of the sum exceeds
    `MAX_REWARD`.
    """
    reward = sum(part_sum(part) * weights.get(name, 1.0) for name, part in parts.items())
    if not _is_usable(reward):
        raise RewardError(f"the weighted sum of the reward parts is {reward}{_why_unusable(reward)}")
    return reward


def code_hash(weights: Mapping[str, float], anew: bool = False) -> str:
    """Return a hash of the weights and of the code of the rewards. If two hashes are equal, the same code scored.

    Args:
        weights: the weights of the rewards by name.
        anew: True: hash the current files. False: hash the code that this process has loaded.
    """
    files = {name: "".join(hashed_source(module, anew) for module in _modules(name)) for name in weights}
    text = "\0".join(f"{name}={weight}\0{files[name]}" for name, weight in sorted(weights.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _modules(name: str) -> tuple[str, ...]:
    """Return the modules of the reward: the module with its code, and the user's module."""
    reward = find("rewards", name)
    code: Callable[..., Any] = reward.function if isinstance(reward, Judge) else reward
    places = (code.__module__, name.partition(":")[0]) if ":" in name else (code.__module__,)
    return tuple(dict.fromkeys(sys.modules[place].__name__ for place in places))
