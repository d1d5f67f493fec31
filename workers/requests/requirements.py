"""Whether the processes that will run a run have what it needs: each is asked before anything is written, and looks itself.

What a worker lacks (a module, a setting, a folder) it says in a sentence. Where it merely has another than the command that
asks, another file or value, it says the names: values never travel, only their digests under a key of the question's own.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from secrets import token_hex
from typing import Any

from celery.worker.control import inspect_command

from agentrl import __version__
from agentrl.workers.stack.celery_app import QUEUES, app
from agentrl.workers.stack.process import worker_name
from agentrl.workflow.config import RunConfig
from agentrl.workflow.errors import AgentRLError, ConfigError, ModelError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.hooks import load_hooks
from agentrl.workflow.models.lookup import check_on_hub, local_folder
from agentrl.workflow.plugins import code_of
from agentrl.workflow.rewards import check_rewards
from agentrl.workflow.settings import digest, is_url, settings
from agentrl.workflow.tools import Tool
from agentrl.workflow.training.trl_options import require_trl

COMMAND = "agentrl_fits"
ANSWER_SECONDS = 1.5
"""Whoever serves a queue says so within them."""

LOOK_SECONDS = 30.0
"""How long a worker may look: it imports somebody's code, starts a sandbox, asks a hub."""

REPLY_SECONDS = 0.5
"""How long a worker's reply waits for what it looks for; who asks again hears it then."""

MAX_LOOKS = 8
"""Questions whose answers a worker keeps for who asks again."""

ENGINE = ("AGENTRL_ENGINE_URL", "AGENTRL_ENGINE_KEY")


@dataclass(frozen=True)
class Requirements:
    """What a run needs of its workers, as it travels.

    Args:
        config: the run's.
        weights: reward -> weight.
        base, output_dir: its model and the place of its checkpoints.
        roles: the queues that it needs.
        version: agentrl's, here.
        variables, code: what the command that asks has: digests by variable and by `kind name` of a plug-in.
    """

    config: Mapping[str, Any]
    weights: Mapping[str, float]
    base: str
    output_dir: str
    roles: Sequence[str]
    version: str
    key: str
    variables: Mapping[str, str]
    code: Mapping[str, str]

    @cached_property
    def experiment(self) -> Experiment:
        """The run's, as far as it is to be had here."""
        return Experiment.load(self.config, self.weights)

    @property
    def own(self) -> bool:
        """Whether something of it comes from a module of somebody's own, `module:name`."""
        named = (self.config.get("env"), self.config["rollout"]["engine"], *self.config["tools"], *self.config["hooks"])
        named += (self.config["model"].get("tool_format"),)
        return any(":" in str(name).removeprefix("mcp:") for name in (*named, *self.weights))


@dataclass(frozen=True)
class Fitness:
    """A worker's answer: what it `lacks`, in sentences, and what it has `other` than who asked.

    `found`: it has looked to the end.
    """

    worker: str
    roles: tuple[str, ...]
    found: bool
    lacks: tuple[str, ...] = ()
    other: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The worker as a person finds it."""
        host, _, pid = self.worker.rpartition(":")
        return f"The {' and '.join(self.roles)} worker on {host} (pid {pid})"


def requirements_of(
    config: Mapping[str, Any], weights: Mapping[str, float], base: str, output_dir: str, rolls_out: bool
) -> Requirements:
    """What to ask about a run.

    Args:
        rolls_out: it makes episodes; else it trains on stored ones.
    """
    made, key = Experiment.load(config, weights), token_hex(8)
    roles = QUEUES if rolls_out else ("train",)
    here = {name: digest(key, _variable_value(name)) for name in _list_variables(made) if os.environ.get(name)}
    code = {name: digest(key, source) for name, source in _list_code(made, roles)}
    return Requirements(dict(config), dict(weights), base, output_dir, roles, __version__, key, here, code)


def ask_workers(asked: Requirements, workers: int | None = None) -> list[Fitness]:
    """The answers of all workers that serve a queue of the run. A worker that is still looking is asked again; one that does
    not answer has no entry.

    Args:
        workers: how many there are, where that is known: then nobody waits for more.
    """
    found: dict[str, Fitness] = {}
    deadline = time.monotonic() + LOOK_SECONDS
    while True:
        with app.connection_for_write() as link:  # not one of the pool: a stack that was renewed has another Redis
            asking = {"arguments": {"question": asdict(asked)}, "timeout": ANSWER_SECONDS, "limit": workers}
            replies = app.control.broadcast(COMMAND, reply=True, connection=link, **asking)
        told = (_parse_fitness(answer) for reply in replies or () for answer in reply.values() if "worker" in answer)
        found |= {each.worker: each for each in told}
        if all(each.found for each in found.values()) or time.monotonic() > deadline:
            return [each for each in found.values() if set(each.roles) & set(asked.roles)]


def _parse_fitness(answer: Mapping[str, Any]) -> Fitness:
    lists = (tuple(answer[name]) for name in ("lacks", "other"))
    return Fitness(answer["worker"], tuple(answer["roles"]), answer["found"], *lists)


# in the worker


_looks: dict[str, "Future[tuple[list[str], list[str]]]"] = {}


@inspect_command(name=COMMAND, args=[("question", dict)], visible=False)  # type: ignore[untyped-decorator]
def fits(state: Any, question: Mapping[str, Any]) -> dict[str, Any]:
    """Whether this process has what the run in question needs. Looks in a thread: the worker reads its messages meanwhile."""
    served = [queue.name for queue in state.consumer.task_consumer.queues]
    return _answer_question(Requirements(**question), [role for role in QUEUES if role in served])


def _answer_question(asked: Requirements, roles: Sequence[str]) -> dict[str, Any]:
    key = f"{asked.key} {roles}"
    if key not in _looks:
        for old in list(_looks)[: max(0, len(_looks) + 1 - MAX_LOOKS)]:
            del _looks[old]
        _looks[key] = Future()
        threading.Thread(target=_find_lacks, args=(_looks[key], asked, roles), name="fits", daemon=True).start()
    try:
        lacks, other = _looks[key].result(REPLY_SECONDS)
    except TimeoutError:
        return asdict(Fitness(worker_name(), tuple(roles), found=False))
    return asdict(Fitness(worker_name(), tuple(roles), True, tuple(lacks), tuple(other)))


def _find_lacks(answer: "Future[tuple[list[str], list[str]]]", asked: Requirements, roles: Sequence[str]) -> None:
    mine = [role for role in roles if role in asked.roles]
    try:
        answer.set_result((list_lacks(asked, mine), list_differences(asked, mine)))
    except BaseException as error:  # noqa: BLE001 - somebody's code may raise whatever it likes; whoever asks hears it
        answer.set_result(([_error_sentence(error)], []))


def list_lacks(asked: Requirements, roles: Iterable[str]) -> list[str]:
    """What this process lacks to serve the run in these roles, a sentence each."""
    if asked.version != __version__:
        return [f"is agentrl {__version__}, not {asked.version}"]
    looks = [look for role in roles for look in _CHECKS_BY_ROLE[role](asked)]
    return list(dict.fromkeys(said for look in looks if (said := _find_trouble(look))))


def _find_trouble(look: Callable[[], object]) -> str:
    try:
        look()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - anybody's code
        return _error_sentence(error)
    return ""


def _error_sentence(error: BaseException) -> str:
    text = str(error) if isinstance(error, AgentRLError) else f"{type(error).__name__}: {error}"
    return f"says: {' '.join(text.split())[:500]}"


def _rollout_checks(asked: Requirements) -> Iterator[Callable[[], object]]:
    made = asked.experiment
    yield partial(_load_tools, made)
    yield partial(check_rewards, made.weights)
    yield partial(load_hooks, made.config.hooks)
    yield partial(_check_engine, made)
    yield partial(_check_model, made.config, asked.base)


def _tools_checks(asked: Requirements) -> Iterator[Callable[[], object]]:
    yield partial(_check_tools, asked.experiment)


def _train_checks(asked: Requirements) -> Iterator[Callable[[], object]]:
    config = asked.experiment.config
    yield partial(load_hooks, config.hooks)
    yield partial(_check_model, config, asked.base)
    yield partial(_check_output_dir, asked.output_dir)
    yield partial(_check_optimizer, config)
    if config.update.trainer == "trl":
        yield require_trl


_CHECKS_BY_ROLE = {"rollout": _rollout_checks, "tools": _tools_checks, "train": _train_checks}


def _load_tools(made: Experiment) -> list[Tool]:
    """The tools and judges of a run.

    Raises:
        ConfigError: one of them, or the env, is not to be had here.
    """
    return [*made.tools.values(), *made.judges.values()]


def _check_tools(made: Experiment) -> None:
    for tool in _load_tools(made):
        unset = [name for name in tool.variables if not os.environ.get(name)]
        try:
            tool.check()
        except AgentRLError as error:
            started = f" It was started without {' and '.join(unset)}." if unset else f" {error.hint}".rstrip()
            raise ConfigError(f"{tool.name} cannot run here: {error.message}{started}") from error


def _check_engine(made: Experiment) -> None:
    from agentrl.workflow.inference.http import check_url

    if made.engine.at_url:
        check_url(settings())


def _check_model(config: RunConfig, base: str) -> None:
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise ModelError(f"There is no folder {base!r} here.")
    folder = local_folder(base)
    if folder is None:
        check_on_hub(base)
    elif (
        "agentrl.workflow.models.loading" in sys.modules
    ):  # as in each worker that loads models; a command asks a process of its own
        sys.modules["agentrl.workflow.models.loading"].check(config.model, folder)


def _check_optimizer(config: RunConfig) -> None:
    if {
        "agentrl.workflow.models.loading",
        "agentrl.workflow.training.optimizer",
    } <= sys.modules.keys():  # as in each worker that trains
        device = sys.modules["agentrl.workflow.models.loading"].pick_device(settings().device)
        sys.modules["agentrl.workflow.training.optimizer"].check_optimizer(config.update.optimizer, device)


def _check_output_dir(output_dir: str) -> None:
    from agentrl.workers.requests.submission import check_place

    check_place(output_dir)


# what is there, but another


def list_differences(asked: Requirements, roles: Sequence[str]) -> list[str]:
    """Names of the variables and files which this process has other than the command that asks."""
    read = _list_variables(asked.experiment, roles)
    other = [
        name for name in read if name in asked.variables and digest(asked.key, _variable_value(name)) != asked.variables[name]
    ]
    for name, source in _list_code(asked.experiment, roles):
        if name in asked.code and digest(asked.key, source) != asked.code[name]:
            other.append(f"the file of {name}")
    return other


def _list_variables(made: Experiment, roles: Sequence[str] = QUEUES) -> list[str]:
    """The environment variables that something of the run reads in these roles, as far as it can be had here."""
    names: list[str] = []
    try:
        if "tools" in roles:
            names += [name for tool in _load_tools(made) for name in tool.variables]
        if "rollout" in roles and made.engine.at_url:
            names += ENGINE
    except ConfigError:  # said elsewhere
        return []
    return list(dict.fromkeys(names))


def _list_code(made: Experiment, roles: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`kind name` of each plug-in that runs in these roles and is here, with the source that this process has loaded."""
    config = made.config
    named: list[tuple[str, str]] = []
    if {"rollout", "tools"} & set(roles):
        named += [("envs", str(config.env)), *(("tools", name) for name in config.tools if not name.startswith("mcp:"))]
        named += [("rewards", name) for name in made.weights]
        named += [("tool_formats", config.model.tool_format)] if config.model.tool_format else []
    if {"rollout", "train"} & set(roles):
        named += [("hooks", name) for name in config.hooks]
    for kind, name in dict.fromkeys(named):
        try:
            yield f"{kind} {name}", code_of(kind, name)
        except (ConfigError, OSError, TypeError):
            continue


def _variable_value(name: str) -> str:
    """The variable's value; a file or folder by its whole path, since each process stands elsewhere."""
    value = os.environ.get(name, "")
    try:
        return str(Path(value).expanduser().resolve()) if value and not is_url(value) and Path(value).exists() else value
    except OSError:
        return value
