"""Search: algorithms without gradients. They try prompts and other texts in episodes, and choose the best.

Such an algorithm is a function `run(resources, rollouts, ...)`. Its parameters are names of fields of `Given`. Each time the
run continues, the function is called again from its beginning. The requests that it made in an earlier call are answered from
the database at once, with the same results, until the function makes a new request. So the function must make the same requests
again: it may depend only on its arguments, and must take random draws from `rng`.
"""

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any, Protocol

from agentrl.workflow.errors import ConfigError
from agentrl.workflow.resources import validation_error
from agentrl.workflow.trajectory import Group, Task

MAX_GROUPS = 4096
Candidate = Mapping[str, str]
"""The texts of all resources of a run, by name."""


class Critic(Protocol):
    """A model that writes critique and edits, at an OpenAI-compatible endpoint."""

    def __call__(self, prompt: str) -> str:
        """Return the model's answer to a prompt. Raise ServiceError if the model does not answer; the run tries again later."""
        ...

    def each(self, prompts: Sequence[str]) -> list[str]:
        """Return the answers to several prompts, which are sent in parallel."""
        ...


@dataclass(frozen=True)
class Request:
    """A request of a search for rollouts: a group of episodes for each pair of candidate and task, ordered by candidate."""

    candidates: tuple[Candidate, ...]
    tasks: tuple[Task, ...]
    notes: tuple[str, ...] = ()
    parents: tuple[Candidate | None, ...] = ()

    @property
    def groups(self) -> list[tuple[int, Task]]:
        """For each group, the index of its candidate and its task."""
        return [(place, task) for place in range(len(self.candidates)) for task in self.tasks]


class Asked(BaseException):
    """A signal that a search requested rollouts which do not exist yet. It is a BaseException, so `except Exception` in the
    search does not catch it.
    """

    def __init__(self, request: Request) -> None:
        super().__init__("rollouts are wanted")
        self.request = request


@dataclass(frozen=True)
class Tried:
    """A recorded group of episodes, with the candidate that it tried."""

    candidate: Candidate
    group: Group


class Resources(dict[str, str]):
    """A mapping from name to prompt, with which a search starts."""

    def validation_error(self, name: str, text: object) -> str:
        """Return why the text cannot replace the prompt of this name; empty if it can."""
        return validation_error(text, self[name])

    def with_text(self, candidate: Candidate, name: str, text: str) -> dict[str, str]:
        """Return a copy of the candidate in which the prompt `name` has the new text."""
        return {**candidate, name: text}


class Rollouts:
    """The function by which a search requests episodes. Requests that an earlier call of the search made get the recorded
    episodes; a new request samples episodes. `seeds` are the texts with which the search starts; every candidate must have
    texts of the same names. `record` contains all groups that the run has tried, in order.
    """

    def __init__(self, seeds: Candidate, record: Sequence[Tried]) -> None:
        self._seeds, self._record, self._next = seeds, record, 0

    def __call__(
        self, candidate: Candidate, tasks: Sequence[Task], note: str = "", parent: Candidate | None = None
    ) -> list[Group]:
        """Return a group of episodes per task, sampled with the candidate's texts. `note` says how the candidate was made, and
        `parent` is the candidate from which it was made.
        """
        return self.each([candidate], tasks, [note], [parent])[0]

    def each(
        self,
        candidates: Sequence[Candidate],
        tasks: Sequence[Task],
        notes: Sequence[str] = (),
        parents: Sequence[Candidate | None] = (),
    ) -> list[list[Group]]:
        """Return, for each candidate, one group of episodes per task. All candidates are sampled in parallel. Raise ValueError
        if a candidate is invalid, or the request has more than `MAX_GROUPS` groups. Raise ConfigError if an earlier call of the
        search requested other rollouts at this point.
        """
        request = Request(tuple(map(dict, candidates)), tuple(tasks), tuple(notes), tuple(parents))
        for candidate in request.candidates:
            self._check(candidate)
        if not request.groups:
            return [[] for _ in candidates]
        if len(request.groups) > MAX_GROUPS:
            raise ValueError(f"{len(request.groups)} groups are too many for one request; the maximum is {MAX_GROUPS}")
        if self._next >= len(self._record):
            raise Asked(request)
        records = self._record[self._next : self._next + len(request.groups)]
        self._next += len(request.groups)
        keys = [(dict(record.candidate), record.group.task.content_hash) for record in records]
        if keys != [(request.candidates[place], task.content_hash) for place, task in request.groups]:
            raise ConfigError(
                "The search requested other rollouts than the first time: its code or its random draws have changed.",
                "Restore the old code, or submit a new run.",
            )
        groups = [record.group for record in records]
        return [groups[start : start + len(tasks)] for start in range(0, len(groups), len(tasks))]

    def _check(self, candidate: Candidate) -> None:
        if candidate.keys() != self._seeds.keys():
            raise ValueError(f"a candidate must have the texts {', '.join(self._seeds)}, not {', '.join(candidate)}")
        for name, text in candidate.items():
            if fault := validation_error(text, self._seeds[name]):
                raise ValueError(f"the text {name!r} of a candidate cannot be tried: {fault}")


@dataclass(frozen=True)
class Given:
    """The arguments that a search may take, by field name.

    Args:
        resources: the texts with which the search starts.
        rollouts: the function that samples episodes with other texts.
        train_tasks, choose_tasks: the tasks to learn from, and the tasks to choose by.
        critic: the critic model; None if the run has none.
        rng: the source of the search's random draws.
        options: the section `search` of the run's config.
        store: the URL of the database; `agentrl.open(store)` reads it.
    """

    resources: Resources
    rollouts: Rollouts
    train_tasks: Sequence[Task]
    choose_tasks: Sequence[Task]
    critic: Critic | None = None
    rng: random.Random = field(default_factory=random.Random)
    options: Mapping[str, Any] = field(default_factory=dict)
    store: str = ""


@dataclass(frozen=True)
class Chosen:
    """The result of a search: the chosen candidate, or None if the search chose none."""

    candidate: Candidate | None


def go_on(run: Callable[..., Any], inputs: Given, held_out: Sequence[Task]) -> Request | Chosen:
    """Run the algorithm until it requests rollouts or chooses a candidate. Return the request or the choice.

    A chosen candidate and the initial texts are then measured on the held-out tasks, which the search has not used. Raise
    ConfigError if the algorithm has a parameter that is not a field of `Given`, or requests other rollouts than in an earlier
    call.
    """
    try:
        chosen = run(**_taken(run, inputs))
        if chosen is None:
            return Chosen(None)
        if not isinstance(chosen, Mapping):
            raise TypeError(f"a search must return the chosen texts by name, or None, not {type(chosen).__name__}")
        if dict(chosen) != inputs.resources and held_out:
            inputs.rollouts.each([dict(inputs.resources), chosen], held_out)
        return Chosen(dict(chosen))
    except Asked as asked:
        return asked.request


def names_taken(run: Callable[..., Any]) -> list[str]:
    """Return the names of the algorithm's parameters. Raise ConfigError if a parameter is not a field of `Given`."""
    arg_names = list(Given.__dataclass_fields__)
    names = list(inspect.signature(run).parameters)
    if strange := [name for name in names if name not in arg_names]:
        raise ConfigError(
            f"The search's method `run` has an unknown parameter {strange[0]!r}.",
            f"It may have: {', '.join(arg_names)}.",
        )
    return names


def _taken(run: Callable[..., Any], inputs: Given) -> dict[str, Any]:
    return {name: getattr(inputs, name) for name in names_taken(run)}


def score(groups: Sequence[Group]) -> float:
    """Return the mean of `group_score` over the groups; minus infinity if no group has a score."""
    means = [mean for mean in map(group_score, groups) if mean is not None]
    return fsum(means) / len(means) if means else float("-inf")


def group_score(group: Group) -> float | None:
    """Return the mean reward of a group's ended episodes; None if a failure of the system ended all of them.

    An episode that failed because of its agent or a reward has the reward 0. Otherwise a search could choose a text that breaks
    most of its episodes.
    """
    over = [episode for episode in group.episodes if episode.status in ("done", "failed")]
    rewards = [episode.reward or 0.0 if episode.status == "done" else 0.0 for episode in over]
    return fsum(rewards) / len(rewards) if rewards else None
