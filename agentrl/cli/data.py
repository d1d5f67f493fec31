"""`agentrl data check`: whether a dataset's tasks can be scored."""

from typing import Annotated

import typer

from agentrl.cli.output import Json, say, show, show_json
from agentrl.workflow.errors import ConfigError, DatasetError

data = typer.Typer(help="Check datasets.", no_args_is_help=True)


@data.callback()
def _group() -> None:
    """Check datasets."""


@data.command()
def check(
    dataset: Annotated[str, typer.Argument(metavar="FILE", help="A .jsonl file, the name of a dataset, or module:name.")],
    reward: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A reward to try; may be repeated [those of the dataset's env].", show_default=False),
    ] = None,
    split: Annotated[str, typer.Option(help="The split.")] = "train",
    as_json: Json = False,
) -> None:
    """Give each task's own reference as the answer; list the tasks for which that does not earn full marks."""
    from agentrl.workflow.config import DatasetConfig
    from agentrl.workflow.datasets import load_tasks
    from agentrl.workflow.plugins import find
    from agentrl.workflow.reference_check import comparing_rewards, reference_problems
    from agentrl.workflow.rewards import judges_of

    loaded = load_tasks(DatasetConfig(name=dataset, split=split))
    asked = tuple(reward or find("envs", loaded.env).rewards)
    names = comparing_rewards(asked)
    if not names:
        raise ConfigError(
            f"None of the rewards ({', '.join(asked) or 'none'}) compares an answer with a reference.",
            "Name one that does: --reward numeric_answer",
        )
    for judge in judges_of(dict.fromkeys(names, 1.0)).values():
        judge.check()
    problems = reference_problems(loaded.tasks, names)
    if as_json:
        show_json({"dataset": dataset, "tasks": len(loaded.tasks), "rewards": list(names), "problems": problems})
    else:
        for problem in problems:
            show(problem)
    if problems:
        message = f"{len(problems)} of {len(loaded.tasks)} tasks of {dataset!r} cannot be scored by {', '.join(names)}."
        raise DatasetError(message, "Correct these rows, or name another --reward.")
    say(f"{len(loaded.tasks)} tasks of {dataset!r} can be scored by {', '.join(names)}.")
