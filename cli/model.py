"""`agentrl sft`, `eval`, `chat`: give a model a start, measure it, talk to it."""

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer

from cli.find import existing_database, find_policy
from cli.output import Json, cell, console, say, show, show_json
from workflow.config import NAME_PATTERN, RunConfig
from workflow.errors import ConfigError, ConflictError, ModelError

PolicyName = Annotated[
    str, typer.Option("--policy", metavar="RUN[@VERSION]|MODEL", help="A run's policy (newest version) or a model.")
]
TopK = Annotated[int | None, typer.Option("--top-k", help="Draw from the K likeliest tokens [the run's].", show_default=False)]
TopP = Annotated[
    float | None, typer.Option("--top-p", help="Draw from the likeliest that reach this [the run's].", show_default=False)
]
MinP = Annotated[
    float | None, typer.Option("--min-p", help="Draw from this share of the likeliest on [the run's].", show_default=False)
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="A text that ends a turn; repeatable [the run's].", show_default=False)
]
MAX_TASKS = 4096


def sft(
    dataset: Annotated[str, typer.Option(help="Dataset with demonstrations.")] = "arithmetic",
    model: Annotated[str, typer.Option(help="tiny for a new small model; or a folder, a hub name.")] = "tiny",
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps [tiny 400, else 200].", show_default=False)] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Demonstrations per step [tiny 32, else 16].", show_default=False)
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="AdamW, highest [tiny 3e-3, else 2e-4 LoRA, 2e-5 full].", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of new weights, the teacher and the order.")] = 0,
    name: Annotated[str | None, typer.Option(help="Name of the model made [MODEL-DATASET].", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model of that name.")] = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a model on demonstrations; prints its folder."""
    from workflow.datasets import Dataset
    from workflow.models import made_name, resolve_model
    from workflow.plugins import find
    from workflow.settings import settings

    if learning_rate is not None and learning_rate <= 0:
        raise ConfigError(f"--learning-rate must be above 0, not {learning_rate:g}.")
    if dataset.endswith(".jsonl"):
        raise ConfigError(
            f"{dataset!r} holds questions and answers, and no demonstrations to imitate.",
            "Write a dataset file with `demonstrations`; see workflow/datasets/arithmetic.py.",
        )
    found: Dataset = find("datasets", dataset)
    path = model if model == "tiny" else resolve_model(model, dataset)
    target = settings().models_dir / _model_name(name, made_name(path, dataset))
    if target.exists() and not force:
        raise ConflictError(f"There is a model in {str(target)!r} already.", "Pass --force to make it anew, or another --name.")

    from workflow.sft import sft as fine_tune

    recipe = _recipe(path, {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate, "seed": seed})
    machine = settings()
    with _Progress() as progress:
        made = fine_tune(
            found,
            path,
            target,
            recipe=recipe,
            device=machine.device,
            threads=machine.threads,
            overwrite=force,
            progress=progress.step,
        )
    if as_json:
        show_json({"model": made, "name": made.name, "steps": recipe.steps, "loss": progress.loss})
    else:
        show(str(made))
    say(f"Train it: agentrl submit --dataset {dataset} --model {model if model == 'tiny' and name is None else made.name}")


def _model_name(asked: str | None, made: str) -> str:
    if asked is not None and not re.match(NAME_PATTERN, asked):
        raise ConfigError(f"--name {asked!r} is no name.", "Use a-z, 0-9, '.', '_' and '-', at most 64.")
    name = asked or made
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"No name can be made of {name!r}.", "Pass --name.")
    return name


def _recipe(model: str, asked: dict[str, Any]) -> Any:
    from workflow.config import ModelConfig
    from workflow.models import lora_rank, model_folder
    from workflow.sft import default_recipe

    full = model == "tiny" or lora_rank(ModelConfig.model_validate({"path": model}), model_folder(model)) == 0
    return replace(default_recipe(model, full), **{key: value for key, value in asked.items() if value is not None})


class _Progress:
    """A bar on a terminal, else a line for every tenth."""

    def __init__(self) -> None:
        self.loss = 0.0
        self._bar: Any = None

    def __enter__(self) -> "_Progress":
        if sys.stderr.isatty():
            from rich.progress import Progress

            self._bar = Progress(console=console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("sft", total=None)
        return self

    def __exit__(self, *ending: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int, steps: int, loss: float) -> None:
        """Shows how far it is."""
        self.loss = loss
        if self._bar is not None:
            self._bar.update(self._task, total=steps, completed=step, description=f"loss {loss:.3f}")
        elif step == steps or step % max(1, steps // 10) == 0:
            say(f"step {step}/{steps}  loss {loss:.3f}")


def evaluate(
    policy: PolicyName,
    dataset: Annotated[str | None, typer.Option(help="Dataset [the run's, else gsm8k].", show_default=False)] = None,
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "test",
    n: Annotated[
        int | None, typer.Option("-n", min=1, max=MAX_TASKS, help="Only the first N tasks.", show_default=False)
    ] = None,
    group_size: Annotated[int, typer.Option(min=1, help="Episodes per task.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature [the run's, else 1].", show_default=False)
    ] = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    stop: Stop = None,
    engine: Annotated[str | None, typer.Option(help="What samples [the run's, else rolling].", show_default=False)] = None,
    fail_under: Annotated[float | None, typer.Option(help="Exit 1 if the mean reward is lower.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Measure a policy: n, mean reward, 95% interval, errors apart."""
    from cli.submit import start_services
    from cli.watch import follow
    from workers import submit as submission
    from workers.process import database
    from workflow.store import observe

    asked: dict[str, Any] = {"temperature": temperature, "engine": engine, "group_size": group_size}
    asked |= {"top_k": top_k, "top_p": top_p, "min_p": min_p, "stop": stop or None}
    config, ref = evaluation_of(policy, dataset, split, n, asked)
    prepared = submission.prepare(existing_database(), config, kind="eval", policy=ref)
    missing = start_services(required=True)
    made = submission.submit(database(), prepared)
    for line in [f"{made.name}: {len(prepared.submission.tasks)} tasks x {group_size}", *missing]:
        say(line)
    view = follow(database(), made.name, sys.stderr.isatty(), say)
    if view.run["status"] != "done":
        say(f"{made.name}: {view.run['status']} {view.run['reason']}")
        raise typer.Exit(1)
    result = observe.evaluation(database(), made.name)
    _show_score(made.name, policy, result, as_json)
    if fail_under is not None and (result["mean_reward"] is None or result["mean_reward"] < fail_under):
        say(f"The mean reward is under {fail_under:g}.")
        raise typer.Exit(1)


def evaluation_of(
    policy: str, dataset: str | None, split: str, n: int | None, rollout: Mapping[str, Any]
) -> tuple[RunConfig, Any]:
    """The config of an eval run (one iteration with all tasks) and the policy to measure, None for a model as it is.

    What `rollout` leaves out, or gives as None, is the run's.
    """
    from workers.submit import known_model
    from workflow.config import build
    from workflow.datasets import load_tasks

    base, ref = find_policy(policy)
    values = base.flat() | {"name": None, "output_dir": None, "epochs": 1, "rollout.max_staleness": 0}
    values |= {"dataset.split": split, "dataset.max_samples": n, **_given(rollout)}
    if dataset is not None and dataset != base.dataset.name:
        values |= {"dataset.name": dataset, "env": None, "dataset.skip_bad_rows": False}
    config = build(values)
    if ref is None:  # before the dataset, which may be far away and is not what is wrong with an unknown name
        try:
            known_model(config)
        except ModelError as error:
            raise ModelError(f"No run is called {policy!r}, and no model is found: {error.message}", error.hint) from error
    tasks = len(load_tasks(config.dataset).tasks)
    if tasks > MAX_TASKS:
        raise ConfigError(f"{tasks} tasks are more than an evaluation takes.", f"Pass -n {MAX_TASKS} or less.")
    return build(values | {"rollout.tasks_per_iteration": tasks}), ref


def _given(rollout: Mapping[str, Any]) -> dict[str, Any]:
    return {f"rollout.{key}": value for key, value in rollout.items() if value is not None}


def _show_score(run: str, policy: str, result: Any, as_json: bool) -> None:
    if as_json:
        keys = ("episodes", "errors", "mean_reward", "low", "high", "dataset", "split")
        show_json({"run": run, "policy": policy, **{key: result[key] for key in keys}})
        return
    interval = f"[{cell(result['low'])}, {cell(result['high'])}]"
    show(f"{policy} on {result['dataset']} ({result['split']})")
    show(f"  n {result['episodes']}  mean {cell(result['mean_reward'])}  95% {interval}  errors {result['errors']}")
    show(f"  run {run}")


def chat(
    policy: PolicyName,
    env: Annotated[
        str | None, typer.Option(help="Env whose tools and prompt it gets [the run's, else math].", show_default=False)
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature, above 0 and at most 10.")] = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    stop: Stop = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per turn.")] = 256,
    engine: Annotated[str | None, typer.Option(help="What samples [the run's, else rolling].", show_default=False)] = None,
    seed: Annotated[int, typer.Option(min=0, help="Keys every random draw.")] = 0,
) -> None:
    """Talk to a policy, its tools at hand.

    One line of input is one message; an empty line ends it. Everything runs in this process.
    """
    from workflow.config import build
    from workflow.envs import offered
    from workflow.plugins import find

    config, ref = find_policy(policy)
    default = "arithmetic" if config.model.path.startswith("tiny") else "math"
    found = find("envs", env or config.env or default)
    tools = found.toolset() if env else offered(found, config)

    from cli.talk import Talk, open_policy

    asked: dict[str, Any] = {"temperature": temperature, "max_new_tokens": max_new_tokens, "engine": engine}
    asked |= {"top_k": top_k, "top_p": top_p, "min_p": min_p, "stop": stop or None}
    config = build(config.flat() | _given(asked))
    loaded, ref = open_policy(config, ref)
    talk = Talk(loaded, ref, found, config.rollout, seed, tools)
    try:
        _converse(talk)
    finally:
        talk.close()


def _converse(talk: Any) -> None:
    from cli.output import show_lines

    asking = sys.stdin.isatty()
    while True:
        if asking:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line.strip():
            return
        for text in talk.answer(line.strip()):
            show_lines([text])
            sys.stdout.flush()
