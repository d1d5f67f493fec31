"""`agentrl data show`, `check` and `split`: shows and checks a dataset's rows before training."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.console import Json, say, show, show_json
from agentrl.cli.options import RowsFilter, RowsMap
from agentrl.cli.plot import histogram
from agentrl.workflow.errors import ConfigError, DatasetError
from agentrl.workflow.runtime.shown_text import format_count, one_line

if TYPE_CHECKING:
    from agentrl.workflow.analysis.prompt_reader import PromptReader
    from agentrl.workflow.config import DatasetConfig, RunConfig
    from agentrl.workflow.datasets import LoadedTasks
    from agentrl.workflow.trajectory import PolicyRef, Task

data = typer.Typer(help="Show, check and split datasets.", no_args_is_help=True)

DatasetName = Annotated[str, typer.Argument(metavar="DATASET", help="A name, a file, a folder or OWNER/NAME, as for submit.")]
Split = Annotated[str, typer.Option(help="The split.")]
EnvName = Annotated[
    str | None, typer.Option("--env", help="Env whose prompt the rows get [the dataset's].", show_default=False)
]
MAX_LISTED = 5
"""The most rows that are listed for each kind of remark."""


@data.callback()
def _group() -> None:
    """Show, check and split datasets."""


@data.command("show")
def show_rows(
    dataset: DatasetName,
    n: Annotated[int, typer.Option("-n", min=1, max=1000, help="Rows to show.")] = 3,
    split: Split = "train",
    map: RowsMap = None,
    filter: RowsFilter = None,
    env: EnvName = None,
    model: Annotated[str | None, typer.Option(help="Model or run whose template is rendered.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Show the first tasks of a dataset; with --model, the prompts and tokens that the model reads."""
    config, ref = _run_config(_rows_config(dataset, split, map, filter, n), env, model)
    loaded = _load(config.dataset)
    reader = _prompt_reader(config, loaded, ref) if model else None
    rows = [_describe_task(task, reader) for task in loaded.tasks]
    if as_json:
        show_json(rows)
        return
    for task in rows:
        tokens = f", {format_count(task['tokens'], 'token')}" if "tokens" in task else ""
        show(f"=== {task['task']}{tokens}")
        show(
            task["prompt"]
            if "prompt" in task
            else "\n".join(f"{message['role']}: {message['content']}" for message in task["messages"])
        )
        show(f"--- reference: {task['reference'] or 'none'}")
        if task["metadata"]:
            show(f"--- metadata: {one_line(json.dumps(task['metadata'], ensure_ascii=False), 500)}")


@data.command()
def check(
    dataset: DatasetName,
    reward: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Reward to check; repeatable [those of the dataset's env].", show_default=False),
    ] = None,
    split: Split = "train",
    map: RowsMap = None,
    filter: RowsFilter = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="DATASET|SPLIT", help="Split or dataset that must not have the same questions [test].", show_default=False
        ),
    ] = None,
    env: EnvName = None,
    model: Annotated[str | None, typer.Option(help="Count the tokens of prompts for this model.", show_default=False)] = None,
    samples: Annotated[
        int | None, typer.Option(min=2, max=1024, help="With --model: samples per task.", show_default=False)
    ] = None,
    n: Annotated[int, typer.Option("-n", min=1, max=4096, help="With --samples: only the first N tasks.")] = 64,
    as_json: Json = False,
) -> None:
    """Score each task's own reference as if it were the answer; list the tasks whose reference does not earn the full reward.

    The command also counts repeated questions, questions that are also in the test split, missing references, and the tokens of
    prompts (--model). With --model M --samples 8 it also counts the tasks from which the model can learn: those that the model
    solves in some of 8 samples, but not in all.
    """
    from agentrl.workflow.reference_check import reference_problems

    if samples and not model:
        raise ConfigError("--samples requires a model.", "Add --model MODEL.")
    config, ref = _run_config(_rows_config(dataset, split, map, filter), env, model)
    loaded = _load(config.dataset)
    report: dict[str, Any] = {"dataset": dataset, "tasks": len(loaded.tasks)}
    report |= _compare_questions(loaded, config.dataset, against)
    if model:
        report |= _measure_prompts(loaded, config, ref)
    names = _comparing_rewards(reward, config.env or loaded.env)
    report |= {"rewards": list(names), "problems": reference_problems([task for task in loaded.tasks if task.reference], names)}
    if samples and model:
        report |= _sample(config, model, samples, n, reward)
    if as_json:
        show_json(report)
    else:
        for line in _check_lines(report):
            show(line)
    tasks, rewards = f"{format_count(len(loaded.tasks), 'task')} of {dataset!r}", ", ".join(names)
    if report["problems"]:
        message = f"{len(report['problems'])} of {tasks} cannot be scored by {rewards}."
        raise DatasetError(message, "Correct these rows, or name another --reward.")
    say(f"{tasks} can be scored by {rewards}.")


@data.command("split")
def split_rows(
    dataset: DatasetName,
    out: Annotated[Path, typer.Option(help="Folder for train.jsonl and test.jsonl.", show_default=False)],
    share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the questions to hold out.")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Seed that chooses the held-out questions.")] = 0,
    split: Split = "train",
    map: RowsMap = None,
    filter: RowsFilter = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    as_json: Json = False,
) -> None:
    """Divide a dataset's rows into train.jsonl and test.jsonl; rows with the same question stay together."""
    from agentrl.workflow.dataset_rows.splitting import write_splits

    counts = write_splits(_divided_rows(_rows_config(dataset, split, map, filter), share, seed), out, force)
    if as_json:
        show_json({"out": str(out), **counts})
    else:
        show(f"{out}: {format_count(counts['train'], 'row')} in train.jsonl, {counts['test']} in test.jsonl")
    say(f"Train on it: agentrl submit --dataset {out} -s eval.every=10")


def _rows_config(
    dataset: str, split: str, map: str | None, filter: str | None, max_tasks: int | None = None
) -> "DatasetConfig":
    from agentrl.workflow.config import build

    values = {"name": dataset, "split": split, "map": map, "filter": filter, "max_tasks": max_tasks}
    return build({f"dataset.{key}": value for key, value in values.items() if value is not None}).dataset


def _run_config(rows: "DatasetConfig", env: str | None, model: str | None) -> "tuple[RunConfig, PolicyRef | None]":
    """Return a run's config for these rows, and the policy."""
    from agentrl.cli.resolve_targets import find_policy
    from agentrl.workflow.config import RunConfig

    config, ref = find_policy(model) if model else (RunConfig(), None)
    return config.model_copy(update={"dataset": rows, "env": env}), ref


def _load(config: "DatasetConfig") -> "LoadedTasks":
    from agentrl.workflow.datasets import load_tasks

    return load_tasks(config)


def _prompt_reader(config: "RunConfig", loaded: "LoadedTasks", ref: "PolicyRef | None") -> "PromptReader":
    from agentrl.workflow.analysis.prompt_reader import PromptReader
    from agentrl.workflow.chat.templates import resolve_chat
    from agentrl.workflow.experiment import Experiment
    from agentrl.workflow.models.lookup import existing_model, model_folder

    path = ref.base if ref is not None else existing_model(config.model.path, config.dataset.name)
    folder = model_folder(path, config.model.trust_remote_code)
    run_config = config.model_copy(update={"env": config.env or loaded.env, "model": resolve_chat(config.model, folder)})
    return PromptReader(Experiment(run_config).reading(run_config.resources), folder)


def _describe_task(task: "Task", reader: "PromptReader | None") -> dict[str, Any]:
    messages = [{"role": message.role, "content": message.content} for message in task.messages]
    document = {"task": task.key, "messages": messages, "reference": task.reference, "metadata": dict(task.metadata)}
    if reader is None:
        return document
    prompt = reader.read(task)
    return document | {"prompt": prompt.text, "tokens": prompt.tokens}


def _comparing_rewards(reward_names: Sequence[str] | None, env: str) -> tuple[str, ...]:
    """Return the rewards that compare an answer with a reference."""
    from agentrl.workflow.plugins import find
    from agentrl.workflow.reference_check import comparing_rewards
    from agentrl.workflow.rewards import judges_of

    rewards = tuple(reward_names or find("envs", env).rewards)
    names = comparing_rewards(rewards)
    if not names:
        raise ConfigError(
            f"None of the rewards ({', '.join(rewards) or 'none'}) compares an answer with a reference.",
            "Name one that does: --reward numeric_answer",
        )
    for judge in judges_of(dict.fromkeys(names, 1.0)).values():
        judge.check()
    return names


def _compare_questions(loaded: "LoadedTasks", config: "DatasetConfig", against: str | None) -> dict[str, Any]:
    from agentrl.workflow.dataset_rows.splitting import find_repeated, find_shared

    repeated = list(find_repeated(loaded.tasks))
    other, others = _other_tasks(config, against)
    return {
        "identical": loaded.repeated,
        "repeated": [f"{later.key} asks the same question as {first.key}" for first, later in repeated],
        "contradictory": sum(first.reference != later.reference for first, later in repeated),
        "without_reference": sum(not task.reference for task in loaded.tasks),
        "against": other,
        "shared": [
            f"{task.key} asks the same question as {theirs.key} of {other}"
            for task, theirs in find_shared(loaded.tasks, others)
        ],
    }


def _other_tasks(config: "DatasetConfig", against: str | None) -> tuple[str, Sequence["Task"]]:
    """Return the name and the tasks of the dataset or split to compare with. The default is the split "test" if it exists."""
    from agentrl.workflow.dataset_rows.sources import kind_of_source
    from agentrl.workflow.datasets import is_file

    if against and (kind_of_source(against) != "plugin" or is_file(config.name)):
        return against, _load(config.model_copy(update={"name": against, "split": "train"})).tasks
    split = against or "test"
    if is_file(config.name) or split == config.split:
        return "", ()
    try:
        return split, _load(config.model_copy(update={"split": split})).tasks
    except DatasetError:
        if against:
            raise
        return "", ()


def _measure_prompts(loaded: "LoadedTasks", config: "RunConfig", ref: "PolicyRef | None") -> dict[str, Any]:
    reader = _prompt_reader(config, loaded, ref)
    tokens = [reader.read(task).tokens for task in loaded.tasks]
    room = reader.window - config.rollout.max_new_tokens
    return {"prompt_tokens": tokens, "window": reader.window, "too_long": sum(length > room for length in tokens), "room": room}


def _sample(config: "RunConfig", model: str, samples: int, n: int, reward: Sequence[str] | None) -> dict[str, Any]:
    """Evaluate the model on the first tasks."""
    from agentrl.cli.eval_run import eval_run_of, run_to_end, with_policy_name
    from agentrl.cli.resolve_targets import existing_database
    from agentrl.workers.requests.submit import prepare
    from agentrl.workers.stack.process import database
    from agentrl.workflow.resolve import parse_weights
    from agentrl.workflow.store.reads import task_rows

    dataset = config.dataset
    rows, weights = {"map": dataset.map, "filter": dataset.filter}, parse_weights(reward or ())
    measured, ref = eval_run_of(
        model, dataset.name, dataset.split, n, {"group_size": samples}, config.env, rewards=weights, rows=rows
    )
    prepared = with_policy_name(prepare(existing_database(), measured, kind="eval", policy=ref), model)
    run = run_to_end(prepared, samples).name
    shares = [count.share for count in task_rows.load_solved(database(), run).values()]
    groups = task_rows.count_equal_groups(database(), run)
    return {
        "run": run,
        "sampled": len(shares),
        "solved": sum(shares) / len(shares) if shares else None,
        "always": sum(share == 1 for share in shares),
        "never": sum(share == 0 for share in shares),
        "groups": groups.groups,
        "equal": groups.equal,
    }


def _check_lines(report: dict[str, Any]) -> Iterator[str]:
    yield from report["problems"]
    for key, what in (("repeated", "asked again"), ("shared", f"also in {report['against']}")):
        if report[key]:
            yield f"{format_count(len(report[key]), 'question')} {what}:"
            yield from (f"  {line}" for line in report[key][:MAX_LISTED])
    if report["identical"]:
        yield f"{format_count(report['identical'], 'row')} equal to an earlier row, left out"
    if report["contradictory"]:
        yield f"{report['contradictory']} of the repeated questions have different references"
    if report["without_reference"]:
        yield f"{format_count(report['without_reference'], 'task')} without a reference"
    if "prompt_tokens" in report:
        more = format_count(report["too_long"], "task")
        yield f"prompt tokens; at most {report['room']} leave room for an answer; {more} with more than that:"
        yield from (f"  {line}" for line in histogram(report["prompt_tokens"]))
    if report.get("sampled"):
        yield f"{report['run']}: {format_count(report['sampled'], 'task')} sampled, {report['solved']:.0%} solved on average"
        yield f"  {format_count(report['always'], 'task')} always solved, {report['never']} never"
        learnable = report["groups"] - report["equal"]
        groups = format_count(report["groups"], "group")
        yield f"  {learnable} of {groups} have unequal rewards, so that GRPO can learn from them"


def _divided_rows(config: "DatasetConfig", share: float, seed: int) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield each row, and True if the row is held out."""
    from agentrl.workflow.dataset_rows.sources import read_source
    from agentrl.workflow.dataset_rows.splitting import is_held_out, question_key
    from agentrl.workflow.datasets import is_rows, jsonl

    if not is_rows(config.name):
        raise ConfigError(f"{config.name!r} cannot be split: its rows are generated.", "Name a file, a folder or OWNER/NAME.")
    problems: list[str] = []
    for row in read_source(config):
        values = dict(row.values or {})
        for task in islice(jsonl.read_tasks([row], config, problems), 1):
            yield values, is_held_out(question_key(task), share, seed)
    if problems:
        raise jsonl.malformed_error(config.name, problems, "Correct them.")
