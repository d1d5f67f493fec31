"""Checks the request of a prompt search: the texts to improve, the critic, and the role of each task."""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.workflow.algorithms import Search, search_function
from agentrl.workflow.config import RunConfig
from agentrl.workflow.datasets import load_tasks
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.inference.http import server_urls
from agentrl.workflow.plugins import find
from agentrl.workflow.resources import SYSTEM_PROMPT, TOOL
from agentrl.workflow.search import names_taken
from agentrl.workflow.settings import settings
from agentrl.workflow.store.iterations import task_order
from agentrl.workflow.trajectory import Task


@dataclass(frozen=True)
class SearchedTasks:
    """All tasks of a search. `roles` maps the content hash of a task to "choose" or "held_out". Tasks for edits have none."""

    tasks: tuple[Task, ...]
    roles: dict[str, str]


def check_resources(experiment: Experiment) -> None:
    """Raise ConfigError if a text of the run has no effect, because the built-in loop uses no text of that name."""
    if experiment.config.agent is not None:
        return
    for name in experiment.config.resources:
        if name != SYSTEM_PROMPT and not (name.startswith(TOOL) and name.removeprefix(TOOL) in experiment.tools):
            texts = ", ".join([SYSTEM_PROMPT, *(f"{TOOL}{tool}" for tool in experiment.tools)])
            raise ConfigError(
                f"resources.{name} has no effect without an agent.", f"Texts that have an effect without an agent: {texts}."
            )


def resolve_texts(experiment: Experiment) -> RunConfig:
    """Return the config of a search with the texts from which it starts. By default, the only text is the env's system prompt.
    Raise ConfigError if there is no text to improve; the algorithm needs a critic, and none is set; or a critic is set that the
    algorithm does not use.
    """
    config, search = experiment.config, find("algorithms", experiment.config.algorithm.name)
    names = names_taken(search_function(search))
    if not config.resources and config.agent is None and experiment.env.system_prompt:
        config = config.model_copy(update={"resources": {SYSTEM_PROMPT: experiment.env.system_prompt}})
    if not config.resources and _chooses(search):
        who = "the agent has no prompt" if config.agent is not None else "the env has no system prompt"
        name = "prompt" if config.agent is not None else SYSTEM_PROMPT
        raise ConfigError(f"No prompt to improve: {who}.", f"Write in a config file: resources: {{{name}: ...}}")
    if "critic" in names:
        if config.search.critic is None:
            raise ConfigError(f"{config.algorithm.name} needs a critic model.", "Set its model: -s search.critic=MODEL")
        if not settings().broker_url:  # else the workers' machines know where it is
            server_urls(settings(), "critic")
    elif config.search.critic is not None:
        raise ConfigError(f"search.critic has no effect with {config.algorithm.name}.", "Leave it out.")
    return config


def _chooses(search: object) -> bool:
    return not isinstance(search, Search) or search.chooses


def divide(config: RunConfig, tasks: Sequence[Task]) -> SearchedTasks:
    """Divide the tasks of a search: some for edits, some for the selection of the best text, and some held out. If `eval` is
    set, its tasks are held out; otherwise some of `tasks` are. Raise ConfigError if there are too few tasks, or `eval` is set
    for an algorithm that cannot use it. Raise DatasetError if the held-out tasks cannot be read.
    """
    if not _chooses(find("algorithms", config.algorithm.name)):
        if config.eval.every is not None:
            raise ConfigError(f"{config.algorithm.name} has no evaluation.", "Leave eval.* out.")
        return SearchedTasks(tuple(tasks), {})
    order = [tasks[place] for place in task_order(config.seed, "search", [task.content_hash for task in tasks])]
    if config.eval.every is not None:
        dataset = config.dataset.model_copy(
            update={
                "name": config.eval.dataset or config.dataset.name,
                "split": config.eval.split,
                "max_tasks": config.eval.tasks,
            }
        )
        held_out = list(load_tasks(dataset).tasks)
        hashes = {task.content_hash for task in held_out}
        order = [task for task in order if task.content_hash not in hashes]
    else:
        held_out = order[: config.search.held_out_tasks]
        order = order[len(held_out) :]
    choose, train = order[: config.search.choose_tasks], order[config.search.choose_tasks :]
    if len(held_out) < 2 or not train:
        raise ConfigError(
            f"{len(tasks)} tasks are too few: {config.search.choose_tasks} for selection, "
            f"{len(held_out) if config.eval.every else config.search.held_out_tasks} held out, and the rest for edits.",
            "Use more tasks, or lower search.choose_tasks and search.held_out_tasks.",
        )
    roles = {task.content_hash: "held_out" for task in held_out} | {task.content_hash: "choose" for task in choose}
    return SearchedTasks((*train, *choose, *held_out), roles)
