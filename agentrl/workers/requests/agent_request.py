"""Checks a run's agent before anything is written, and returns remarks on the agent."""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from agentrl.workflow.agents.agent_limits import check_held
from agentrl.workflow.agents.classes import by_name, is_class_agent, wants, ways_of
from agentrl.workflow.config import CLIENTS, RunConfig
from agentrl.workflow.envs import Env, gives_rewards
from agentrl.workflow.errors import ConfigError, DatasetError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.plugins import is_lent
from agentrl.workflow.runtime.shown_text import format_count
from agentrl.workflow.settings import settings
from agentrl.workflow.trajectory import Task

TEMPLATE = "prompt_template"
"""The name of the parameter in which agent-lightning passes a prompt to an agent. An agent with this parameter is refused if
the run has no text of this name: the arguments are positional, so the parameter would receive the model.
"""
SHAPE = "Write it as def solve(task, llm): ..., or async def."


def resolve_agent(experiment: Experiment, tasks: Sequence[Task]) -> RunConfig:
    """Check the run's agent, if there is one, and return the run's config.

    If neither the env, the rewards nor the hooks score an episode, the returned config sets `own_rewards`: the rewards that the
    agent returns or emits then have weight 1. Raise ConfigError if the agent cannot be imported or called, or if the env
    decides what follows a turn, which an agent must decide itself. Raise DatasetError if a task has no messages, because the
    agent would receive nothing.
    """
    agent = experiment.config.agent
    if agent is None:
        return experiment.config
    if agent.name == CLIENTS:
        message = f"The agent {CLIENTS!r} stands for outside clients, which a run cannot start."
        raise ConfigError(message, "Serve a policy to clients: agentrl serve --policy RUN")
    if experiment.agent is not None:
        check_function(agent.name, experiment.agent, experiment.config.resources)
    if not settings().broker_url:  # else the workers' machines have what it needs
        check_held(agent)
    _check_env(experiment.config.env, experiment.env)
    silent = [task.key for task in tasks if not task.messages]
    if silent:
        some = f"{len(silent)} of {format_count(len(tasks), 'task')} of {experiment.config.dataset.name!r}"
        verb = "has" if len(silent) == 1 else "have"
        raise DatasetError(f"{some} {verb} no messages (the first is {silent[0]!r:.80}). An agent receives only messages.")
    if experiment.weights or gives_rewards(experiment.env) or experiment.config.hooks:
        return experiment.config
    if agent.is_external and not settings().broker_url and not settings().rewards_key:
        message = "The run has no rewards, and external agents may not send any without AGENTRL_REWARDS_KEY."
        raise ConfigError(message, "Pass --reward or --env, or set AGENTRL_REWARDS_KEY to a secret and type `agentrl down`.")
    return experiment.config.model_copy(update={"agent": agent.model_copy(update={"own_rewards": True})})


def check_function(name: str, function: Callable[..., Any], texts: Collection[str] = ()) -> None:
    """Raise ConfigError if the agent, a function or a class, cannot be called with a task, a model and these texts."""
    if is_class_agent(function):
        _check_class(name, function)
        return
    if inspect.isclass(function):
        raise ConfigError(f"The agent {name!r} is a class without rollout(task, resources, llm).", SHAPE)
    if getattr(function, "__name__", "") == "<lambda>" and not is_lent(name):
        raise ConfigError(f"The agent {name!r} is a lambda, and workers cannot find a lambda by its name.", SHAPE)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"The agent {name!r} is a generator: use return instead of yield.", SHAPE)
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some built-in ones nothing is known
        return
    names = by_name(function, texts)
    if wants(function, TEMPLATE) and TEMPLATE not in texts:
        message = f"The agent {name!r} takes a {TEMPLATE}, but the run has no prompt with that name."
        raise ConfigError(message, f'Write resources={{"{TEMPLATE}": "..."}}.')
    if names:
        return
    try:
        signature.bind(None, None, **({"resources": None} if wants(function, "resources") else {}))
    except TypeError as error:
        raise ConfigError(f"The agent {name!r} cannot be called with a task and a model: {error}.", SHAPE) from error


def _check_class(name: str, agent: Any) -> None:
    instance = agent
    if inspect.isclass(agent):
        try:
            instance = agent()
        except Exception as error:
            problem = f"Cannot create the agent {name!r} without arguments: {type(error).__name__}: {error}"
            raise ConfigError(f"{problem}.", "Give its arguments defaults, or pass an object of the class.") from error
    ways = ways_of(instance)
    if not {"rollout", "validation_rollout"} & {way.__name__ for way in ways}:
        raise ConfigError(
            f"The agent {name!r} has no rollout method to evaluate it with.", "Write rollout(self, task, resources, llm)."
        )
    for way in ways:
        if inspect.isgeneratorfunction(way) or inspect.isasyncgenfunction(way):
            raise ConfigError(f"{way.__name__} of the agent {name!r} is a generator: use return instead of yield.", SHAPE)
        parameters = inspect.signature(way).parameters
        if not 1 <= len(parameters) <= 3:
            problem = f"{way.__name__} of the agent {name!r} takes {format_count(len(parameters), 'argument')}"
            raise ConfigError(
                f"{problem}.",
                "Write rollout(self, task, resources, llm); leave out the arguments that the method does not use.",
            )


def remark_on_agent(experiment: Experiment) -> Iterator[str]:
    """Yield remarks on the agent that a user should read before it runs."""
    agent = experiment.config.agent
    if agent is None:
        return
    if agent.is_external:
        yield "The agents run elsewhere. To run them, type: agentrl agent poll --url URL -- COMMAND"
    elif not agent.sandboxed:
        whose = "The agent's program" if agent.command else f"The agent {agent.name!r} is your own code and"
        yield f"{whose} runs without a sandbox, with your rights."
    yield "If a worker is lost, the agent starts again, and so do the side effects of its tools."
    if experiment.env.tools:
        yield f"The tools of the env {experiment.config.env!r} are not used: the agent has its own tools."
    if agent.own_rewards and not experiment.weights:
        yield "The run has no other rewards: the rewards that the agent returns are used."


def _check_env(name: str | None, env: Env) -> None:
    if type(env).step is not Env.step:
        message = f"The env {name!r} cannot be used with an agent: it decides what follows a turn, and so does the agent."
        raise ConfigError(
            message, "With an agent, only the rewards of an env are used. Use another --env, or leave --agent out."
        )
