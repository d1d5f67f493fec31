"""`agentrl.Trainer`: submits a run in the same way as `agentrl submit`, and follows the run."""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from agentrl.api import command_process, dataset_input, notebook_source
from agentrl.api.algorithms import GRPO, keys_of_algorithm
from agentrl.api.options import keys_of, keys_of_file
from agentrl.api.run import Run
from agentrl.api.run_options import RunOptions
from agentrl.api.store import InMemoryStore, Store, StoreLocation
from agentrl.workflow.agents.classes import is_class_agent
from agentrl.workflow.algorithms import Algorithm
from agentrl.workflow.config import PROGRAM, DatasetConfig
from agentrl.workflow.datasets import env_of, is_file, is_rows
from agentrl.workflow.envs import Env
from agentrl.workflow.errors import ConfigError, StateError
from agentrl.workflow.plugins import CODE_PREFIX, find

if TYPE_CHECKING:
    from agentrl.workflow.trajectory import Episode

Strategy = Literal["threads", "processes", "cluster"]
STRATEGIES = ("threads", "processes", "cluster")
DEFAULT_EVAL_EVERY = 10
"""The number of iterations between two evaluations on a `val_dataset`."""
RESUMABLE = ("paused", "failed", "running")
PLAIN = "plain"
"""The env for rows that are scored only by the caller's rewards. It has no tools and no rewards."""


class Trainer:
    """A trainer of a policy: `agentrl submit` from Python.

    Args:
        algorithm: a name ("grpo", "ppo" and others), an `Algorithm`, or `GRPO(model, tokenizer)`, whose model is saved at once.
        agent: the agent to train: a function `solve(task, llm)`, sync or async, a class, its path, or "cmd:PROGRAM ...". None:
            the built-in loop. An `Env`, its class, name or path means the built-in loop in that env. A mapping sets keys of the
            config's section `agent`: `{"timeout_seconds": 3600}`.
        model: a name on the hub, a folder, a model of `agentrl sft`, or RUN@N of the same store.
        env: the env of the built-in loop, and the source of its rewards: a name, a path, an `Env` or its class. None: the env
            of the dataset.
        rewards: functions of an episode, their paths or names; a mapping gives weights. With `rewards`, the env's own rewards
            are recorded with weight 0, and rows without an env have the env "plain". Without any reward, the value that an
            agent returns is the reward of rows that have no reference answer.
        hooks: `Hook` objects, classes or paths.
        store: the store of the run: a data folder, a SQLite file, a URL, or a `Store`. None: the store that the commands use.
        strategy: where the workers run. "processes": processes of this machine, which are started if none run. "threads":
            threads of this process while `fit` waits; functions are called directly, and a debugger works. "cluster": running
            workers of a broker (AGENTRL_BROKER_URL).
        n_runners: the number of concurrent agents in workers that this Trainer starts.
        config: a YAML file. All other arguments override it.
        options: any key of the config: by its flag's name (`group_size=8`), as a section (`rollout={"group_size": 8}`) or by
            its full name (`**{"rollout.group_size": 8}`).

    Raises:
        ConfigError: an option does not exist, or workers cannot import an object.
    """

    def __init__(
        self,
        algorithm: "str | Algorithm | GRPO | type[GRPO] | None" = None,
        *,
        agent: Any = None,
        model: str | Path | None = None,
        env: "str | Env | type[Env] | None" = None,
        rewards: Any = (),
        hooks: Sequence[Any] = (),
        store: "str | Path | Store | InMemoryStore | None" = None,
        strategy: Strategy = "processes",
        n_runners: int | None = None,
        config: str | Path | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        if strategy not in STRATEGIES:
            raise ConfigError(
                f"Unknown strategy {strategy!r:.40}.", 'Pass "threads", "processes", or "cluster" for workers elsewhere.'
            )
        self._place = StoreLocation.of(store)
        self._is_local, self._is_threaded = strategy != "cluster", strategy == "threads"
        self._variables = self._strategy_variables(n_runners)
        self._agent, self._algorithm, self._env = agent, algorithm, env
        self._hooks, self._rewards = hooks, rewards
        self._keys = keys_of_file(config)
        if isinstance(algorithm, GRPO) or (isinstance(algorithm, type) and issubclass(algorithm, GRPO)):
            self._keys |= keys_of_algorithm(algorithm, self._place.settings.models_dir)
            self._algorithm = None
        self._keys |= keys_of(options)
        if isinstance(agent, Mapping):
            self._keys, self._agent = self._keys | keys_of({"agent": agent}), None
        if model is not None:
            self._keys["model.path"] = str(model)
        self._attached: str | None = None
        self.run: Run | None = None

    @classmethod
    def attach(cls, run: "str | int | Run", store: "str | Path | Store | InMemoryStore | None" = None, **more: Any) -> Self:
        """Return a Trainer for a stored run. Its `fit()` follows the run, and first resumes the run if it has stopped.

        Args:
            more: `strategy` and `n_runners`, as in the Trainer.

        Raises:
            NotFoundError: no run has this name.
        """
        place = store if store is not None or not isinstance(run, Run) else run.store_url
        trainer = cls(store=place, **more)
        trainer.run = run if isinstance(run, Run) else trainer._place.open().run(run)
        trainer._attached = trainer.run.name
        return trainer

    def fit(
        self,
        agent: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        wait: bool = True,
        **options: Unpack[RunOptions],
    ) -> Run:
        """Train until the run ends, and return the run.

        Ctrl-C pauses the run without loss: `Trainer.attach(name).fit()` continues it.

        Args:
            agent: an agent that overrides the Trainer's. If rows are passed here, they are the `train_dataset`.
            train_dataset: a name, a file, rows as mappings, a Hugging Face dataset or a DataFrame.
            val_dataset: the held-out tasks, as the same types. The policy is never trained on them, only evaluated.
            wait: False: return when the run is submitted. Its workers continue.
            options: options that override the Trainer's.

        Raises:
            AgentRLError: the run cannot be trained, or it stopped before its end. The message says why.
        """
        if self._is_threaded and not wait:
            message = "wait=False is impossible with threads: they train only while fit waits."
            raise ConfigError(message, 'Leave wait out, or pass strategy="processes".')
        with self._workers():
            if self._attached is not None:
                _refuse_new(agent, train_dataset, val_dataset, options)
                name = self._resume()
            else:
                agent, train_dataset = _agent_and_rows(agent, train_dataset)
                name = self._submit(self.config(agent, train_dataset, val_dataset, **options))
            self.run = self._place.open().run(name)
            return self._follow(self.run) if wait else self.run

    def _workers(self) -> "AbstractContextManager[None]":
        """Run the workers in threads of this process if the strategy is "threads"."""
        if not self._is_threaded:
            return nullcontext()
        from agentrl.api.threaded_stack import at_work

        return at_work(self._place, self._variables)

    def dev(self, agent: Any = None, train_dataset: Any = None, **options: Unpack[RunOptions]) -> "list[Episode]":
        """Try the agent or the built-in loop in this process: run one episode per task, print it, and update no policy.

        A debugger works, because functions are called directly. The database rows of these episodes are deleted afterwards.

        Args:
            agent, train_dataset, options: as in `fit`.

        Returns:
            The episodes, with their rewards.

        Raises:
            AgentRLError: the dataset or the model does not exist, a reward raised an exception, or there are too many tasks.
        """
        from agentrl.api.dev import try_agent

        agent, train_dataset = _agent_and_rows(agent, train_dataset)
        keys = self._keys | keys_of(options)
        keys |= self._dataset_keys(train_dataset, None)
        agent, env = self._agent_and_env(agent)
        env = env if env is not None else keys.get("env")
        rewards = {getattr(reward, "__name__", str(reward)): (reward, weight) for reward, weight in _weighed(self._rewards)}
        if env is None:
            env = PLAIN if rewards else _env_of(keys)
        keys = {key: value for key, value in keys.items() if key.partition(".")[0] not in ("agent", "env", "hooks", "rewards")}
        return try_agent(keys, agent, env, rewards, _listed(self._hooks))

    def config(
        self, agent: Any = None, train_dataset: Any = None, val_dataset: Any = None, **options: Unpack[RunOptions]
    ) -> dict[str, Any]:
        """Return the config keys that `fit` submits. Objects are replaced by their import paths.

        Raises:
            ConfigError, DatasetError: as in `fit`.
        """
        keys = self._keys | keys_of(options)
        agent, env = self._agent_and_env(agent)
        keys |= self._named("algorithm.name", self._algorithm, "algorithm") | self._named("env", env, "env")
        keys |= self._named("agent.name", agent, "solve")
        _refuse_in_sandbox(keys)
        keys |= self._dataset_keys(train_dataset, val_dataset)
        if hooks := [self._path(hook, f"hook_{number}") for number, hook in enumerate(_listed(self._hooks))]:
            keys["hooks"] = [*keys.get("hooks", ()), *hooks]
        weights = {self._path(reward, f"reward_{n}"): weight for n, (reward, weight) in enumerate(_weighed(self._rewards))}
        if "env" not in keys and is_rows(str(keys.get("dataset.name", ""))):
            # rows without references can only be scored by what an agent returns
            keys |= {"env": PLAIN} if weights or (agent is not None and _are_unanswered(train_dataset, keys)) else {}
        if weights:
            keys["rewards"] = dict(keys.get("rewards", {})) | weights
        return keys

    def _agent_and_env(self, agent: Any) -> tuple[Any, Any]:
        """Return (agent, env). If the agent is an env, the agent becomes None, which means the built-in loop in that env."""
        agent = agent if agent is not None else self._agent
        if not _is_env(agent):
            return agent, _env_object(self._env)
        if self._env is not None:
            raise ConfigError("agent= and env= both pass an env.", "Leave one out.")
        return None, _env_object(agent)

    def _named(self, key: str, value: Any, name: str) -> dict[str, str]:
        return {} if value is None else {key: self._path(value, name)}

    def _path(self, value: Any, name: str) -> str:
        if self._is_threaded:
            return notebook_source.path_here(value, name, self._place.settings)
        return notebook_source.path_of(value, name, self._place.settings, self._is_local)

    def _dataset_keys(self, train: Any, val: Any) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        if train is not None:
            keys["dataset.name"] = self._dataset_name(train, "train")
        if val is not None:
            name = keys["eval.dataset"] = self._dataset_name(val, "val")
            keys["eval.every"] = self._keys.get("eval.every", DEFAULT_EVAL_EVERY)
            if is_file(name) and "eval.split" not in self._keys:
                keys["eval.split"] = "train"
        return keys

    def _dataset_name(self, dataset: Any, which: str) -> str:
        written = dataset_input.name_of(dataset, which, self._place.settings)
        return written or self._path(dataset, f"{which}_dataset")

    def _submit(self, keys: Mapping[str, Any]) -> str:
        with tempfile.TemporaryDirectory(prefix="agentrl-") as folder:
            file = Path(folder) / "run.yaml"
            file.write_text(json.dumps(_nested(keys)), encoding="utf-8")  # which YAML reads
            if self._is_threaded:
                from agentrl.api.threaded_stack import submit_here

                return submit_here(file)
            answer = command_process.ask(self._place, "submit", "--config", str(file), "--json", environment=self._variables)
        return str(answer["run"])

    def _resume(self) -> str:
        assert self.run is not None
        name, status = self.run.name, self.run.status
        if status == "cancelled":
            raise StateError(f"{name} was cancelled, and cannot continue.", "Fork one of its episodes, or train a new run.")
        if status in RESUMABLE and self._is_threaded:
            from agentrl.api.threaded_stack import resume_here

            resume_here(name)
        elif status in RESUMABLE:
            command_process.ask(self._place, "resume", name, "--json", environment=self._variables)
        return name

    def _follow(self, run: Run) -> Run:
        try:
            command_process.follow(self._place, run)
        except KeyboardInterrupt:
            command_process.ask(self._place, "pause", run.name, "--json", quiet=True)
            print(f"{run.name} is paused, and nothing is lost. Continue: {self._code_to_attach(run)}", file=sys.stderr)
            raise
        row = run.row
        if row.status != "done":
            raise StateError(
                f"{run.name} is {row.status}{f': {row.reason}' if row.reason else ''}.",
                f"After fixing that: {self._code_to_attach(run)}",
            )
        return run

    def _code_to_attach(self, run: Run) -> str:
        return f"Trainer.attach({run.name!r}{', strategy=' + repr('threads') if self._is_threaded else ''}).fit()"

    def _strategy_variables(self, n_runners: int | None) -> dict[str, str]:
        broker = self._place.settings.broker_url
        if not self._is_local:
            if not broker:
                raise ConfigError("A cluster needs a broker.", "Set AGENTRL_BROKER_URL to its Redis.")
            if n_runners is not None:
                message = "n_runners has no effect on running workers."
                raise ConfigError(message, "Leave it out, and start workers with: agentrl worker agents --concurrency N")
            return {}
        if n_runners is not None and not (type(n_runners) is int and 1 <= n_runners <= 10_000):
            raise ConfigError(f"n_runners must be an integer from 1 to 10000, not {n_runners!r:.40}.")
        return {} if n_runners is None else {"AGENTRL_AGENTS": str(n_runners)}

    def __repr__(self) -> str:
        return f"<trainer{f' of {self.run.name}' if self.run is not None else ''}>"


def _agent_and_rows(agent: Any, train: Any) -> tuple[Any, Any]:
    if agent is None or isinstance(agent, str | Env) or callable(agent) or is_class_agent(agent):
        return agent, train
    if train is not None:
        raise ConfigError(
            "The first argument is rows, but train_dataset is passed too.", "Write fit(train_dataset=..., val_dataset=...)."
        )
    return None, agent


def _is_env(agent: Any) -> bool:
    """Return True if the agent is an env, or the class, name or path of an env."""
    if not isinstance(agent, str):
        return isinstance(agent, Env) or (isinstance(agent, type) and issubclass(agent, Env))
    if ":" not in agent:
        find("envs", agent)  # a function has a path, and a program begins with cmd:
        return True
    if agent.startswith(PROGRAM):
        return False
    try:
        value = find("envs", agent)
    except ConfigError:  # an agent, or nothing: then `agentrl submit` refuses it
        return False
    return isinstance(value, Env)


def _env_object(env: Any) -> Any:
    if not isinstance(env, type):
        return env
    try:
        return env()
    except Exception as error:
        message = f"Cannot create the env {env.__name__!r} without arguments: {type(error).__name__}: {error}."
        raise ConfigError(message, "Pass an instance.") from error


def _are_unanswered(train: Any, keys: Mapping[str, Any]) -> bool:
    """Return True if the tasks were passed as rows and no row has a reference answer."""
    return (
        not isinstance(train, str | Path) and train is not None and not dataset_input.has_references(Path(keys["dataset.name"]))
    )


def _env_of(keys: Mapping[str, Any]) -> str:
    config = DatasetConfig()
    split = {"split": keys["dataset.split"]} if "dataset.split" in keys else {}
    return env_of(config.model_copy(update={"name": str(keys.get("dataset.name", config.name))} | split))


def _nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return tree


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _weighed(rewards: Any) -> Iterator[tuple[Any, float]]:
    if isinstance(rewards, Mapping):
        yield from rewards.items()
        return
    for reward in _listed(rewards):
        yield (reward[0], reward[1]) if isinstance(reward, tuple) and len(reward) == 2 else (reward, 1.0)


def _refuse_in_sandbox(keys: Mapping[str, Any]) -> None:
    if keys.get("agent.sandbox") and str(keys.get("agent.name", "")).startswith(CODE_PREFIX):
        raise ConfigError(
            "A sandboxed agent cannot be a function of a notebook or script: the sandbox hides its source.",
            "Move it to a file, and import it.",
        )


def _refuse_new(agent: Any, train: Any, val: Any, options: Mapping[str, Any]) -> None:
    if agent is not None or train is not None or val is not None or options:
        raise ConfigError(
            "The options of a submitted run cannot change.", "Call fit() without arguments, or make a new Trainer."
        )
