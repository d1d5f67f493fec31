"""Rewards: a file here scores an Episode. See `Reward`, `score`, and `Judge` for one that must run what the model wrote.

Rewards that a run names (`--reward NAME=WEIGHT`) are its objective; those of its env that it does not name are recorded with
weight 0. One of your own is a function in a file of yours, `--reward mine:polite=0.2`, that returns one number for the episode,
or a list with one for each of its steps:

    def polite(episode):
        return [float("please" in step.message.content) for step in episode.steps]

What it earns step by step is kept so (`rewards.step`), and an algorithm that credits turns credits each with its own.
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
"""What a reward gives: a finite number for the episode, or a list of as many as it has steps, of which it is the sum."""

Part = float | tuple[float, ...]
"""A value that was checked."""

Reward = Callable[[Episode], Value]
"""A finished episode -> its value. One that raises fails its episode; it never counts as 0. `episode.limits` are the run's."""

MAX_REWARD = 1e30
"""The size of a reward, at most: a group's deviation squares it."""

MAX_NAME = 64
"""Characters in the name that a hook gives to a reward part, at most."""

MAX_JUDGE = 128
"""Characters in the name of a judge, at most: so many the row has that it is asked through."""


@dataclass(frozen=True)
class Judge(Tool):
    """A reward whose number is found where the tools run, since what the model wrote must be run for it.

    When an episode is over, the rollout asks its judges as the model asks for a tool: one row, the queue `tools`, sent again
    where a worker is lost, answered once. The model is not told of it, and it is none of the model's calls. Called with an
    episode, as `agentrl rescore` and `replay --verify` do, it judges in this very process.

    Args:
        function: judges; returns the text that `reads` the number, or a ToolResult with it, and with what the sandbox saw.
        asks: the arguments that `function` is called with for a finished episode, of what JSON has; or the value itself,
            where nothing need be run.
        reads: the value in such a text.
        reference_form: the answer made of a task's reference, such as `"#### {}"`, which must earn 1 (`reference_check`); empty
            if answers are not compared with references.
    """

    asks: Callable[[Episode], Mapping[str, Any] | Value] = field(kw_only=True)
    reads: Callable[[str], Value] = float
    reference_form: str = ""

    def __call__(self, episode: Episode) -> Value:
        """Return the value, found here.

        Raises:
            SandboxUnavailable: nothing here can hold model-written code.
            InfraError: the system failed it.
        """
        question = self.asks(episode)
        return self.reads(self.run(question).content) if isinstance(question, Mapping) else question

    def run(self, arguments: Mapping[str, Any]) -> ToolResult:
        """See `Tool.run`."""
        result = self.returned(arguments)
        return result if isinstance(result, ToolResult) else ToolResult(str(result))

    def overdue(self) -> AgentRLError:
        """Return the system's failure: what the judged code may take is limited inside."""
        return InfraError(f"{self.name} did not judge within {self.timeout_seconds:g} s.")


def judges_of(weights: Mapping[str, float]) -> dict[str, Judge]:
    """Return those of the rewards that are judges, by the reward's name.

    Raises:
        ConfigError: a judge's name is too long.
    """
    rewards = {name: find("rewards", name) for name in weights}
    judges = {name: reward for name, reward in rewards.items() if isinstance(reward, Judge)}
    for name in judges:
        if len(name) > MAX_JUDGE:
            raise ConfigError(f"The reward {name[:60]!r}... has {len(name)} characters.", f"At most {MAX_JUDGE}.")
    return judges


def check_rewards(weights: Mapping[str, float]) -> None:
    """Look, before anything is rolled out, whether each can be called with an episode alone.

    Raises:
        ConfigError: one cannot.
    """
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
    """Return the calls of judges that are needed to score the ended episode: arguments by the judge's name.

    Args:
        optional: as of `score`.

    Raises:
        RewardError: a judge that is not optional cannot be asked about it.
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
    """Return the values that judges gave; None for an optional one that failed.

    Args:
        optional: as of `score`.

    Raises:
        RewardError: a judge that is not optional raised.
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
    """Return the named parts of an episode's reward: what was `judged` already, and the others by the reward file of that name.

    Args:
        optional: rewards that are recorded beside those that a person named (`envs.optional_rewards`). Where one fails, for
            example because it cannot read the task's reference, the episode has no part of its name.

    Raises:
        RewardError: a reward that is not optional raised, or returned neither a finite number nor one for each step.
        InfraError: the system failed a reward.
        SandboxUnavailable: a reward must run code, and nothing here can hold it.
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
    """Return the parts of an episode with so many steps, of which those at `places` were scored: the others earned nothing."""
    if len(places) == steps:
        return dict(parts)

    def at(part: tuple[float, ...]) -> Part:
        earned = dict(zip(places, part, strict=True))
        return tuple(earned.get(index, 0.0) for index in range(steps))

    return {name: at(part) if isinstance(part, tuple) else part for name, part in parts.items()}


def numbers(value: object) -> Part:
    """Return one number or several, as plain floats.

    Raises:
        TypeError: it is something else; a text that reads like a number is none.
    """
    return tuple(map(_number, value)) if isinstance(value, list | tuple) else _number(value)


def _number(value: object) -> float:
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"a reward is a number, not {type(value).__name__!r}")
    return float(value)


def part_of(value: Part, steps: int, source: str, name: str = "") -> Part:
    """Return the value that `source` returned, for the part of that name where it returns several, with its numbers checked.

    Raises:
        RewardError: one is not finite or beyond `MAX_REWARD`, or they are not as many as the steps.
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
    """Return the part's sum over the episode."""
    return part if isinstance(part, float) else math.fsum(part)


def _passed_over(optional: bool) -> AbstractContextManager[None]:
    """Passes over the failure of an optional reward."""
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
    """Return the parts that `source`, a hook or an env, returned for an episode of so many steps.

    Raises:
        RewardError: a value is neither a finite number nor one for each step; a name is empty, too long or cannot be printed.
    """
    for name in parts:
        if not name.isprintable() or not 0 < len(name) <= MAX_NAME:
            raise RewardError(f"{source} names a part {name[:200]!r}: a name has 1 to {MAX_NAME} printable characters")
    return {name: part_of(value, steps, source, name) for name, value in parts.items()}


def assign_rewards(episode: Episode, parts: Mapping[str, Part], weights: Mapping[str, float]) -> Episode:
    """Return the episode with its reward, the parts of it, and the rewards of its steps.

    Raises:
        RewardError: the sum is too large for a number.
    """
    by_step = {name: part for name, part in parts.items() if isinstance(part, tuple)}
    steps = tuple(
        replace(step, reward=sum(part[index] * weights.get(name, 1.0) for name, part in by_step.items()))
        for index, step in enumerate(episode.steps)
    )
    rewards = {name: part_sum(part) for name, part in parts.items()}
    return replace(episode, steps=steps, rewards=rewards, reward=total_reward(parts, weights))


def total_reward(parts: Mapping[str, Part], weights: Mapping[str, float]) -> float:
    """Return the scalar: the weighted sum of the parts; a part without a weight (from a hook) counts 1.

    Raises:
        RewardError: the sum is too large for a number.
    """
    reward = sum(part_sum(part) * weights.get(name, 1.0) for name, part in parts.items())
    if not _is_usable(reward):
        raise RewardError(f"the weighted sum of the reward parts is {reward}{_why_unusable(reward)}")
    return reward


def code_hash(weights: Mapping[str, float], anew: bool = False) -> str:
    """Return hash of the weights and of the statements of each reward's file: the same hash means that the same code scored.

    Args:
        anew: as the files are now; else as they were when this process first hashed them, which is what it has loaded.
    """
    files = {name: "".join(hashed_source(module, anew) for module in _modules(name)) for name in weights}
    text = "\0".join(f"{name}={weight}\0{files[name]}" for name, weight in sorted(weights.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _modules(name: str) -> tuple[str, ...]:
    """Where its code is, and where a user's file may have made it of that (`brief = within(400, 100)`)."""
    reward = find("rewards", name)
    code: Callable[..., Any] = reward.function if isinstance(reward, Judge) else reward
    places = (code.__module__, name.partition(":")[0]) if ":" in name else (code.__module__,)
    return tuple(dict.fromkeys(sys.modules[place].__name__ for place in places))
