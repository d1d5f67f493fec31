"""A training loop in this process: `RolloutWorker` samples episodes with an open policy, and `GRPOTrainer` trains the policy on
them.

  with agentrl.open_policy("tiny", max_new_tokens=32) as policy:
      worker, trainer = agentrl.RolloutWorker(policy, "arithmetic"), agentrl.GRPOTrainer(policy)
      for _ in range(10):
          trainer.update(worker.run_episodes(tasks, group_size=8))
      trainer.save("better")

The policy, template, tools, rewards and update are the same as in a run. There is no database, so an interrupted loop cannot be
resumed.
"""

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from weakref import finalize

from agentrl.api.algorithms import GRPO, keys_of_algorithm
from agentrl.api.options import keys_of
from agentrl.workers.stack.process import base_hashes
from agentrl.workflow import checkpoints, emitters, trainers
from agentrl.workflow.agent import CallTools, Finish, Generate, next_action, refusal
from agentrl.workflow.algorithms import resolve_run
from agentrl.workflow.annotations import Annotation
from agentrl.workflow.chat.templates import resolve_chat
from agentrl.workflow.config import build
from agentrl.workflow.datasets.jsonl import read_rows
from agentrl.workflow.envs import Env, score_episode
from agentrl.workflow.errors import ConfigError, DatasetError, RewardError, StateError
from agentrl.workflow.inference.open_policy import OpenPolicy
from agentrl.workflow.models.lookup import refuse_existing
from agentrl.workflow.plugins import find
from agentrl.workflow.rewards import Part, Reward, assign_rewards, numbers, part_of
from agentrl.workflow.settings import settings
from agentrl.workflow.tools.python import Notebook
from agentrl.workflow.training.merging import merge
from agentrl.workflow.trajectory import Episode, Group, PolicyRef, Step, Task, ToolCall, ToolResult

MAX_CONCURRENT_EPISODES = 64


class RolloutWorker:
    """A worker that samples episodes with an open policy: turns, tool calls and rewards.

    Args:
        policy: an open policy. The worker does not close it.
        env: the env of the episodes: an `Env`, or its name or path.
        rewards: functions of an episode, by name. They are added to the env's rewards, each with weight 1.
        limits: options of the config's section `rollout` that override the policy's: `max_steps`, `temperature` and others.

    Raises:
        ConfigError: the env or an option does not exist.
    """

    def __init__(
        self, policy: OpenPolicy, env: "Env | str" = "math", rewards: Mapping[str, Reward] | None = None, **limits: Any
    ) -> None:
        self.policy = policy
        self.env: Env = env if isinstance(env, Env) else find("envs", env)
        self.limits = policy.within(**limits) if limits else policy.limits
        self._rewards = dict(rewards or {})
        self._tools = self.env.toolset()
        self._numbers = count(1)

    def run_episode(self, task: "Task | Mapping[str, Any] | str") -> Episode:
        """Sample and score one complete episode. Each call draws new samples.

        If the task has no reference, only the functions in `rewards` score the episode.

        Args:
            task: a Task, a row with `question` and `answer`, or a question.

        Raises:
            RewardError: a reward raised an exception, or did not return a number.
            ModelError, ConfigError: the policy cannot sample the episode.
        """
        return self._score(self.sample_episode(task_of(task), next(self._numbers)))

    def run_episodes(self, tasks: "Iterable[Task | Mapping[str, Any] | str]", group_size: int = 1) -> list[Episode]:
        """Sample and score `group_size` episodes of each task, and return them in the order of the tasks.

        At most `AT_ONCE` episodes run concurrently.

        Raises:
            RewardError, ModelError, ConfigError: as in `run_episode`.
        """
        numbered = [(task, next(self._numbers)) for task in map(task_of, tasks) for _ in range(group_size)]
        with ThreadPoolExecutor(max(1, min(len(numbered), MAX_CONCURRENT_EPISODES))) as pool:
            return list(pool.map(lambda pair: self._score(self.sample_episode(*pair)), numbered))

    def sample_episode(self, task: Task, number: int) -> Episode:
        """Sample one complete episode without scoring it. Each `number` has its own random draws.

        Raises:
            ModelError, ConfigError: the policy cannot sample the episode.
        """
        notebook = Notebook()
        tools = list(self._tools.values())
        episode = Episode(task, sample=number, id=number, status="running", limits=self.limits)
        limits = {name: value for name, value in self.limits.model_dump().items() if name != "engine"}
        try:
            while True:
                match next_action(episode, self.env, self.limits):
                    case Generate(messages):
                        episode = episode.with_step(self.policy.generate(messages, tools, episode.steps, number, **limits))
                    case CallTools(step):
                        results = tuple(
                            self._call(notebook, step, index, call) for index, call in enumerate(step.message.tool_calls)
                        )
                        emitted = [
                            replace(annotation, step=step.index) for result in results for annotation in result.annotations
                        ]
                        episode = replace(episode, annotations=(*episode.annotations, *emitted))
                        episode = episode.with_step(replace(step, results=results))
                    case Finish(reason):
                        return replace(episode, stop_reason=reason, status="done")
        finally:
            notebook.close()

    def _call(self, notebook: Notebook, step: Step, index: int, call: ToolCall) -> ToolResult:
        refused = refusal(call, index, self._tools, self.limits)
        if refused is not None:
            return refused
        annotations: list[Annotation] = []
        with emitters.collected(annotations, "tool", f"call:{step.index}:{index}"):
            result = notebook.call(self._tools[call.name], call.arguments)
        return replace(result, annotations=tuple(annotations))

    def _score(self, episode: Episode) -> Episode:
        if not episode.task.reference and not self._rewards:
            return episode  # nothing tells a right answer
        parts = score_episode(self.env, episode, self.env.rewards)
        return assign_rewards(episode, parts | reward_parts(self._rewards, episode), self.env.rewards)


def reward_parts(rewards: Mapping[str, Reward], episode: Episode) -> dict[str, Part]:
    """Return the value of each reward function for the episode, by name.

    Raises:
        RewardError: a reward raised an exception, or did not return a number.
    """
    parts = {}
    for name, reward in rewards.items():
        try:
            value = reward(episode)
        except Exception as error:
            raise RewardError(f"reward {name!r} raised {type(error).__name__}: {error}") from error
        parts[name] = part_of(numbers(value), len(episode.steps), name)
    return parts


class GRPOTrainer:
    """A trainer of an open policy.

    Args:
        policy: an open policy, which each update changes.
        algorithm: the name of an algorithm, as in a run's config, or a `GRPO(...)` object. Options of the
            model in this object must equal those of the open policy.
        options: options as in a run: `learning_rate`, `kl_coef`. Options of the model are set when the policy is opened.

    Raises:
        ConfigError: the algorithm or an option does not exist.
    """

    def __init__(self, policy: OpenPolicy, algorithm: "str | GRPO | type[GRPO]" = "grpo", **options: Any) -> None:
        keys = keys_of_algorithm(algorithm, settings().models_dir) | keys_of(options)
        limits = {f"rollout.{name}": value for name, value in policy.limits.model_dump().items()}
        model = policy.policy.config
        config = build(limits | {f"model.{name}": value for name, value in model.model_dump().items()} | keys)
        resolved = resolve_chat(config.model, policy.policy.folder).model_dump()
        for key in keys:
            section, _, name = key.partition(".")
            if section == "model" and resolved[name] != getattr(model, name):
                how = f"Set it when the model is opened: GRPO(MODEL, {name}=...).open()"
                raise ConfigError(f"{key} cannot change: the model is already open.", how)
        self._config = resolve_run(config)
        trainers.check(self._config)
        self._policy = policy
        self._trainer = trainers.start(find("trainers", self._config.update.trainer), policy.policy, self._config, 0)
        self._folder = Path(tempfile.mkdtemp(prefix="agentrl-"))
        finalize(policy, shutil.rmtree, self._folder, ignore_errors=True)  # the policy samples from the checkpoints in it
        start = policy.ref
        if start.path:
            checkpoints.read(start.path, start.sha256, "start", partial(self._trainer.load, fresh=True))
        else:
            self._trainer.load(None)
        self._updates = 0

    def update(self, episodes: Iterable[Episode]) -> dict[str, Any]:
        """Update the policy on the episodes. Episodes of the same task form a group.

        Returns:
            The metrics (`loss`, `reward`, `grad_norm`, `kl` and others). If the policy was not changed, `skipped` is the
                reason.

        Raises:
            StateError: a value of the update was not finite. The policy is unchanged; create a new trainer.
            RewardError: an episode's reward is not a finite number.
        """
        groups = grouped(episodes)
        done = self._trainer.update(groups, self._updates)
        if done.bad:
            raise StateError(f"The update was undone: {done.skipped}.", "Create a new trainer with a lower learning rate.")
        rewards = [episode.reward for group in groups for episode in group.episodes if episode.reward is not None]
        metrics: dict[str, Any] = {"reward": sum(rewards) / max(1, len(rewards)), **done.metrics}
        if done.skipped:
            return metrics | {"skipped": done.skipped}
        self._updates += 1
        before, path = self._policy.ref, str(self._folder / f"v{self._updates}")
        sha256 = checkpoints.write(path, self._trainer.save)
        self._policy.ref = PolicyRef(before.base, before.base_hash, path, sha256, before.version + 1)
        return metrics

    def save(self, folder: str | Path, overwrite: bool = False) -> Path:
        """Save the current policy as a model folder for `open_policy` and `agentrl chat`.

        Raises:
            ConflictError: the folder exists, and `overwrite` is False or agentrl did not write the folder.
            ModelError, CheckpointError: the policy cannot be saved; the message says why.
        """
        target, here = Path(folder).expanduser(), settings()
        refuse_existing(target, overwrite, "Pass overwrite=True")
        merge(self._policy.ref, self._policy.policy.config, base_hashes(self._policy.policy), target, here.device, here.threads)
        return target


def grouped(episodes: Iterable[Episode]) -> list[Group]:
    """Return the episodes grouped by task. The groups are in the order in which their tasks first occur."""
    by_task: dict[str, list[Episode]] = {}
    for episode in episodes:
        by_task.setdefault(episode.task.key, []).append(episode)
    return [Group(members[0].task, tuple(members), slot) for slot, members in enumerate(by_task.values())]


def task_of(value: "Task | Mapping[str, Any] | str") -> Task:
    """Convert a row or a question to a task. Equal rows give equal tasks.

    Raises:
        DatasetError: the row cannot be converted to a task.
    """
    if isinstance(value, Task):
        return value
    row: dict[str, Any] = {"question": value} if isinstance(value, str) else dict(value)
    if not row.keys() & {"answer", "reference"}:
        row["reference"] = None
    line = json.dumps(row, ensure_ascii=False, sort_keys=True)
    rows, problems = read_rows([line.encode()])
    if problems:
        raise DatasetError(
            f"{line[:200]} is not a valid task: {problems[0].partition(': ')[2]}.", 'Write {"question": ..., "answer": ...}.'
        )
    task = Task("", rows[0].messages, rows[0].reference, rows[0].metadata)
    return replace(task, key=f"given/{task.content_hash[:16]}")
