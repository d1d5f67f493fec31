"""Envs: each file here binds tools, rewards and limits into an environment for an agent. See `Env`.

Your own env is an `Env` with other arguments, or a subclass if the env sends other messages than the results of tools. An env
has the three methods of a Gym environment, but keeps no state: the episode is the state. The episode has the task, the messages
and the results, and each method depends only on its argument. So nothing is lost if a process dies, and `agentrl replay
--verify` can call the methods again. A guessing game, in your own file `guess.py`, is selected with `--env guess:guess`:

    import re

    from agentrl.workflow.envs import Env
    from agentrl.workflow.trajectory import Message


    class Guess(Env):
        def reset(self, task):
            return (Message("user", "Guess my number, from 1 to 20. Say nothing but a number."),)

        def step(self, episode):
            said, right = guessed(episode), int(episode.task.reference)
            if said == right:
                return ()  # it is over
            return (Message("user", "higher" if said < right else "lower"),)

        def final_reward(self, episode):
            right = guessed(episode) == int(episode.task.reference)
            return {"guessed": right / len(episode.steps)}


    def guessed(episode):
        return int(re.sub("[^0-9]", "", episode.final_answer) or 0)


    guess = Guess(rewards={"format": 0.1}, correct=("guessed",))

You may cache values that are costly to compute. The key of such a cache must contain everything that the value depends on. If
an outside world cannot be restored to an earlier state, set `resumability="restart"`: an episode whose worker is lost then
starts again.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Literal

from agentrl.workflow.config import RunConfig
from agentrl.workflow.errors import ConfigError, InfraError, RewardError
from agentrl.workflow.mcp import mcp_tool
from agentrl.workflow.plugins import find, hashed_source
from agentrl.workflow.rewards import Part, Value, check_parts, code_hash, numbers, score, spread
from agentrl.workflow.token_chains import as_read
from agentrl.workflow.tools import Tool
from agentrl.workflow.tools.python import CodeTool, keeps_session
from agentrl.workflow.trajectory import Episode, Message, Task


@dataclass(frozen=True)
class Env:
    """The environment of an episode: prompt, tools and rewards.

    Subclass `Env` directly to change `reset`, `step` or `final_reward`. These methods may depend only on their arguments: after
    a crash, and for `replay`, they are called again with the recorded values.

    Args:
        system_prompt: the first message of every episode; empty: no such message.
        tools: the names of the env's tools, or tools that were created for this env (`search_in(folder)`).
        rewards: a mapping from reward name to weight. The scalar reward is the weighted sum.
        correct: the names of the reward parts that decide whether an episode is correct (`agentrl eval`: accuracy, pass@k). An
            episode is correct if all of them have the full value, 1. If empty, the env's parts with the largest weight decide
            (see `stats.evaluation.is_right`). Parts that a run adds never decide. If the parts of hooks cannot be distinguished
            from the env's own, no episode is rated as correct or wrong.
        resumability: what happens after a lost worker: `replay` continues from the record, `restart` starts the episode again.
    """

    system_prompt: str = ""
    tools: tuple[str | Tool, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    correct: tuple[str, ...] = ()
    resumability: Literal["replay", "restart"] = "replay"

    def toolset(self) -> dict[str, Tool]:
        """Return the env's tools by the name that the model writes."""
        return _tools_by_name(tool if isinstance(tool, Tool) else _find_tool(tool) for tool in self.tools)

    def reset(self, task: Task) -> tuple[Message, ...]:
        """Return the messages that open an episode: the env's system prompt, then the task's messages. They are the same for
        all episodes of a group.
        """
        return with_system_prompt(self.system_prompt, task.messages)

    def step(self, episode: Episode) -> tuple[Message, ...]:
        """Return the messages that the model reads after the episode's last turn and the results of its calls.

        An empty tuple ends the episode as `answered`. By default, there is one tool message per result, in the order of the
        calls. So a turn without a call ends the episode, and is the answer.
        """
        last = episode.steps[-1]
        pairs = zip(last.message.tool_calls, last.results or (), strict=True)
        return tuple(Message("tool", result.content, name=call.name) for call, result in pairs)

    def final_reward(self, episode: Episode) -> Mapping[str, Value]:
        """Return the reward parts that the env itself gives to an ended episode, in addition to `rewards`. Each part has weight
        1.

        A part is one number, or, if the steps earn it, a list with one number per step. This method runs in the rollout worker,
        so it must not run model-written code. For such code, name a `rewards.Judge` in `rewards`.
        """
        return {}


def with_system_prompt(system_prompt: str, messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages with the system prompt before them. The prompt and the system messages at the beginning become one
    message, because most chat templates render only the first.
    """
    own = tuple(takewhile(lambda message: message.role == "system", messages))
    texts = [text for text in (system_prompt, *(message.content for message in own)) if text]
    system = (Message("system", "\n\n".join(texts)),) if texts else ()
    return (*system, *messages[len(own) :])


def optional_rewards(env: Env, weights: Mapping[str, float]) -> frozenset[str]:
    """Return the env's rewards that have weight 0 because the user named other rewards. Failures of the returned rewards are
    ignored.
    """
    return frozenset(name for name, weight in env.rewards.items() if weight and not weights.get(name, 1.0))


def score_episode(
    env: Env, episode: Episode, weights: Mapping[str, float], judged: Mapping[str, Value | None] = MappingProxyType({})
) -> dict[str, Part]:
    """Return the named reward parts of a finished episode: those of the rewards (see `rewards.score`), and those of the env
    itself.

    Raises:
        RewardError: a reward or the env raised an exception or returned something other than finite numbers, or a reward and
            the env use the same name.
        InfraError: the system failed.
        SandboxUnavailable: a reward must run code, and this machine has no working sandbox.
    """
    parts = score(episode, weights, judged, optional_rewards(env, weights))
    read, places = as_read(episode)
    source = f"{type(env).__name__}.final_reward"
    try:
        own = {str(name): numbers(value) for name, value in env.final_reward(read).items()}
    except InfraError:
        raise
    except (Exception, SystemExit) as error:
        raise RewardError(f"{source} raised {type(error).__name__}: {error}") from error
    if twice := parts.keys() & own.keys():
        raise RewardError(f"{source} returned a part named {min(twice)!r}, which is also the name of a reward of this env")
    return parts | spread(check_parts(own, len(places), source), places, len(episode.steps))


def scoring_hash(env: Env, weights: Mapping[str, float], anew: bool = False) -> str:
    """Return the hash of all code that scores in this env: the code of the rewards, and the env's file if the env gives rewards
    itself.

    Args:
        anew: see `rewards.code_hash`.
    """
    if not gives_rewards(env):
        return code_hash(weights, anew)
    text = f"{code_hash(weights, anew)}\0{hashed_source(type(env).__module__, anew)}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def correctness_rule(env: Env, config: RunConfig) -> dict[str, Any]:
    """Return the env's rule for `stats.evaluation.is_right`, which a run's manifest stores.

    Hooks of a run may add parts of weight 1, and so may an env that gives rewards itself. A stored part does not say which of
    the two added it. If such a part could have the largest weight, only the env's `correct` can decide whether an episode is
    correct.
    """
    gives = gives_rewards(env)
    if gives and config.hooks and not env.correct and max(env.rewards.values(), default=0.0) <= 1:
        return {"correct": [], "weights": {}, "gives": False}
    return {"correct": list(env.correct), "weights": dict(env.rewards), "gives": gives}


def gives_rewards(env: Env) -> bool:
    """Return True if the env itself gives reward parts, each with weight 1."""
    return type(env).final_reward is not Env.final_reward


def offered_tools(env: Env, config: RunConfig) -> dict[str, Tool]:
    """Return the tools that the model may call in a run, by the name that the model writes: the tools of the env and those of
    the run.

    If the run has `python_session`, this tool replaces the env's `python`. Raise ConfigError if a tool does not exist, two
    tools have the same name, or a name is invalid.
    """
    own = [_find_tool(name) for name in config.tools if not mcp_tool.is_server(name)]
    session_names = {tool.name for tool in own if keeps_session(tool)}
    # The same tool that keeps a session is another way to offer it, and no second one.
    mine = (tool for tool in env.toolset().values() if tool.name not in session_names or not isinstance(tool, CodeTool))
    served = (mcp_tool.McpTool.of(tool) for tool in config.served_tools if tool.server in config.tools)
    return _tools_by_name((*mine, *own, *served))


def _find_tool(name: str) -> Tool:
    if mcp_tool.is_server(name):
        raise ConfigError(f"An env cannot contain {name!r}: list MCP servers in the run's tools.", f"--tools '{name}'")
    tool: Tool = find("tools", name)
    return tool


def _tools_by_name(tools: Iterator[Tool] | Sequence[Tool]) -> dict[str, Tool]:
    by_name: dict[str, Tool] = {}
    for tool in tools:
        tool.check_name()
        if by_name.setdefault(tool.name, tool) is not tool:
            raise ConfigError(f"Two tools have the same name {tool.name!r}.", "Leave one out.")
    return by_name
