"""`Trainer.dev`: runs episodes of an agent in this process, one after another, and prints them. A debugger can stop in the
agent.
"""

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import isawaitable
from itertools import count
from types import TracebackType
from typing import Any

from agentrl.api.loop import RolloutWorker, reward_parts
from agentrl.api.threaded_stack import changed_environment, endpoint_thread
from agentrl.workers.jobs import sampling_server
from agentrl.workers.jobs.sampling_server import SamplingServer
from agentrl.workers.jobs.served_episodes import ServedEpisodes
from agentrl.workers.requests.serve_request import serve_config, serve_submission
from agentrl.workers.serving.policy_server import open_run, unrecorded_database
from agentrl.workers.stack.listening import LOOPBACK
from agentrl.workers.stack.process import base_hashes, claim_name
from agentrl.workflow.agents import LLM, AgentResult, AgentTask, read_result
from agentrl.workflow.agents.classes import as_function
from agentrl.workflow.analysis.transcript import conversation_lines, said_lines
from agentrl.workflow.annotations import rewards_of
from agentrl.workflow.config import PROGRAM, RunConfig, build
from agentrl.workflow.datasets import load_tasks
from agentrl.workflow.emitters import EMIT_KEY, EMIT_URL
from agentrl.workflow.envs import Env, gives_rewards, score_episode
from agentrl.workflow.errors import ConfigError, RewardError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.hooks import Hook, parts_told
from agentrl.workflow.inference.open_policy import OpenPolicy, open_policy
from agentrl.workflow.plugins import find
from agentrl.workflow.resources import Prompt
from agentrl.workflow.rewards import Part, Reward, assign_rewards, numbers, part_of, part_sum
from agentrl.workflow.runtime.once_per_process import Once
from agentrl.workflow.runtime.shown_text import cell, clean
from agentrl.workflow.store import train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import episode_rows
from agentrl.workflow.trajectory import Episode, Task

MAX_TASKS = 100
"""The most tasks of one call of `Trainer.dev`."""
HERE = "agentrl.api.dev:agent"
"""The placeholder for the agent's name in the config. It is never imported, because this process calls the agent object
directly.
"""
_databases: list[Database] = []


@dataclass
class Trial:
    """A trial of an agent or of the built-in loop, with its tasks, rewards and hooks.

    Args:
        config: the config, with the model, the sampling options and the dataset.
        agent: a function, a class, or an instance of a class; None: the built-in loop.
        env: the env of the built-in loop, and the source of its rewards.
        rewards: functions with their weights, by name.
        hooks: the hooks that run around each episode.
    """

    config: RunConfig
    agent: Any
    env: Env
    rewards: Mapping[str, tuple[Reward, float]]
    hooks: Sequence[Hook] = ()

    def run(self) -> list[Episode]:
        """Run and print one episode per task. An agent's error ends only the episode in which it occurs. Raise AgentRLError if
        the dataset or the model does not exist, there are more than `MAX_TASKS` tasks, or a reward raised an exception.
        """
        tasks = load_tasks(self.config.dataset).tasks
        if len(tasks) > MAX_TASKS:
            raise ConfigError(f"dev runs at most {MAX_TASKS} tasks, not {len(tasks)}.", "Pass rows[:3], or max_tasks=3.")
        with ExitStack() as stack:
            policy = stack.enter_context(open_policy(self.config, seed=self.config.seed))
            play = self._loop(policy) if self.agent is None else stack.enter_context(self._agent_player(policy))
            return [self._play(play, task, number, len(tasks)) for number, task in enumerate(tasks, 1)]

    def _play(self, play: Callable[[Task], Episode], task: Task, number: int, count: int) -> Episode:
        _print(f"=== task {number} of {count}: {task.key}")
        episode = play(task)
        for text, _ in (*conversation_lines(episode.steps, self.agent is not None), *said_lines(episode.annotations)):
            _print(text)
        for hook in self.hooks:
            parts = {name: part_sum(numbers(value)) for name, value in parts_told(hook, episode).items()}
            if parts:
                reward = (episode.reward or 0.0) + sum(parts.values())
                episode = replace(episode, rewards={**episode.rewards, **parts}, reward=reward)
        parts_text = ", ".join(f"{name} {cell(value)}" for name, value in episode.rewards.items())
        _print(f"{episode.stop_reason}: reward {cell(episode.reward)}{f' ({parts_text})' if parts_text else ''}\n")
        return episode

    def _loop(self, policy: OpenPolicy) -> Callable[[Task], Episode]:
        worker, numbers = RolloutWorker(policy, self.env), count(1)

        def play(task: Task) -> Episode:
            episode = worker.sample_episode(task, next(numbers))
            return self._score(episode, AgentResult()) if task.reference or self.rewards else episode

        return play

    @contextmanager
    def _agent_player(self, policy: OpenPolicy) -> Iterator[Callable[[Task], Episode]]:
        served = serve_config(self.config, None, self.config.rollout.model_dump())
        values = {**served.flat(), "agent.name": HERE, "agent.own_rewards": True, "model": policy.policy.config.model_dump()}
        config = build({key: value for key, value in values.items() if not key.startswith("model.")})
        with unrecorded_database() as db, _sampling_server(db) as server:
            run = open_run(db, serve_submission(db, config, policy.ref, "", None), claim_name())
            train_commits.confirm_base(db, run.id, policy.policy.base_hash, base_hashes(policy.policy))
            episodes = ServedEpisodes(db, run, Experiment(config), policy, server)
            episodes.start()
            try:
                with endpoint_thread(db) as url:
                    yield partial(self._act, db, episodes, f"{url}/v1", run.name)
            finally:
                episodes.close()

    def _act(self, db: Database, episodes: ServedEpisodes, url: str, model: str, task: Task) -> Episode:
        opened = episodes.open(task.key).result()
        llm = LLM(url, opened.key, model)
        for hook in self.hooks:
            hook.on_rollout_start(Episode(task, id=opened.id))
        result, failed = AgentResult(), False
        with changed_environment(_agent_variables(llm, opened.emit_key)):
            try:
                agent_task = _agent_task(task, self.config.resources)
                result = read_result(_call(as_function(self.agent), agent_task, llm))
            except Exception as error:  # noqa: BLE001 - the user's agent, whose error is printed
                _print("".join(traceback.format_exception(error.with_traceback(_from_agent(error)))))
                failed = True
        episodes.end(opened.id, result.answer, result.rewards).result()
        episode = episode_rows.find_episode(db, opened.id).episode
        episode = replace(episode, task=task, stop_reason="agent_error" if failed else episode.stop_reason)
        if not episode.steps:
            _print("The agent did not call the model. Pass llm.base_url, llm.api_key and llm.model to its client.")
        return self._score(episode, result)

    def _score(self, episode: Episode, result: AgentResult) -> Episode:
        """Score the episode with the rewards that a run would use, except those of hooks."""
        parts: dict[str, Part] = {}
        if episode.task.reference or not self.env.rewards:
            parts = score_episode(self.env, episode, self.env.rewards)
        weights = dict.fromkeys(self.env.rewards, 0.0) if self.rewards else dict(self.env.rewards)
        parts |= reward_parts({name: reward for name, (reward, _) in self.rewards.items()}, episode)
        weights |= {name: weight for name, (_, weight) in self.rewards.items()}
        rewarded = bool(weights) or gives_rewards(self.env)
        returned = {**rewards_of(episode.annotations, len(episode.steps)), **(result.rewards or {})}
        for name, value in returned.items():
            if name in parts:
                raise RewardError(f"The agent returned a reward called {name!r}, which is the name of a reward of the run.")
            parts[name], weights[name] = part_of(numbers(value), len(episode.steps), name), 0.0 if rewarded else 1.0
        return assign_rewards(episode, parts, weights)


def try_agent(
    config: Mapping[str, Any], agent: Any, env: Any, rewards: Mapping[str, tuple[Any, float]], hooks: Sequence[Any]
) -> list[Episode]:
    """Run a trial for `Trainer.dev`. Raise AgentRLError as in `Trial.run`; also if the agent is a program, or a path cannot be
    imported.

    Args:
        config: config keys with their values.
        agent, env: an object or its import path.
        rewards: an object or its import path, and a weight, by name.
        hooks: objects, classes or import paths.
    """
    if isinstance(agent, str) and agent.startswith(PROGRAM):
        hint = "To try a program: agentrl submit --iterations 1 --agent 'cmd:PROGRAM'"
        raise ConfigError("`dev` runs only Python functions, not programs.", hint)
    agent, env = _object("agents", agent), _object("envs", env)
    rewards = {name: (_object("rewards", reward), weight) for name, (reward, weight) in rewards.items()}
    hooks = [hook() if isinstance(hook, type) else hook for hook in (_object("hooks", hook) for hook in hooks)]
    return Trial(build(config), agent, env, rewards, hooks).run()


def _object(kind: str, value: Any) -> Any:
    return find(kind, value) if isinstance(value, str) else value


def _from_agent(error: BaseException) -> TracebackType | None:
    """Return the traceback of the error without the frames of this module, which called the agent."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _call(solve: Callable[..., Any], task: AgentTask, llm: LLM) -> Any:
    value = solve(task, llm)
    if not isawaitable(value):
        return value
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_awaited(value))
    with ThreadPoolExecutor(1) as pool:  # the event loop of a notebook runs in this thread
        return pool.submit(asyncio.run, _awaited(value)).result()


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _agent_task(task: Task, texts: Mapping[str, str]) -> AgentTask:
    messages = [{"role": message.role, "content": message.content} for message in task.messages]
    return AgentTask(task.key, messages, dict(task.metadata), None, True, {name: Prompt(text) for name, text in texts.items()})


def _agent_variables(llm: LLM, emit_key: str) -> dict[str, str]:
    return llm.variables | {EMIT_URL: f"{llm.base_url}/annotations", EMIT_KEY: emit_key}


@Once
def _shared_server() -> SamplingServer:
    """Return the sampling server of this process, which serves the newest database."""
    return sampling_server.start(lambda: _databases[-1], LOOPBACK)


@contextmanager
def _sampling_server(db: Database) -> Iterator[SamplingServer]:
    _databases.append(db)
    try:
        yield _shared_server()
    finally:
        _databases.remove(db)


def _print(text: str) -> None:
    print(clean(text), flush=True)
