"""`agentrl.Trainer` submits and follows a run as the command line does."""

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
EVAL_EVERY = 10
"""How often a run measures itself on a val_dataset where nothing else is said."""
STRATEGIES = ("threads", "processes", "cluster")
GOES_ON = ("paused", "failed")
PLAIN = "plain"
"""The env of rows that come with rewards of their own."""


class Trainer:
    """A trainer of a policy: `agentrl submit` from Python.

    Args:
        algorithm: a name ("grpo", "ppo", ...), an `Algorithm`, or `GRPO(model, tokenizer)`, whose model is saved here and now.
        agent: who decides an episode's turns: a function `solve(task, llm)`, sync or async, a class, its path, or
            "cmd:PROGRAM ..."; None: the built-in loop, which an `Env`, its class, name or path means too: in that env. A
            mapping is the section of the config, `{"timeout_seconds": 3600}`.
        model: a name of the hub, a folder, a model of `agentrl sft`, or RUN@N of the same store.
        env: what the built-in loop acts in, and what rewards it: a name, a path, an `Env`, its class; None: the dataset's own.
        rewards: functions of an episode, their paths, or names, several with their weights as a mapping. They are the run's:
            rows then have the env "plain" where none is named, and what another gives counts only where it is named. Where an
            agent works on rows that have no answer, what it returns is their reward.
        hooks: `Hook` objects, classes or paths.
        store: where its rows are: a data folder, a SQLite file, a URL, a `Store`; None: where the commands' are.
        strategy: "processes": workers of this machine, started where none run; "threads": workers that are threads of this
            process, for as long as `fit` waits: a debugger works, and functions are called as they are; "cluster": those of a
            broker (AGENTRL_BROKER_URL), which are there already.
        n_runners: agents at once, in workers that are started here.
        config: a YAML file, beneath everything else.
        options: any key of the config, by its flag's name (`group_size=8`), as a section (`rollout={"group_size": 8}`) or as
            it is written in full (`**{"rollout.group_size": 8}`).

    Raises:
        ConfigError: there is no such option, or an object is none that workers can have.
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
        """Return a Trainer for a stored run: `fit()` resumes the run if it has stopped, and follows it.

        Args:
            more: `strategy` and `n_runners`, as ever.

        Raises:
            NotFoundError: there is no such run.
        """
        place = store if store is not None or not isinstance(run, Run) else run.store_url
        made = cls(store=place, **more)
        made.run = run if isinstance(run, Run) else made._place.open().run(run)
        made._attached = made.run.name
        return made

    def fit(
        self,
        agent: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        wait: bool = True,
        **options: Unpack[RunOptions],
    ) -> Run:
        """Train to the end, and return the run.

        Ctrl-C pauses the run, which loses nothing: `Trainer.attach(name).fit()` goes on.

        Args:
            agent: as in the Trainer, in whose place it stands; rows here are the train_dataset.
            train_dataset: a name, a file, rows as mappings, a Hugging Face dataset, a DataFrame.
            val_dataset: the same, of tasks that it does not train on; the policy is measured on them.
            wait: False: return once the run is submitted; its workers go on.
            options: as in the Trainer, before which they come.

        Raises:
            AgentRLError: what was asked cannot be trained, and why; or the run has ended otherwise than done.
        """
        if self._is_threaded and not wait:
            said = "wait=False is impossible with threads: they train only while fit waits."
            raise ConfigError(said, 'Leave wait out, or pass strategy="processes".')
        with self._workers():
            if self._attached is not None:
                _refuse_new(agent, train_dataset, val_dataset, options)
                name = self._go_on()
            else:
                agent, train_dataset = _told_apart(agent, train_dataset)
                name = self._submit(self.config(agent, train_dataset, val_dataset, **options))
            self.run = self._place.open().run(name)
            return self._follow(self.run) if wait else self.run

    def _workers(self) -> "AbstractContextManager[None]":
        """The workers, where they are threads of this process; else they are there, or are started by the command."""
        if not self._is_threaded:
            return nullcontext()
        from agentrl.api.threaded_stack import at_work

        return at_work(self._place, self._variables)

    def dev(self, agent: Any = None, train_dataset: Any = None, **options: Unpack[RunOptions]) -> "list[Episode]":
        """Try the agent or the built-in loop in this process: one episode per task, no update, everything printed.

        A debugger works, and functions are called as they are. No row is kept.

        Args:
            agent, train_dataset, options: as in `fit`.

        Returns:
            The episodes, with their rewards.

        Raises:
            AgentRLError: there is no such dataset or model, a reward raised, or there are more tasks than one tries.
        """
        from agentrl.api.dev import try_agent

        agent, train_dataset = _told_apart(agent, train_dataset)
        keys = self._keys | keys_of(options)
        keys |= self._dataset_keys(train_dataset, None)
        agent, env = self._acting(agent)
        env = env if env is not None else keys.get("env")
        rewards = {getattr(each, "__name__", str(each)): (each, weight) for each, weight in _weighed(self._rewards)}
        if env is None:
            env = PLAIN if rewards else _env_of(keys)
        keys = {key: value for key, value in keys.items() if key.partition(".")[0] not in ("agent", "env", "hooks", "rewards")}
        return try_agent(keys, agent, env, rewards, _listed(self._hooks))

    def config(
        self, agent: Any = None, train_dataset: Any = None, val_dataset: Any = None, **options: Unpack[RunOptions]
    ) -> dict[str, Any]:
        """Return the config keys that `fit` submits, with import paths in place of objects.

        Raises:
            ConfigError, DatasetError: as `fit`.
        """
        keys = self._keys | keys_of(options)
        agent, env = self._acting(agent)
        keys |= self._named("algorithm.name", self._algorithm, "algorithm") | self._named("env", env, "env")
        keys |= self._named("agent.name", agent, "solve")
        _refuse_in_sandbox(keys)
        keys |= self._dataset_keys(train_dataset, val_dataset)
        if hooks := [self._path(hook, f"hook_{number}") for number, hook in enumerate(_listed(self._hooks))]:
            keys["hooks"] = [*keys.get("hooks", ()), *hooks]
        weights = {self._path(reward, f"reward_{n}"): weight for n, (reward, weight) in enumerate(_weighed(self._rewards))}
        if "env" not in keys and is_rows(str(keys.get("dataset.name", ""))):
            # what an agent returns is all that can score rows without references
            keys |= {"env": PLAIN} if weights or (agent is not None and _are_unanswered(train_dataset, keys)) else {}
        if weights:
            keys["rewards"] = dict(keys.get("rewards", {})) | weights
        return keys

    def _acting(self, agent: Any) -> tuple[Any, Any]:
        """(agent, env) of what was passed as the agent, which may be an env: then the built-in loop acts in it."""
        agent = agent if agent is not None else self._agent
        if not _is_env(agent):
            return agent, _made(self._env)
        if self._env is not None:
            raise ConfigError("agent= and env= both pass an env.", "Leave one out.")
        return None, _made(agent)

    def _named(self, key: str, value: Any, name: str) -> dict[str, str]:
        return {} if value is None else {key: self._path(value, name)}

    def _path(self, value: Any, name: str) -> str:
        if self._is_threaded:
            return notebook_source.path_here(value, name, self._place.settings)
        return notebook_source.path_of(value, name, self._place.settings, self._is_local)

    def _dataset_keys(self, train: Any, val: Any) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        for section, what, given in (("dataset", "train", train), ("eval", "val", val)):
            if given is None:
                continue
            named = dataset_input.name_of(given, what, self._place.settings)
            keys["dataset.name" if section == "dataset" else "eval.dataset"] = named or self._path(given, f"{what}_dataset")
            if section == "eval":
                keys |= {"eval.every": self._keys.get("eval.every", EVAL_EVERY)}
                keys |= {"eval.split": "train"} if is_file(str(named)) and "eval.split" not in self._keys else {}
        return keys

    def _submit(self, keys: Mapping[str, Any]) -> str:
        with tempfile.TemporaryDirectory(prefix="agentrl-") as folder:
            file = Path(folder) / "run.yaml"
            file.write_text(json.dumps(_nested(keys)), encoding="utf-8")  # which YAML reads
            if self._is_threaded:
                from agentrl.api.threaded_stack import submit_here

                return submit_here(file)
            made = command_process.ask(self._place, "submit", "--config", str(file), "--json", environment=self._variables)
        return str(made["run"])

    def _go_on(self) -> str:
        assert self.run is not None
        name, status = self.run.name, self.run.status
        if status == "cancelled":
            raise StateError(f"{name} was cancelled, and cannot continue.", "Fork an episode of it, or train a run anew.")
        if self._is_threaded and (status in GOES_ON or status == "running"):
            from agentrl.api.threaded_stack import resume_here

            resume_here(name)
        elif status in GOES_ON or status == "running":
            command_process.ask(self._place, "resume", name, "--json", environment=self._variables)
        return name

    def _follow(self, run: Run) -> Run:
        try:
            command_process.follow(self._place, run)
        except KeyboardInterrupt:
            command_process.ask(self._place, "pause", run.name, "--json", quiet=True)
            print(f"{run.name} is paused, and nothing is lost. Continue: {self._attaching(run)}", file=sys.stderr)
            raise
        row = run.row
        if row.status != "done":
            raise StateError(
                f"{run.name} is {row.status}{f': {row.reason}' if row.reason else ''}.",
                f"After fixing that: {self._attaching(run)}",
            )
        return run

    def _attaching(self, run: Run) -> str:
        return f"Trainer.attach({run.name!r}{', strategy=' + repr('threads') if self._is_threaded else ''}).fit()"

    def _strategy_variables(self, n_runners: int | None) -> dict[str, str]:
        broker = self._place.settings.broker_url
        if not self._is_local:
            if not broker:
                raise ConfigError("A cluster needs a broker.", "Set AGENTRL_BROKER_URL to its Redis.")
            if n_runners is not None:
                said = "n_runners has no effect on running workers."
                raise ConfigError(said, "Leave it out, and start workers with: agentrl worker agents --concurrency N")
            return {}
        if n_runners is not None and not (type(n_runners) is int and 1 <= n_runners <= 10_000):
            raise ConfigError(f"n_runners must be an integer from 1 to 10000, not {n_runners!r:.40}.")
        return {} if n_runners is None else {"AGENTRL_AGENTS": str(n_runners)}

    def __repr__(self) -> str:
        return f"<trainer{f' of {self.run.name}' if self.run is not None else ''}>"


def _told_apart(agent: Any, train: Any) -> tuple[Any, Any]:
    """(agent, rows): `fit(rows)` names no agent.

    Raises:
        ConfigError: both are rows.
    """
    if agent is None or isinstance(agent, str | Env) or callable(agent) or is_class_agent(agent):
        return agent, train
    if train is not None:
        raise ConfigError(
            "The first argument is rows, but train_dataset is passed too.", "Write fit(train_dataset=..., val_dataset=...)."
        )
    return None, agent


def _is_env(agent: Any) -> bool:
    """Whether what was passed as an agent is an env, its class, its name or its path."""
    if not isinstance(agent, str):
        return isinstance(agent, Env) or (isinstance(agent, type) and issubclass(agent, Env))
    if ":" not in agent:
        find("envs", agent)  # a function has a path, and a program begins with cmd:
        return True
    if agent.startswith(PROGRAM):
        return False
    try:
        found = find("envs", agent)
    except ConfigError:  # an agent, or nothing: then it is refused where the run is submitted
        return False
    return isinstance(found, Env)


def _made(env: Any) -> Any:
    """The env, made where its class was passed.

    Raises:
        ConfigError: it cannot be made without arguments.
    """
    if not isinstance(env, type):
        return env
    try:
        return env()
    except Exception as error:
        said = f"Cannot create the env {env.__name__!r} without arguments: {type(error).__name__}: {error}."
        raise ConfigError(said, "Pass an instance.") from error


def _are_unanswered(train: Any, keys: Mapping[str, Any]) -> bool:
    """Whether the tasks are rows that were passed, none of which says what is right."""
    return (
        not isinstance(train, str | Path) and train is not None and not dataset_input.has_references(Path(keys["dataset.name"]))
    )


def _env_of(keys: Mapping[str, Any]) -> str:
    """The env of the dataset that the keys name."""
    asked = DatasetConfig()
    split = {"split": keys["dataset.split"]} if "dataset.split" in keys else {}
    return env_of(asked.model_copy(update={"name": str(keys.get("dataset.name", asked.name))} | split))


def _nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return tree


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _weighed(given: Any) -> Iterator[tuple[Any, float]]:
    if isinstance(given, Mapping):
        yield from given.items()
        return
    for reward in _listed(given):
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
