"""Submits a run: it checks the request, writes the run's rows in one transaction, and sends the first chords.

Every error of the request is reported before anything is written. If the broker does not answer, the control loop starts the
run later.
"""

import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from itertools import chain, dropwhile
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from uuid import uuid4

from agentrl import __version__
from agentrl.workers.requests.agent_request import remark_on_agent, resolve_agent
from agentrl.workers.requests.curriculum import ChosenTasks, choose_by_difficulty
from agentrl.workers.requests.eval_config import eval_config, in_one_iteration
from agentrl.workers.requests.search_request import SearchedTasks, check_resources, divide, resolve_texts
from agentrl.workers.requests.served_prompts import load_run_tasks
from agentrl.workers.stack import broker, embedded
from agentrl.workers.stack.machine import largest_memory
from agentrl.workflow import checkpoints, engines, trainers
from agentrl.workflow.algorithms import resolve_run, resolve_search, searches
from agentrl.workflow.chat.templates import check_template, read_object, remark_on_tools, resolve_chat, resolve_last_turn
from agentrl.workflow.checkpoints import RECORD
from agentrl.workflow.checkpoints.epoch_links import link_epochs
from agentrl.workflow.config import ModelConfig, RunConfig
from agentrl.workflow.datasets import LoadedTasks, absolute_name, env_of, hash_dataset, is_rows, split_mixture
from agentrl.workflow.engines import Backend, vllm
from agentrl.workflow.envs import Env, correctness_rule, gives_rewards, optional_rewards
from agentrl.workflow.errors import AgentRLError, ConfigError, DatasetError, StateError, join_faults
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.hooks import load_hooks
from agentrl.workflow.installation import install_command
from agentrl.workflow.mcp import mcp_tool
from agentrl.workflow.models.lookup import (
    TINY,
    check_base,
    check_folder,
    check_size,
    existing_model,
    local_folder,
    lora_rank,
    quantised_bits,
    untrained_policy,
)
from agentrl.workflow.plugins import find, names
from agentrl.workflow.reference_check import check_sample, comparing_rewards
from agentrl.workflow.rewards import check_rewards
from agentrl.workflow.settings import Settings, is_url, settings
from agentrl.workflow.store import epoch_ends, evals, planning
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.planning import Submission, SubmittedRun
from agentrl.workflow.trajectory import PolicyRef, Task

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "celery", "sqlalchemy")


@dataclass(frozen=True)
class PreparedRun:
    """A checked run that can be submitted, with remarks for the user."""

    submission: Submission
    experiment: Experiment
    skipped_rows: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def config(self) -> RunConfig:
        """The run's config with all names and options resolved."""
        return self.experiment.config


def unreported(name: str) -> AbstractContextManager[None]:
    """Return a context manager that does nothing. It is the default of `check` in `prepare`: the progress of checks is not
    reported.
    """
    return nullcontext()


@dataclass(frozen=True)
class RunTasks:
    """The tasks of a run, with their difficulties."""

    loaded: LoadedTasks
    chosen: ChosenTasks


@dataclass(frozen=True)
class StartingModel:
    """The weights from which a run starts.

    Args:
        policy: the stored policy, or the base model.
        folder: the folder of the base model; None for a hub model that is not on this machine.
        is_trained: True if the weights are those of a trained policy, not of a plain model.
    """

    policy: PolicyRef
    folder: Path | None
    is_trained: bool


def prepare(
    db: Database | None,
    config: RunConfig,
    kind: str = "train",
    policy: PolicyRef | None = None,
    check: Callable[[str], AbstractContextManager[None]] = unreported,
) -> PreparedRun:
    """Check the complete request and build the submission. Nothing is written.

    Names are resolved in this order: the tasks, then the plug-ins that the config names, then the model. After each of the
    three, the result is checked. The submission is built from the results. Raise AgentRLError if the request is invalid; the
    class and the message say why.

    Args:
        db: the database in which a free name is looked up; None if it does not exist yet.
        kind: the run's kind.
        policy: the initial weights; None for the model in `config`.
        check: the function that is called with the name of each check and returns a context manager around it; used to report
            progress.
    """
    kind, config = _resolve_kind(kind, _with_absolute_paths(config))
    with check("dataset"):
        tasks = _resolve_tasks(db, config, policy)
    experiment = _resolve_experiment(config, kind, tasks.loaded)
    chosen = tasks.chosen.tasks
    searched = divide(experiment.config, chosen) if kind == "search" else SearchedTasks(chosen, {})
    _check_parts(experiment, kind, tasks.loaded.tasks, check)
    engines.check(experiment.engine, experiment.config, trains=kind == "train", trained=_is_trained(policy))
    if experiment.engine.at_url:
        _check_server_url(settings())
    with check("model and its hash"):
        model = _resolve_model(experiment, policy)
    with check("chat template"):
        experiment = _resolve_chat(experiment, kind, model, tasks.loaded.tasks)
    submission = submission_of(
        db,
        experiment,
        kind,
        model.policy,
        _name_stem(config, kind, policy),
        manifest=_task_manifest(experiment.env, experiment.config, kind),
        tasks=searched.tasks,
        roles=searched.roles,
        difficulties=tasks.chosen.difficulties,
        code_hash=experiment.scoring_hash(),
    )
    if kind == "train":
        submission = replace(submission, evaluation=plan_evaluation(db, experiment.config, model.policy))
    remarks = tuple(_list_remarks(db, experiment, submission, model, tasks))
    return PreparedRun(submission, experiment, tasks.loaded.skipped, remarks)


def _resolve_tasks(db: Database | None, config: RunConfig, policy: PolicyRef | None) -> RunTasks:
    loaded = _load_tasks(db, config, policy)
    chosen = choose_by_difficulty(db, config.dataset, loaded.tasks)
    return RunTasks(replace(loaded, tasks=chosen.tasks), chosen)


def _resolve_experiment(config: RunConfig, kind: str, loaded: LoadedTasks) -> Experiment:
    """Resolve the env, the agent, the tools, the texts and the algorithm's options in the config. Return the experiment."""
    experiment = Experiment(_with_served_tools(config.model_copy(update={"env": config.env or loaded.env})))
    check_resources(experiment)
    experiment = replace(experiment, config=resolve_agent(experiment, loaded.tasks))
    if kind == "search":
        experiment = replace(experiment, config=resolve_texts(experiment))
    elif kind == "train":
        experiment = replace(experiment, config=resolve_run(experiment.config))
    return experiment.reading(experiment.config.resources)


def _check_parts(
    experiment: Experiment, kind: str, tasks: Sequence[Task], check: Callable[[str], AbstractContextManager[None]]
) -> None:
    """Check the tools, rewards, hooks, trackers and other parts that the config names, except the model."""
    with check("tools and rewards"):
        _check_tools_and_trackers(experiment)
        check_rewards(experiment.weights)
        load_hooks(experiment.config.hooks)
    with check("references"):
        check_sample(tasks, _rewards_to_check(experiment), experiment.config.seed)
    if kind == "train":
        trainers.check(experiment.config)
    _check_sampling(experiment.config, kind)


def _resolve_model(experiment: Experiment, policy: PolicyRef | None) -> StartingModel:
    config = experiment.config
    base = policy.base if policy else existing_model(config.model.path, config.dataset.name)
    folder = _local_model_folder(base)
    if folder is not None:  # before the hash, which takes a second per gigabyte
        check_folder(config.model, folder)
        if experiment.engine.local and not settings().broker_url:  # the workers are on this machine
            _check_size(config.model, folder)
    if policy is not None:
        check_base(policy.base, policy.base_hash)
    return StartingModel(policy or untrained_policy(base), folder, _is_trained(policy))


def _check_size(config: ModelConfig, folder: Path) -> None:
    """Raise ModelError if the weights, in the smallest precision in which a worker may load them, fit neither into RAM nor into
    a GPU.
    """
    memory = largest_memory()
    if memory and any(folder.glob("*.safetensors")):
        bits = quantised_bits(config) or (32 if config.dtype == "float32" else 16)
        check_size(folder, bits, memory, "the largest memory here")


def _is_trained(policy: PolicyRef | None) -> bool:
    return policy is not None and bool(policy.path)


def _resolve_chat(experiment: Experiment, kind: str, model: StartingModel, tasks: Sequence[Task]) -> Experiment:
    """Resolve the chat template, the tool format and the request for a last turn in the config. Return the experiment."""
    config, folder = experiment.config, model.folder
    config = config.model_copy(update={"model": resolve_chat(config.model, folder)})
    config = resolve_last_turn(config, folder) if config.agent is None else config
    _check_weights(experiment.engine, config, model.policy, kind == "train" or model.is_trained)
    if kind == "train" and folder is not None:
        system, later = _system_messages(experiment.env, tasks)
        check_template(config.model, folder, system, bool(experiment.tools), later)
    return replace(experiment, config=config)


def _list_remarks(
    db: Database | None, experiment: Experiment, submission: Submission, model: StartingModel, tasks: RunTasks
) -> Iterator[str]:
    is_training = submission.kind == "train"
    if is_training:
        yield from remark_on_rewards(experiment)
    yield from list_remarks(submission)
    yield from remark_on_tasks(experiment.config, tasks.loaded)
    yield from tasks.chosen.remarks
    yield from remark_on_trackers(experiment.config)
    yield from remark_on_agent(experiment)
    if model.folder is not None and experiment.tools and (untold := remark_on_tools(experiment.config.model, model.folder)):
        yield untold
    yield from _remark_on_tiny(experiment, model.folder)
    yield from _remark_on_engine(experiment.config)
    output = submission.output_dir
    older = epoch_ends.find_run_of_folder(db, output) if db is not None and is_training else ""
    if older not in ("", submission.name):
        yield f"{output} also has the checkpoints of {older!r}; its epoch_N links now lead to this run."


def _load_tasks(db: Database | None, config: RunConfig, policy: PolicyRef | None) -> LoadedTasks:
    try:
        loaded = load_run_tasks(db, config.dataset, config.seed)
    except DatasetError as fault:
        faults: list[AgentRLError] = [fault]
        try:
            if policy is None:
                existing_model(config.model.path, config.dataset.name)
        except AgentRLError as other:
            faults.append(other)
        raise join_faults(*faults) from fault
    if not (config.env or loaded.env):
        raise ConfigError(
            f"The datasets {config.dataset.name!r} have different envs.", "Pass one env for all of them: --env math"
        )
    return loaded


def _task_manifest(env: Env, config: RunConfig, kind: str) -> dict[str, Any]:
    """Return the manifest of a run with tasks. It contains the hash of each file from which the tasks were read."""
    rule = {"right_by": correctness_rule(env, config)} if kind == "eval" else {}
    hashes = hash_dataset(config.dataset)
    return manifest(config) | rule | ({"datasets": hashes} if hashes else {})


def _resolve_kind(kind: str, config: RunConfig) -> tuple[str, RunConfig]:
    """Return the kind of the run, and its config. If the algorithm searches prompts, a training run gets the kind "search"."""
    if kind != "train" or not searches(find("algorithms", config.algorithm.name)):
        return kind, config
    return "search", resolve_search(config)


def _check_tools_and_trackers(experiment: Experiment) -> None:
    for name in experiment.config.report.to:
        find("trackers", name)
    for tool in (*experiment.tools.values(), *experiment.judges.values()):
        tool.check()


def _rewards_to_check(experiment: Experiment) -> tuple[str, ...]:
    optional = optional_rewards(experiment.env, experiment.weights)
    name, counted = experiment.config.dataset.name, [reward for reward in experiment.weights if reward not in optional]
    own = name in names("datasets") and env_of(experiment.config.dataset) == experiment.config.env
    return tuple(reward for reward in comparing_rewards(counted) if not (own and reward in experiment.env.rewards))


def submission_of(
    db: Database | None, experiment: Experiment, kind: str, policy: PolicyRef, stem: str, **more: Any
) -> Submission:
    """Return the submission of the experiment. If the config has no name, the name is `stem` with a number that makes the name
    unique in `db`. Raise ConfigError if the name looks like a number, or checkpoints cannot be written to the run's folder.
    Raise ServiceError if the object store at the run's URL does not respond.
    """
    config = experiment.config
    if config.name and config.name.isdecimal():
        raise ConfigError(f"--name {config.name} looks like a run number.", "Use at least one letter.")
    unnamed = Submission(
        name="",
        kind=kind,
        config=config.model_dump(mode="json"),
        policy=policy,
        dataset=config.dataset.name,
        seed=config.seed,
        epochs=config.epochs,
        length=config.iterations,
        tasks_per_iteration=config.rollout.tasks_per_iteration,
        group_size=config.rollout.group_size,
        weights=experiment.weights,
        output_dir=config.output_dir or "",
        stem="" if config.name else stem,
        root="" if config.output_dir else str(settings().checkpoint_root),
        **more,
    )
    submission = unnamed.with_name(config.name or (planning.find_free_name(db, stem) if db else f"{stem}-1"))
    check_place(submission.output_dir)
    return submission


def _local_model_folder(base: str) -> Path | None:
    return local_folder(base) if Path(base).is_dir() or not Path(base).is_absolute() else None


def _system_messages(env: Env, tasks: Sequence[Task]) -> tuple[bool, bool]:
    """Return two values: whether a conversation begins with a system message, and whether one has it later."""
    roles = [[message.role for message in task.messages] for task in tasks]
    first = bool(env.system_prompt) or any(conversation[:1] == ["system"] for conversation in roles)
    return first, any("system" in dropwhile("system".__eq__, conversation) for conversation in roles)


def plan_evaluation(db: Database | None, config: RunConfig, policy: PolicyRef) -> Submission | None:
    """Return the submission of the run that evaluates the policy from which this run starts; None unless `eval.every` is set.

    If the evaluation has another dataset than the run, its env is the env that belongs to that dataset. A dataset of plain rows
    has no env, so the run's env is used. Raise AgentRLError if the held-out tasks or another part of the evaluation is invalid;
    see `prepare`.
    """
    evaluation = config.eval
    if evaluation.every is None:
        return None
    other = evaluation.dataset is not None and evaluation.dataset != config.dataset.name
    has_rows = is_rows(evaluation.dataset or config.dataset.name)
    env = env_of(config.dataset.model_copy(update={"name": evaluation.dataset})) if other and not has_rows else None
    rows = {"map": config.dataset.map, "filter": config.dataset.filter} if has_rows else {}
    rollout = {"group_size": evaluation.group_size}
    measured = eval_config(config, evaluation.dataset, evaluation.split, evaluation.tasks, rollout, env, rows=rows)
    return prepare(db, in_one_iteration(db, measured), "eval", policy).submission


def list_remarks(submission: Submission) -> tuple[str, ...]:
    """Return remarks on the run's training and its evaluations."""
    return tuple(chain(_remarks_on_training(submission), _remarks_on_evaluation(submission)))


def _remark_on_tiny(experiment: Experiment, folder: Path | None) -> Iterator[str]:
    """Yield a remark if the model was made from `tiny` by demonstrations of one env, and the run's env has other prompts."""
    if folder is None:
        return
    record = read_object(folder / RECORD)
    if record.get("base") == TINY and isinstance(env := record.get("env"), str) and not _has_prompts_of(env, experiment):
        yield (
            f"The model {folder.name!r} was trained only for the env {env!r}: in {experiment.config.env!r} it writes noise. "
            "Make one that imitates this dataset, if it has demonstrations (agentrl sft "
            f"--dataset {experiment.config.dataset.name} --model tiny), or use a pretrained model."
        )


def _has_prompts_of(env: str, experiment: Experiment) -> bool:
    """Return True if the run's env has the system prompt and the tools of the env with this name."""
    if env == experiment.config.env:
        return True
    if env not in names("envs"):  # a model's file must not name code to import
        return False
    return _prompt_parts(Experiment(RunConfig(env=env))) == _prompt_parts(experiment)


def _prompt_parts(experiment: Experiment) -> tuple[str, Sequence[Any]]:
    return experiment.env.system_prompt, [tool.schema for tool in experiment.tools.values()]


def remark_on_trackers(config: RunConfig) -> Iterator[str]:
    """Yield a remark for each tracker whose package is missing on this machine. It is not an error, because the control loop,
    which needs the package, may run on another machine.
    """
    for package in [find("trackers", name).package for name in config.report.to]:
        if find_spec(package) is None:
            yield f"{package} is not installed here. The control loop's machine needs: {install_command(package)}"


def _remark_on_engine(config: RunConfig) -> Iterator[str]:
    """Yield a remark if the run samples with vLLM on this machine's CPU: the default engine was faster in every measurement."""
    if config.rollout.engine == vllm.vllm.name and not settings().broker_url and not vllm.has_gpu():
        yield (
            "This machine has no GPU. On a CPU, the default engine samples about twice as many tokens per second as vLLM "
            "(docs/operations.md): leave out --engine vllm."
        )


def remark_on_tasks(config: RunConfig, loaded: LoadedTasks) -> Iterator[str]:
    """Yield remarks on tasks that are left out, because they are repeated or exceed the dataset's share of a mixture."""
    if loaded.repeated:
        rows = "1 row says" if loaded.repeated == 1 else f"{loaded.repeated} rows say"
        yield f"{config.dataset.name}: {rows} the same as an earlier row; each task is used once."
    for name, (used, read) in loaded.shares.items():
        yield f"{name}: {used} of {read} tasks are used, according to its weight."


def remark_on_rewards(*experiments: Experiment) -> Iterator[str]:
    """Yield remarks if rewards of the env have weight 0, or if no episode can earn a reward. `experiments` are those whose
    episodes are sampled or trained on.
    """
    for experiment in experiments:
        if experiment.uncounted_rewards:
            again = " ".join(f"--reward {name}={experiment.env.rewards[name]:g}" for name in experiment.uncounted_rewards)
            uncounted, env = ", ".join(experiment.uncounted_rewards), experiment.config.env
            yield f"Rewards of the env {env!r} that are recorded but have weight 0: {uncounted}. To count them: {again}"
    names = ", ".join(dict.fromkeys(f"{name}=0" for experiment in experiments for name in experiment.weights))
    if names and not any(map(_may_earn, experiments)):
        yield f"No reward counts ({names}): every episode gets reward 0, so the policy cannot learn."


def _may_earn(experiment: Experiment) -> bool:
    """Return whether an episode's reward can differ from 0."""
    agent = experiment.config.agent
    own = agent is not None and agent.own_rewards
    return own or any(experiment.weights.values()) or bool(experiment.config.hooks) or gives_rewards(experiment.env)


def _remarks_on_training(submission: Submission) -> Iterator[str]:
    in_vain = {"critic": "the policy never trains", "update": "the learning rate never reaches its peak"}
    for section, what in in_vain.items():
        warmup = submission.config[section]["warmup"]
        if submission.kind == "train" and warmup >= submission.iterations:
            yield f"{section}.warmup={warmup} is not shorter than the run (iterations: {submission.iterations}): {what}."


def _remarks_on_evaluation(submission: Submission) -> Iterator[str]:
    measured = submission.evaluation.tasks if submission.evaluation else ()
    both = {task.content_hash for task in submission.tasks} & {task.content_hash for task in measured}
    if both:
        yield f"{len(both)} of the {len(measured)} held-out tasks are training tasks too. Pass another split: -s eval.split=..."


def submit(db: Database, prepared: PreparedRun) -> SubmittedRun:
    """Write the run and send its first iteration. If the same run is stored already, return it and send nothing. Raise
    ConflictError if the name belongs to another run. Raise StateError if a hook raised an exception at the start; the run is
    stored as failed, and nothing was sent. Raise ServiceError if the broker does not accept messages; the run is stored, and
    the control loop starts it later.
    """
    run = _write_run(db, prepared)
    if run.created and prepared.submission.kind == "train":
        with suppress(OSError):  # only links, which a user who may not write there does without
            link_epochs(epoch_ends.load_epoch_ends(db, run.id))
    if run.created and not broker.is_in_memory(settings()):  # else the stack's own control loop sends
        from agentrl.workers.stack.dispatch import dispatch  # late, as it imports Celery

        for iteration in (*planning.open_iterations(db, run.id), *evals.list_open_evals(db, run.id)):
            dispatch(db, iteration)
    return run


def write_failed_run(db: Database, prepared: PreparedRun, reason: str) -> SubmittedRun:
    """Store the run as failed before it starts, with the reason. If the same run is stored already, return it. `agentrl resume`
    starts the run. Raise ConflictError if the name belongs to another run.
    """
    return _write_run(db, prepared, reason)


def _write_run(db: Database, prepared: PreparedRun, failed: str = "") -> SubmittedRun:
    run = planning.submit(db, prepared.submission, failed)
    if run.created:
        for hook in load_hooks(prepared.config.hooks):
            try:
                hook.on_run_start(run.name, prepared.submission.with_name(run.name).config)
            except Exception as error:
                problem = f"on_run_start of the hook {type(hook).__name__} raised {type(error).__name__}: {error}"[:1000]
                planning.stop(db, run.name, "failed", problem)
                raise StateError(
                    f"{run.name} is failed: {problem}.", f"Continue without the hook: agentrl resume {run.name}"
                ) from error
    return run


def _check_sampling(config: RunConfig, kind: str) -> None:
    if kind != "train" and config.rollout.dynamic_sampling > 1:
        raise ConfigError(
            f"rollout.dynamic_sampling={config.rollout.dynamic_sampling} has no effect: an {kind} run has no updates.",
            "Leave it out.",
        )


def _check_server_url(where: Settings) -> None:
    """Check that the embedded stack can use the setting `engine_url`."""
    from agentrl.workflow.inference.http import server_urls

    if not where.broker_url and (where.engine_url or embedded.find_supervisor(where) is None):
        server_urls(where)


def _check_weights(backend: Backend, config: RunConfig, ref: PolicyRef, trained: bool) -> None:
    """Check that the engine can sample from the weights, if the base model is on this machine."""
    if Path(ref.base).is_dir():
        kind = "lora" if lora_rank(config.model, Path(ref.base)) else "full"
        engines.check_weights(backend, kind, trained)
        if trained and kind == "full" and config.model.dtype == "float16":
            raise trainers.full_float16_error()


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the config with absolute paths, because a run may be resumed and evaluated from another working directory."""
    dataset, output = config.dataset, config.output_dir
    dataset = dataset.model_copy(update={"name": absolute_name(dataset.name)})
    if output and not is_url(output):
        output = str(Path(output).expanduser().resolve())
    tools = tuple(mcp_tool.absolute_name(name) for name in config.tools)
    return config.model_copy(update={"dataset": dataset, "output_dir": output, "tools": tools})


def _with_served_tools(config: RunConfig) -> RunConfig:
    servers = {tool.server for tool in config.served_tools}
    strange = servers - set(config.tools)
    if strange:
        raise ConfigError(f"served_tools has {min(strange)!r}, which is not in `tools`.", "Add it: --tools.")
    more = (
        tool for name in config.tools if mcp_tool.is_server(name) and name not in servers for tool in mcp_tool.list_tools(name)
    )
    return config.model_copy(update={"served_tools": (*config.served_tools, *more)})


def check_place(place: str) -> None:
    """Raise ConfigError if the folder or URL cannot take checkpoints, ServiceError if the store does not respond."""
    folder = checkpoints.check_place(place)
    if folder is not None:
        _check_writable(folder)


def _check_writable(folder: Path) -> None:
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with NamedTemporaryFile(dir=there):  # permissions do not tell: /proc, say, takes no file
            pass
    except OSError as error:
        message = f"Cannot write checkpoints to {str(folder)!r}: cannot write to {str(there)!r}: {error.strerror}."
        raise ConfigError(message, "Pass another --output-dir, or fix this one.") from error


def _name_stem(config: RunConfig, kind: str, policy: PolicyRef | None) -> str:
    parts = [*(Path(name.rpartition(":")[2]).stem for name in split_mixture(config.dataset.name)), Path(config.model.path).name]
    parts += [f"v{policy.version}" if policy and kind == "eval" else "", "eval" if kind == "eval" else ""]
    stem = "-".join(word for word in parts if word).lower()
    plain = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in stem)
    return plain.lstrip("._-")[:48] or "run"


def manifest(config: RunConfig) -> dict[str, Any]:
    """Return the facts that are needed to repeat the run, besides its config."""
    return {
        "id": uuid4().hex,
        "agentrl": __version__,
        "git": _git_revision(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        **({"trust_remote_code": True} if config.model.trust_remote_code else {}),
        "packages": {name: metadata.version(name) for name in PACKAGES},
    }


@cache
def _git_revision() -> str:
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", here, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
