"""Rewards: a file here scores an Episode. See `Reward`, `score`, and `Judge` for one that must run what the model wrote."""

import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from workflow.errors import AgentRLError, ConfigError, InfraError, RewardError, SandboxUnavailable
from workflow.plugins import find
from workflow.tools import Tool
from workflow.trajectory import Episode, ToolResult

Reward = Callable[[Episode], float]
"""A finished episode -> a finite number. One that raises fails its episode; it never counts as 0."""

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
        asks: the arguments that `function` is called with for a finished episode, of what JSON has; or the number itself,
            where nothing need be run.
        reads: the number in such a text.
    """

    asks: Callable[[Episode], Mapping[str, Any] | float] = field(kw_only=True)
    reads: Callable[[str], float] = float

    def __call__(self, episode: Episode) -> float:
        """The number, found here.

        Raises:
            SandboxUnavailable: nothing here can hold model-written code.
            InfraError: the system failed it.
        """
        asked = self.asks(episode)
        return self.reads(self.run(asked).content) if isinstance(asked, Mapping) else asked

    def run(self, arguments: Mapping[str, Any]) -> ToolResult:
        """See `Tool.run`."""
        found = self.returned(arguments)
        return found if isinstance(found, ToolResult) else ToolResult(str(found))

    def overdue(self) -> AgentRLError:
        """The system's failure: what the judged code may take is limited inside."""
        return InfraError(f"{self.name} did not judge within {self.timeout_seconds:g} s.")


def judges_of(weights: Mapping[str, float]) -> dict[str, Judge]:
    """Those of the rewards that are judges, by the reward's name.

    Raises:
        ConfigError: a judge's name is too long.
    """
    found = {name: find("rewards", name) for name in weights}
    judges = {name: reward for name, reward in found.items() if isinstance(reward, Judge)}
    for name in judges:
        if len(name) > MAX_JUDGE:
            raise ConfigError(f"The reward {name[:60]!r}... has {len(name)} characters.", f"At most {MAX_JUDGE}.")
    return judges


def questions(episode: Episode, judges: Mapping[str, Judge]) -> dict[str, Mapping[str, Any]]:
    """What must be asked of judges before the finished episode can be scored: arguments by the judge's name.

    Raises:
        RewardError: a judge cannot be asked about it.
    """
    asked = {}
    for name, judge in judges.items():
        with _loudly(name):
            question = judge.asks(episode)
        if isinstance(question, Mapping):
            asked[name] = question
    return asked


def verdicts(judges: Mapping[str, Judge], results: Mapping[str, ToolResult]) -> dict[str, float]:
    """The numbers that judges gave.

    Raises:
        RewardError: a judge raised.
    """
    numbers = {}
    for name, result in results.items():
        if result.error_class is not None:
            raise RewardError(f"reward {name!r} did not judge: {result.content}")
        with _loudly(name):
            numbers[name] = judges[name].reads(result.content)
    return numbers


def score(
    episode: Episode, weights: Mapping[str, float], judged: Mapping[str, float] = MappingProxyType({})
) -> dict[str, float]:
    """The named parts of an episode's reward: what was `judged` already, and the others by the reward file of that name.

    Raises:
        RewardError: a reward raised, or returned what is no finite number.
        InfraError: the system failed a reward.
        SandboxUnavailable: a reward must run code, and nothing here can hold it.
    """
    parts = {}
    for name in weights:
        with _loudly(name):
            value = float(judged[name] if name in judged else find("rewards", name)(episode))
        if not math.isfinite(value):
            raise RewardError(f"reward {name!r} returned {value}")
        parts[name] = value
    return parts


@contextmanager
def _loudly(name: str) -> Iterator[None]:
    try:
        yield
    except (InfraError, SandboxUnavailable):  # it says so itself: another attempt, or another machine, may do well
        raise
    except (Exception, SystemExit) as error:
        raise RewardError(f"reward {name!r} raised {type(error).__name__}: {error}") from error


def checked(parts: Mapping[str, float], source: str) -> dict[str, float]:
    """The parts that `source`, a hook, returned.

    Raises:
        RewardError: a value is no finite number, or a name is empty, too long or cannot be printed.
    """
    for name, value in parts.items():
        if not name.isprintable() or not 0 < len(name) <= MAX_NAME:
            raise RewardError(f"{source} names a part {name[:200]!r}: a name has 1 to {MAX_NAME} printable characters")
        if not math.isfinite(value):
            raise RewardError(f"{source} returned {value} for {name!r}")
    return dict(parts)


def total(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The scalar: the weighted sum of the parts; a part without a weight (from a hook) counts 1.

    Raises:
        RewardError: the sum is too large for a number.
    """
    reward = sum(value * weights.get(name, 1.0) for name, value in parts.items())
    if not math.isfinite(reward):
        raise RewardError(f"the weighted sum of the reward parts is {reward}")
    return reward


def code_hash(weights: Mapping[str, float]) -> str:
    """Hash of the weights and of the whole file each reward is in: two sets with the same hash were scored by the same code."""
    files = {name: inspect.getsource(sys.modules[_code(find("rewards", name)).__module__]) for name in weights}
    text = "\0".join(f"{name}={weight}\0{files[name]}" for name, weight in sorted(weights.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _code(reward: Reward) -> Callable[..., Any]:
    return reward.function if isinstance(reward, Judge) else reward
