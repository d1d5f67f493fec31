"""One step of a prompt search: it reads the results of earlier candidates, then plans new ones or chooses the best."""

import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from logging import getLogger

from agentrl.workers.stack.process import database
from agentrl.workflow.algorithms import search_function
from agentrl.workflow.errors import AgentRLError, ConfigError, Fenced, ServiceError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.plugins import find
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.search import Chosen, Given, Request, Resources, Rollouts, Tried, go_on, names_taken
from agentrl.workflow.search.recorded_critic import RecordedCritic
from agentrl.workflow.settings import settings
from agentrl.workflow.store import blocked_runs, search_rounds
from agentrl.workflow.store.run_resources import VersionOrigin
from agentrl.workflow.store.search_rounds import PlannedGroup, SearchTasks
from agentrl.workflow.store.train_claims import IterationWork
from agentrl.workflow.trajectory import Group

log = getLogger("agentrl.search")


def advance(work: IterationWork, is_fenced: Callable[[], bool]) -> bool:
    """Run one step of the search. Return whether new groups were planned, which must now be rolled out. Raise Fenced if
    `is_fenced` says that another process has taken over. Raise ServiceError if the critic does not answer. Raise ConfigError if
    the search algorithm raised an exception.
    """
    tasks = search_rounds.load_search_tasks(database(), work.run_id)
    try:
        decision = _go_on(work, tasks)
    except ServiceError as error:
        blocked_runs.wait_for(database(), work.run_id, str(error))
        raise
    if blocked_runs.find_wait_reason(database(), work.run_id):
        blocked_runs.wait_no_more(database(), work.run_id)
    if is_fenced():
        raise Fenced(f"Another worker took over the search of {work.run}.")
    faultpoint("search.before")
    if isinstance(decision, Request):
        search_rounds.add_round(database(), work, _planned(decision, tasks))
        log.info("%s: %d groups of %d candidates", work.run, len(decision.groups), len(decision.candidates))
    else:
        search_rounds.finish_search(database(), work, decision.candidate)
    faultpoint("search.after")
    return isinstance(decision, Request)


def _go_on(work: IterationWork, tasks: SearchTasks) -> Request | Chosen:
    config = Experiment.load(work.config).config
    run = search_function(find("algorithms", config.algorithm.name))
    candidates = search_rounds.load_candidates(database(), work.id)
    parts = search_rounds.load_parts(database(), work.id)
    record = [Tried(candidates[group.slot], _with_parts(group, parts)) for group in work.groups]
    with ExitStack() as stack:
        critic = None
        if "critic" in names_taken(run) and config.search.critic is not None:
            answers = search_rounds.load_answers(database(), work.run_id)
            record_answer = partial(search_rounds.record_answer, database(), work.run_id, config.search.critic)
            critic = stack.enter_context(closing(RecordedCritic(config.search, settings(), answers, record_answer)))
        inputs = Given(
            resources=Resources(config.resources),
            rollouts=Rollouts(config.resources, record),
            train_tasks=list(tasks.train.values()),
            choose_tasks=list(tasks.choose.values()),
            critic=critic,
            rng=random.Random(work.seed),
            options=config.search.model_dump(),
            store=settings().database,
        )
        try:
            return go_on(run, inputs, list(tasks.held_out.values()))
        except AgentRLError:
            raise
        except Exception as error:
            log.exception("%s: its algorithm", work.run)
            message = f"The algorithm {config.algorithm.name!r} raised {type(error).__name__}: {error}"
            raise ConfigError(f"{message}.", f"Fix it, then: agentrl resume {work.run}") from error


def _with_parts(group: Group, parts: Mapping[int, Mapping[str, float]]) -> Group:
    return replace(group, episodes=tuple(replace(episode, rewards=parts.get(episode.id, {})) for episode in group.episodes))


def _planned(request: Request, tasks: SearchTasks) -> list[PlannedGroup]:
    numbers: dict[str, int] = {}
    for some in (tasks.train, tasks.choose, tasks.held_out):
        numbers |= {task.content_hash: number for number, task in some.items()}
    return [
        PlannedGroup(numbers[task.content_hash], request.candidates[place], _origin(request, place))
        for place, task in request.groups
    ]


def _origin(request: Request, place: int) -> VersionOrigin:
    note = request.notes[place] if place < len(request.notes) else ""
    return VersionOrigin(note, request.parents[place] if place < len(request.parents) else None)
