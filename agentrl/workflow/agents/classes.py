"""Calling conventions of agents. An agent is a function `solve(task, llm)` or a class.

A function may also take the run's texts: all of them as `resources`, or single texts by name, `solve(task, llm, prompt)`. A
class has `rollout(task, resources, llm)`. If training and validation differ, it also has `training_rollout` and
`validation_rollout`.

A class is instantiated once, without arguments, in the process from which the processes of its agents are forked. So all agents
start with the attributes of this instance.
"""

import inspect
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from agentrl.workflow.agents import LLM, AgentTask

GIVEN = ("task", "llm", "resources")
WAYS = ("rollout", "training_rollout", "validation_rollout")


class Agent:
    """The base class of agents. Override `rollout` with the arguments that your agent needs."""

    def rollout(self, task: AgentTask, resources: dict[str, Any], llm: LLM) -> Any:
        """Solve the task by calling the model. Return None, a number (the reward), named rewards, or an `Answer`.

        Args:
            task: the task.
            resources: the run's texts by name, and the address of the model under the name `llm`.
            llm: the address of the model.
        """
        raise NotImplementedError(f"{type(self).__name__} has no rollout(task, resources, llm)")


def is_class_agent(value: Any) -> bool:
    """Return True if the value is an agent class or an instance of one."""
    return any(callable(getattr(value, way, None)) for way in WAYS)


def as_function(value: Any) -> Callable[..., Any]:
    """Convert the agent to a function of the task and the model's address."""
    if not is_class_agent(value):
        function: Callable[..., Any] = value
        return (
            function if {parameter.name for parameter in _parameters(function)} <= {"task", "llm"} else partial(_call, function)
        )
    agent = value() if isinstance(value, type) else value

    def solve(task: AgentTask, llm: LLM) -> Any:
        return _roll(agent, task, llm)

    return solve


def by_name(function: Callable[..., Any], texts: Collection[str]) -> list[str]:
    """Return the names of the arguments that must be passed to an agent function by keyword; empty if the function takes
    neither `resources` nor a text of the run.

    Args:
        function: the agent function.
        texts: the names of the run's texts.
    """
    parameters = _parameters(function)
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind is not parameter.POSITIONAL_ONLY and (parameter.name in texts or parameter.name in GIVEN)
    ]
    unknown = [parameter for parameter in parameters if parameter.name not in names and parameter.default is parameter.empty]
    return names if not unknown and any(name == "resources" or name in texts for name in names) else []


def wants(function: Callable[..., Any], name: str) -> bool:
    """Return True if an agent function has an argument of this name."""
    return any(parameter.name == name for parameter in _parameters(function))


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of some built-in ones nothing is known
        return []
    return [parameter for parameter in parameters if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)]


def _call(function: Callable[..., Any], task: AgentTask, llm: LLM) -> Any:
    args = {**task.resources, "task": task, "llm": llm, "resources": _resources(task, llm)}
    if names := by_name(function, task.resources):
        return function(**{name: args[name] for name in names})
    return function(task, llm, **({"resources": args["resources"]} if wants(function, "resources") else {}))


def _resources(task: AgentTask, llm: LLM) -> dict[str, Any]:
    return {**task.resources, "llm": llm}


def ways_of(agent: Any) -> list[Callable[..., Any]]:
    """Return the agent's methods whose names are in `WAYS`. The `rollout` of the base class `Agent` is left out."""
    methods = [getattr(agent, way, None) for way in WAYS]
    return [method for method in methods if callable(method) and getattr(method, "__func__", method) is not Agent.rollout]


def _roll(agent: Any, task: AgentTask, llm: LLM) -> Any:
    way = "training_rollout" if task.training else "validation_rollout"
    method = getattr(agent, way, None) or agent.rollout
    args = {**task.resources, "task": task, "resources": _resources(task, llm), "llm": llm}
    names = list(inspect.signature(method).parameters)
    if set(names) <= args.keys():
        return method(**{name: args[name] for name in names})
    return method(*((task,), (task, llm), (task, args["resources"], llm))[min(len(names), 3) - 1])
