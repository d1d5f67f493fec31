"""Experiment: the config of a run, with the plug-ins that the config names. Each plug-in is loaded when it is first used,
without torch.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from agentrl.workflow.algorithms import Algorithm, find_gradient
from agentrl.workflow.config import RunConfig
from agentrl.workflow.engines import Backend
from agentrl.workflow.envs import Env, offered_tools, scoring_hash
from agentrl.workflow.plugins import find
from agentrl.workflow.resources import SYSTEM_PROMPT, TOOL
from agentrl.workflow.rewards import Judge, judges_of
from agentrl.workflow.tools import Tool
from agentrl.workflow.trainers import TrainerBackend


@dataclass(frozen=True)
class Experiment:
    """The config of a run and its loaded plug-ins. A property raises ConfigError if its plug-in cannot be loaded in this
    process.

    Args:
        stored_weights: the weights of the rewards, as stored with the run; unset: the weights of the env and the config.
        resources: texts that replace the env's system prompt and the descriptions of tools.
    """

    config: RunConfig
    stored_weights: Mapping[str, float] | None = None
    resources: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, config: Mapping[str, Any], weights: Mapping[str, float] | None = None) -> Self:
        """Return the experiment of a stored run. Configs of older formats are accepted."""
        algorithm = dict(config.get("algorithm", {}))
        if algorithm.get("aggregation") == "seq-mean-token-sum-norm-trl":  # of format 2
            algorithm["aggregation"] = "seq-mean-token-sum-norm"
        stored = {**config, **({"algorithm": algorithm} if algorithm else {})}
        return cls(RunConfig.model_validate(stored, context={"stored": True}), weights)

    def reading(self, resources: Mapping[str, str]) -> "Experiment":
        """Return the experiment with these texts. If the run has an agent, the experiment is unchanged, because the agent
        receives the texts itself.
        """
        return self if self.config.agent is not None or not resources else replace(self, resources=resources)

    @cached_property
    def env(self) -> Env:
        """The env that the agent acts in; a plain `Env` if the config names none."""
        env: Env = find("envs", self.config.env) if self.config.env is not None else Env()
        if SYSTEM_PROMPT not in self.resources:
            return env
        env = copy(env)  # its class may have an `__init__` of its own, so that `replace` would fail
        object.__setattr__(env, "system_prompt", self.resources[SYSTEM_PROMPT])
        return env

    @cached_property
    def tools(self) -> Mapping[str, Tool]:
        """The tools that the model may call, by the name that the model writes; empty if the run has an agent."""
        if self.config.agent is not None:
            return {}
        texts = {name.removeprefix(TOOL): text for name, text in self.resources.items() if name.startswith(TOOL)}
        tools = offered_tools(self.env, self.config)
        return {name: tool.described(texts[name]) if name in texts else tool for name, tool in tools.items()}

    @cached_property
    def agent(self) -> Callable[..., Any] | None:
        """The run's Python function or class; None if its agent is a program, runs elsewhere, or is the built-in loop."""
        agent = self.config.agent
        return None if agent is None or agent.command or agent.is_external else find("agents", agent.name)

    @cached_property
    def weights(self) -> Mapping[str, float]:
        """The weight of each reward.

        Without rewards in the config, these are the env's weights. If the config names rewards, the env's other rewards have
        weight 0.
        """
        if self.stored_weights is not None:
            return self.stored_weights
        for name in self.config.rewards:
            find("rewards", name)
        return {**dict.fromkeys(self.env.rewards, 0.0), **self.config.rewards} if self.config.rewards else self.env.rewards

    @cached_property
    def uncounted_rewards(self) -> tuple[str, ...]:
        """The env's rewards that have weight 0 because the config names other rewards."""
        rewards = self.config.rewards
        return tuple(name for name, weight in self.env.rewards.items() if weight and rewards and name not in rewards)

    @cached_property
    def judges(self) -> Mapping[str, Judge]:
        """The rewards that are judges (`rewards.Judge`), by name."""
        return judges_of(self.weights)

    @cached_property
    def engine(self) -> Backend:
        engine: Backend = find("engines", self.config.rollout.engine)
        return engine

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm, which selects the advantages and the loss."""
        return find_gradient(self.config.algorithm.name)

    @cached_property
    def trainer(self) -> TrainerBackend:
        trainer: TrainerBackend = find("trainers", self.config.update.trainer)
        return trainer

    def scoring_hash(self, anew: bool = False) -> str:
        """Return the hash of all code that scores episodes; see `envs.scoring_hash`."""
        return scoring_hash(self.env, self.weights, anew)
