"""The requirements of a run. Before anything is written, a command asks each worker whether the worker can run it.

A worker responds with two lists. The first has a sentence for each thing that is missing there: a module, a setting, a folder.
The second has the names of files and environment variables that differ from those of the command. Values are never sent.
Command and worker compare digests instead, made with a key that is new for each question.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from secrets import token_hex
from typing import Any

from celery.worker.control import inspect_command

from agentrl import __version__
from agentrl.workers.ranks.rendezvous import check_hosts
from agentrl.workers.requests.agent_request import check_function
from agentrl.workers.stack.celery_app import AGENTS, ALL_QUEUES, QUEUES, app
from agentrl.workers.stack.process import worker_name
from agentrl.workflow.agents.agent_limits import check_held, read_program
from agentrl.workflow.config import PROGRAM, RunConfig
from agentrl.workflow.errors import AgentRLError, ConfigError, ModelError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.hooks import load_hooks
from agentrl.workflow.models.lookup import check_on_hub, local_folder
from agentrl.workflow.plugins import code_of, find
from agentrl.workflow.rewards import check_rewards
from agentrl.workflow.settings import digest, is_url, settings
from agentrl.workflow.tools import Tool
from agentrl.workflow.training.trl_options import require_trl

COMMAND = "agentrl_fits"
ANSWER_SECONDS = 1.5
"""The time that a command waits for the first responses of workers, in seconds."""

LOOK_SECONDS = 30.0
"""The longest time that a command waits for the workers' checks, in seconds. A check imports plug-ins, starts a sandbox and may
query a model hub.
"""

REPLY_SECONDS = 0.5
"""The longest time that a worker waits for its check before it responds, in seconds. If the check takes longer, the command
asks again, and a later response has the result.
"""

MAX_LOOKS = 8
"""The most checks whose results a worker keeps for repeated questions."""

NOT_AGENTS = "(?!agents-)"
"""A pattern that excludes the names of agents workers. If a run has no agent, its command does not ask agents workers, because
they may end at any time.
"""

ENGINE = ("AGENTRL_ENGINE_URL", "AGENTRL_ENGINE_KEY")


@dataclass(frozen=True)
class Requirements:
    """The requirements of a run, in the form in which a command sends them to workers.

    Args:
        config: the run's config.
        weights: the weights of the run's rewards.
        base, output_dir: the run's base model, and the location of its checkpoints.
        roles: the queues that the run needs.
        version: the version of agentrl in which the command runs.
        key: the key with which the digests are made.
        variables: the digests of the command's environment variables, by name.
        code: the digest of the source of each plug-in of the command. A key is the plug-in's kind and name, with a space.
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
        """The run's experiment. Each of its plug-ins is loaded at its first use."""
        return Experiment.load(self.config, self.weights)

    @property
    def own(self) -> bool:
        """True if a plug-in of the run is in a user's own module (`module:name`), or its agent is a program with a file of the
        working directory.
        """
        names = (self.config.get("env"), self.config["rollout"]["engine"], *self.config["tools"], *self.config["hooks"])
        names += (self.config["model"].get("tool_format"), (self.config.get("agent") or {}).get("name"))
        imported = any(":" in str(name).removeprefix("mcp:").removeprefix(PROGRAM) for name in (*names, *self.weights))
        return imported or any(name.startswith(f"{AGENTS} {PROGRAM}") for name in self.code)


@dataclass(frozen=True)
class WorkerCheck:
    """A worker's answer to the question whether the worker can run a run.

    Attributes:
        found: whether the worker's check is complete.
        lacks: a sentence for each thing that the worker lacks.
        other: the names of files and environment variables that differ from those of the command.
    """

    worker: str
    roles: tuple[str, ...]
    found: bool
    lacks: tuple[str, ...] = ()
    other: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """A text with the worker's roles, host and pid."""
        host, _, pid = self.worker.rpartition(":")
        return f"The {' and '.join(self.roles)} worker on {host} (pid {pid})"


def requirements_of(
    config: Mapping[str, Any], weights: Mapping[str, float], base: str, output_dir: str, rolls_out: bool
) -> Requirements:
    """Return the requirements of a run, with the digests of this process. `rolls_out` is False for a run on stored episodes."""
    experiment, key = Experiment.load(config, weights), token_hex(8)
    roles = roles_of(experiment.config, rolls_out)
    here = {name: digest(key, _variable_value(name)) for name in _list_variables(experiment) if os.environ.get(name)}
    code = {name: digest(key, source) for name, source in _list_code(experiment, roles)}
    return Requirements(dict(config), dict(weights), base, output_dir, roles, __version__, key, here, code)


def roles_of(config: RunConfig, rolls_out: bool = True) -> tuple[str, ...]:
    """Return the queues that a run needs. The queue `agents` is included only if its workers start the run's agent."""
    if not rolls_out:
        return ("train",)
    return QUEUES if config.agent is None or config.agent.is_external else ALL_QUEUES


def ask_workers(needs: Requirements, workers: int | None = None) -> list[WorkerCheck]:
    """Return the responses of all workers that serve a queue of the run. A worker that does not respond has no entry.

    A worker whose check is not complete is asked again, for up to LOOK_SECONDS. `needs` are the requirements. `workers` is the
    number of workers, if known: the call then returns as soon as this number of workers has responded.
    """
    checks: dict[str, WorkerCheck] = {}
    deadline = time.monotonic() + LOOK_SECONDS
    asking: dict[str, Any] = {"arguments": {"question": asdict(needs)}, "timeout": ANSWER_SECONDS, "limit": workers}
    if AGENTS not in needs.roles:
        asking |= {"pattern": NOT_AGENTS, "matcher": "pcre"}
    while True:
        with app.connection_for_write() as link:  # not from the pool: a restarted stack has another Redis
            replies = app.control.broadcast(COMMAND, reply=True, connection=link, **asking)
        answers = (_parse_fitness(answer) for reply in replies or () for answer in reply.values() if "worker" in answer)
        checks |= {check.worker: check for check in answers}
        if all(check.found for check in checks.values()) or time.monotonic() > deadline:
            return [check for check in checks.values() if set(check.roles) & set(needs.roles)]


def _parse_fitness(answer: Mapping[str, Any]) -> WorkerCheck:
    lists = (tuple(answer[name]) for name in ("lacks", "other"))
    return WorkerCheck(answer["worker"], tuple(answer["roles"]), answer["found"], *lists)


# in the worker


_looks: dict[str, "Future[tuple[list[str], list[str]]]"] = {}


@inspect_command(name=COMMAND, args=[("question", dict)], visible=False)  # type: ignore[untyped-decorator]
def fits(state: Any, question: Mapping[str, Any]) -> dict[str, Any]:
    """Check whether this process can run the run. The check runs in a thread, so the worker continues to read its messages."""
    served = [queue.name for queue in state.consumer.task_consumer.queues]
    return _answer_question(Requirements(**question), [role for role in ALL_QUEUES if role in served])


def _answer_question(needs: Requirements, roles: Sequence[str]) -> dict[str, Any]:
    key = f"{needs.key} {roles}"
    if key not in _looks:
        for old in list(_looks)[: max(0, len(_looks) + 1 - MAX_LOOKS)]:
            del _looks[old]
        _looks[key] = Future()
        threading.Thread(target=_find_lacks, args=(_looks[key], needs, roles), name="fits", daemon=True).start()
    try:
        lacks, other = _looks[key].result(REPLY_SECONDS)
    except TimeoutError:
        return asdict(WorkerCheck(worker_name(), tuple(roles), found=False))
    return asdict(WorkerCheck(worker_name(), tuple(roles), True, tuple(lacks), tuple(other)))


def _find_lacks(answer: "Future[tuple[list[str], list[str]]]", needs: Requirements, roles: Sequence[str]) -> None:
    mine = [role for role in roles if role in needs.roles]
    try:
        answer.set_result((list_lacks(needs, mine, read_agent), list_differences(needs, mine, read_agent)))
    except BaseException as error:  # noqa: BLE001 - a user's code may raise anything; the command reports it
        answer.set_result(([_error_sentence(error)], []))


def import_agent(experiment: Experiment) -> str:
    """Import the run's agent if it is a function, and return the source of the agent's module. For a program, return the
    text of its files. Raise ConfigError if the agent cannot be imported or called. Raise OSError or TypeError if the source is
    not available.
    """
    if experiment.config.agent is None or experiment.agent is None:
        return read_program(experiment.config.agent)
    name = experiment.config.agent.name
    check_function(name, experiment.agent, experiment.config.resources)
    return code_of(AGENTS, name)


def read_agent(experiment: Experiment) -> str:
    """Return the source of the agent's module, in a worker of the queue `agents`.

    Such a worker holds secrets, so it never imports the agent itself. The separate interpreter from which agents are forked
    imports the agent. A sandboxed agent is imported only in its sandbox. Raise ConfigError if the agent cannot be imported.
    Raise OSError if the source of the agent's module is not available.
    """
    agent = experiment.config.agent
    if agent is None or agent.command or agent.sandboxed:
        return read_program(agent)
    processes = sys.modules["agentrl.workers.agents.processes"]  # as in each worker for agents
    try:
        return str(processes.servers.source(agent.name))
    except processes.AgentUnready as error:
        raise ConfigError(f"the agent {agent.name!r} cannot be loaded: {error}") from error


ReadAgent = Callable[[Experiment], str]
Checks = Callable[[Requirements], Iterator[Callable[[], object]]]


def list_lacks(needs: Requirements, roles: Iterable[str], agent: ReadAgent = import_agent) -> list[str]:
    """Return a sentence for each thing that this process lacks to serve the run. `agent` imports the run's agent."""
    if needs.version != __version__:
        return [f"is agentrl {__version__}, not {needs.version}"]
    checks: dict[str, Checks] = {**_CHECKS_BY_ROLE, AGENTS: partial(_agents_checks, agent)}
    looks = [look for role in roles for look in checks[role](needs)]
    return list(dict.fromkeys(lack for look in looks if (lack := _find_trouble(look))))


def _find_trouble(look: Callable[[], object]) -> str:
    try:
        look()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - anybody's code
        return _error_sentence(error)
    return ""


def _error_sentence(error: BaseException) -> str:
    text = str(error) if isinstance(error, AgentRLError) else f"{type(error).__name__}: {error}"
    return f"says: {' '.join(text.split())[:500]}"


def _rollout_checks(needs: Requirements) -> Iterator[Callable[[], object]]:
    experiment = needs.experiment
    yield partial(_load_tools, experiment)
    yield partial(check_rewards, experiment.weights)
    yield partial(load_hooks, experiment.config.hooks)
    yield partial(_check_engine, experiment, needs.base)
    yield partial(_check_model, experiment.config, needs.base)


def _tools_checks(needs: Requirements) -> Iterator[Callable[[], object]]:
    yield partial(_check_tools, needs.experiment)


def _train_checks(needs: Requirements) -> Iterator[Callable[[], object]]:
    config = needs.experiment.config
    yield partial(load_hooks, config.hooks)
    yield partial(_check_model, config, needs.base)
    yield partial(_check_output_dir, needs.output_dir)
    yield partial(check_hosts, config.update.hosts)
    yield partial(_check_devices, config)
    yield partial(_check_optimizer, config)
    if config.update.trainer == "trl":
        yield require_trl


def _agents_checks(agent: ReadAgent, needs: Requirements) -> Iterator[Callable[[], object]]:
    yield partial(_check_agent, needs.experiment, agent)


_CHECKS_BY_ROLE = {"rollout": _rollout_checks, "tools": _tools_checks, "train": _train_checks}


def _load_tools(experiment: Experiment) -> list[Tool]:
    """Return the tools and judges of a run. Raise ConfigError if this process cannot load the env, a tool or a judge."""
    return [*experiment.tools.values(), *experiment.judges.values()]


def _check_tools(experiment: Experiment) -> None:
    for tool in _load_tools(experiment):
        unset = [name for name in tool.variables if not os.environ.get(name)]
        try:
            tool.check()
        except AgentRLError as error:
            started = f" The worker was started without {' and '.join(unset)}." if unset else f" {error.hint}".rstrip()
            raise ConfigError(f"{tool.name} cannot run here: {error.message}{started}") from error


def _check_agent(experiment: Experiment, agent: ReadAgent) -> None:
    agent_config = experiment.config.agent
    if agent_config is None:
        return
    with suppress(OSError, TypeError):  # it has no source
        agent(experiment)
    check_held(agent_config)


def _check_engine(experiment: Experiment, base: str) -> None:
    if experiment.engine.check:
        check: Callable[..., None] = find("engine", experiment.engine.check)
        check(settings(), {Path(experiment.config.model.path).name, Path(base).name})


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
        "agentrl.workflow.models.devices",
        "agentrl.workflow.training.optimizer",
    } <= sys.modules.keys():  # as in each worker that trains
        device = sys.modules["agentrl.workflow.models.devices"].pick_device(settings().device)
        sys.modules["agentrl.workflow.training.optimizer"].check_optimizer(config.update.optimizer, device)


def _check_devices(config: RunConfig) -> None:
    if "agentrl.workflow.models.devices" in sys.modules:  # as in each worker that trains
        devices = sys.modules["agentrl.workflow.models.devices"]
        devices.devices_of_ranks(config.update.devices, settings().device, config.model.numerics, config.update.hosts > 1)


def _check_output_dir(output_dir: str) -> None:
    from agentrl.workers.requests.submit import check_place

    check_place(output_dir)


# differences from the command


def list_differences(needs: Requirements, roles: Sequence[str], agent: ReadAgent = import_agent) -> list[str]:
    """Return the names of the variables and files in which this process differs from the command. `roles` are the roles of this
    process. `agent` is the function that imports the run's agent and returns the source of its module.
    """
    read = _list_variables(needs.experiment, roles)
    other = [
        name for name in read if name in needs.variables and digest(needs.key, _variable_value(name)) != needs.variables[name]
    ]
    for name, source in _list_code(needs.experiment, roles, agent):
        if name in needs.code and digest(needs.key, source) != needs.code[name]:
            other.append(f"the file of {name}")
    return other


def _list_variables(experiment: Experiment, roles: Sequence[str] = QUEUES) -> list[str]:
    """Return the environment variables that the run's plug-ins use in these roles; empty if a plug-in cannot be loaded here."""
    names: list[str] = []
    try:
        if "tools" in roles:
            names += [name for tool in _load_tools(experiment) for name in tool.variables]
        if "rollout" in roles and experiment.engine.at_url:
            names += ENGINE
    except ConfigError:  # `list_lacks` reports it
        return []
    return list(dict.fromkeys(names))


def _list_code(experiment: Experiment, roles: Sequence[str], agent: ReadAgent = import_agent) -> Iterator[tuple[str, str]]:
    """Yield, for each plug-in that runs in these roles and can be loaded here, its `kind name` and its source."""
    config = experiment.config
    plugins: list[tuple[str, str]] = []
    if {"rollout", "tools"} & set(roles):
        plugins += [("envs", str(config.env)), *(("tools", name) for name in config.tools if not name.startswith("mcp:"))]
        plugins += [("rewards", name) for name in experiment.weights]
        plugins += [("tool_formats", config.model.tool_format)] if config.model.tool_format else []
    if {"rollout", "train"} & set(roles):
        plugins += [("hooks", name) for name in config.hooks]
    for kind, name in dict.fromkeys(plugins):
        try:
            yield f"{kind} {name}", code_of(kind, name)
        except (ConfigError, OSError, TypeError):
            continue
    if AGENTS in roles and experiment.config.agent is not None:
        with suppress(ConfigError, OSError, TypeError):
            if source := agent(experiment):
                yield f"{AGENTS} {experiment.config.agent.name}", source


def _variable_value(name: str) -> str:
    """Return the variable's value. A path is made absolute, because each process has another working directory."""
    value = os.environ.get(name, "")
    try:
        return str(Path(value).expanduser().resolve()) if value and not is_url(value) and Path(value).exists() else value
    except OSError:
        return value
