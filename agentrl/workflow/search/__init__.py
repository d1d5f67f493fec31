"""Search: algorithms that are no gradient. They try texts in episodes, and choose.

Such an algorithm is a function `run(resources, rollouts, ...)` of what it is given by name, see `Given`. It is called from its
beginning whenever its run goes on: what it asked for before is answered from rows, at once and the same, so that it comes to
where it was. It must therefore take the same way again: its draws come from `rng`, and nothing else decides.
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
"""Of one request."""
Candidate = Mapping[str, str]
"""Name -> text of all of a run's resources."""


class Critic(Protocol):
    """Who is asked for critique and edits: a model behind any endpoint of OpenAI's kind."""

    def __call__(self, prompt: str) -> str:
        """Return the answer to a prompt.

        Raises:
            ServiceError: it does not answer; the run waits, and asks again.
        """
        ...

    def each(self, prompts: Sequence[str]) -> list[str]:
        """Return the answers to prompts that are asked side by side."""
        ...


@dataclass(frozen=True)
class Request:
    """A request of a search for rollouts: a group of each task for each candidate, in the order of the candidates."""

    candidates: tuple[Candidate, ...]
    tasks: tuple[Task, ...]
    notes: tuple[str, ...] = ()
    parents: tuple[Candidate | None, ...] = ()

    @property
    def groups(self) -> list[tuple[int, Task]]:
        """The candidate, by its place, and the task of each group."""
        return [(place, task) for place in range(len(self.candidates)) for task in self.tasks]


class Asked(BaseException):
    """A request for rollouts that do not exist yet; a BaseException, so that `except Exception` lets it pass."""

    def __init__(self, request: Request) -> None:
        super().__init__("rollouts are wanted")
        self.request = request


@dataclass(frozen=True)
class Tried:
    """A recorded group: the candidate, the task and the episodes."""

    candidate: Candidate
    group: Group


class Resources(dict[str, str]):
    """The prompts that a search starts with."""

    def validation_error(self, name: str, text: object) -> str:
        """Return why the text cannot replace the prompt with that name; empty if it can."""
        return validation_error(text, self[name])

    def with_text(self, candidate: Candidate, name: str, text: str) -> dict[str, str]:
        """Return the candidate with a new text under that name."""
        return {**candidate, name: text}


class Rollouts:
    """Episodes of a search: recorded ones, then new ones that it requests.

    Args:
        seeds: what the search begins with, whose names every candidate has.
        record: all that the run has tried, in its order.
    """

    def __init__(self, seeds: Candidate, record: Sequence[Tried]) -> None:
        self._seeds, self._record, self._next = seeds, record, 0

    def __call__(
        self, candidate: Candidate, tasks: Sequence[Task], note: str = "", parent: Candidate | None = None
    ) -> list[Group]:
        """Return a group of episodes for each of the tasks, with the candidate's texts; `note` and `parent` say how it came
        about.
        """
        return self.each([candidate], tasks, [note], [parent])[0]

    def each(
        self,
        candidates: Sequence[Candidate],
        tasks: Sequence[Task],
        notes: Sequence[str] = (),
        parents: Sequence[Candidate | None] = (),
    ) -> list[list[Group]]:
        """Return the episodes of several candidates, which are sampled in parallel.

        Raises:
            ValueError: a candidate is none, or too much is asked for at once.
            ConfigError: the search does not take the way that its record tells.
        """
        request = Request(tuple(map(dict, candidates)), tuple(tasks), tuple(notes), tuple(parents))
        for candidate in request.candidates:
            self._check(candidate)
        if not request.groups:
            return [[] for _ in candidates]
        if len(request.groups) > MAX_GROUPS:
            raise ValueError(f"{len(request.groups)} groups are more than a search asks for at once: {MAX_GROUPS}")
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
            raise ValueError(f"a candidate has the texts {', '.join(self._seeds)}, not {', '.join(candidate)}")
        for name, text in candidate.items():
            if fault := validation_error(text, self._seeds[name]):
                raise ValueError(f"the text {name!r} of a candidate cannot be tried: {fault}")


@dataclass(frozen=True)
class Given:
    """The arguments that a search may take, by field name.

    Args:
        resources: the texts that it begins with.
        rollouts: episodes with other texts.
        train_tasks, choose_tasks: tasks to learn from, and to choose by.
        critic: who criticises; None where the run names nobody.
        rng: its draws.
        options: the run's section `search`.
        store: the URL of the database: `agentrl.open(store)` reads it.
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
    """The result of a search: the chosen candidate, or None."""

    candidate: Candidate | None


def go_on(run: Callable[..., Any], given: Given, held_out: Sequence[Task]) -> Request | Chosen:
    """Run the algorithm until it requests rollouts or chooses a candidate.

    What was chosen is then measured beside the seed on tasks that no choice has read.

    Raises:
        ConfigError: it cannot be called so, or has gone another way.
    """
    try:
        chosen = run(**_taken(run, given))
        if chosen is None:
            return Chosen(None)
        if not isinstance(chosen, Mapping):
            raise TypeError(f"a search must return the chosen texts by name, or None, not {type(chosen).__name__}")
        if dict(chosen) != given.resources and held_out:
            given.rollouts.each([dict(given.resources), chosen], held_out)
        return Chosen(dict(chosen))
    except Asked as asked:
        return asked.request


def names_taken(run: Callable[..., Any]) -> list[str]:
    """Return the names of the algorithm's arguments.

    Raises:
        ConfigError: it takes what no search is given.
    """
    arg_names = list(Given.__dataclass_fields__)
    names = list(inspect.signature(run).parameters)
    if strange := [name for name in names if name not in arg_names]:
        raise ConfigError(f"A search does not get a parameter {strange[0]!r}.", f"Its run may take {', '.join(arg_names)}.")
    return names


def _taken(run: Callable[..., Any], given: Given) -> dict[str, Any]:
    return {name: getattr(given, name) for name in names_taken(run)}


def score(groups: Sequence[Group]) -> float:
    """Return the mean of `group_score` over tasks; minus infinity if no task has a score."""
    means = [mean for mean in map(group_score, groups) if mean is not None]
    return fsum(means) / len(means) if means else float("-inf")


def group_score(group: Group) -> float | None:
    """Return the mean reward of a group's ended episodes; None if the system failed all of them.

    One that failed by its agent or a reward earned nothing: else a text that breaks agents would be chosen for the rest.
    """
    over = [episode for episode in group.episodes if episode.status in ("done", "failed")]
    rewards = [episode.reward or 0.0 if episode.status == "done" else 0.0 for episode in over]
    return fsum(rewards) / len(rewards) if rewards else None
