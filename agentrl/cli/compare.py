"""`agentrl compare`: compares two evaluations task by task, and tests whether chance explains the difference."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.console import Json, format_interval, say, show, show_json
from agentrl.cli.eval_pairs import EvaluationPair, find_pair
from agentrl.cli.resolve_targets import stored_reader
from agentrl.workers.requests.eval_comparison import (
    MEASURES,
    OTHER_REWARDS,
    counted_rewards,
    list_remarks,
    load_sides,
    right_by_names,
)
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.runtime.shown_text import cell

if TYPE_CHECKING:
    from agentrl.workflow.stats.paired_test import PairedComparison


def _side_argument(which: str) -> Any:
    help_text = f"The {which}: an evaluation's run, or a policy (its newest evaluation of the same tasks)."
    return typer.Argument(metavar="EVAL|POLICY", help=help_text, show_default=False)


def compare(
    first: Annotated[str, _side_argument("one")],
    second: Annotated[str, _side_argument("other")],
    dataset: Annotated[str | None, typer.Option(help="Only evaluations on this dataset.", show_default=False)] = None,
    split: Annotated[str | None, typer.Option(help="Only evaluations on this split.", show_default=False)] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the test, used if there are too many sign flips to count them all.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Compare two policies on the tasks that both were measured on: B - A, with a paired sign-flip permutation test.

    The p-value is the probability of a difference at least this large if the two policies were equally good.
    """
    pair = find_pair(first, second, dataset, split)
    one, other = pair.one, pair.other
    sides = load_sides(stored_reader(), one, other)
    means = sides.means
    if means[0].keys() != means[1].keys():
        shared = len(means[0].keys() & means[1].keys())
        raise ConfigError(
            f"{one['run']} has {len(means[0])} tasks and {other['run']} {len(means[1])}, of which {shared} are the same.",
            f"Measure one again: agentrl eval --policy {second} --dataset {one['dataset']} --split {one['split']} "
            f"-n {len(means[0])}",
        )
    document = _document(pair, sides.compare_means(seed), sides.compare_rights(seed), len(means[0]))
    if as_json:
        show_json(document)
    else:
        _show_comparison(document)
    for remark in _list_remarks(pair, document):
        say(remark)


def _list_remarks(pair: EvaluationPair, document: Mapping[str, Any]) -> Iterator[str]:
    """Yield one sentence for each cause, other than the policies, that may explain the difference."""
    if pair.newest != "yes":
        evaluations = " and ".join(f"{row['run']} of {cell(row['created_at'])}" for row in (pair.one, pair.other))
        yield f"Their newest evaluations differ in {pair.newest}; compared are the newest that agree: {evaluations} (UTC)."
    yield from list_remarks(pair.one, pair.other, bool(document["accuracy"]))


def _document(pair: EvaluationPair, rewards: "PairedComparison", rights: "PairedComparison", tasks: int) -> dict[str, Any]:
    """Return the JSON document.

    If the two evaluations have different rewards, the measures of the difference are null. If different reward parts decide
    correctness, `accuracy` is null.
    """
    accuracies = (rights.first, rights.second) if rights.tasks else (None, None)
    sides = {
        side: {
            **{"run": row["run"], "mean": mean, "accuracy": accuracy, "episodes": row["episodes"], "errors": row["errors"]},
            "rewards": counted_rewards(row),
        }
        for side, row, mean, accuracy in zip(
            "ab", (pair.one, pair.other), (rewards.first, rewards.second), accuracies, strict=True
        )
    }
    comparable = bool(rights.tasks) and right_by_names(pair.one) == right_by_names(pair.other)
    return {
        "dataset": pair.one["dataset"],
        "split": pair.one["split"],
        **sides,
        "tasks": rewards.tasks,
        "left_out": tasks - rewards.tasks,
        "rewards_differ": pair.rewards == OTHER_REWARDS,
        **{name: None if pair.rewards == OTHER_REWARDS else getattr(rewards, name) for name in MEASURES},
        "accuracy": {name: getattr(rights, name) for name in MEASURES} if comparable else None,
    }


def _show_comparison(comparison: Mapping[str, Any]) -> None:
    show(f"{comparison['tasks']} tasks of {comparison['dataset']} ({comparison['split']})")
    for side in ("a", "b"):
        row = comparison[side]
        measures = f"mean {cell(row['mean'])}  accuracy {cell(row['accuracy'])}  n {row['episodes']}  errors {row['errors']}"
        show(f"  {side.upper()}  {measures}  {row['run']}")
    rights = comparison["accuracy"]
    if not comparison["rewards_differ"]:
        show(f"  B - A  {_format_difference(comparison)}")
        show(f"  B better on {comparison['won']}, worse on {comparison['lost']}, equal on {comparison['tied']}")
    if rights:
        show(f"  B - A of accuracy  {_format_difference(rights)}")
        show(f"  B right more often on {rights['won']}, less on {rights['lost']}, as often on {rights['tied']}")
    if comparison["left_out"]:
        show(f"  {comparison['left_out']} tasks left out: one side has no done episode")


def _format_difference(measures: Mapping[str, Any]) -> str:
    return f"{cell(measures['difference'])}  {format_interval(measures)}  p {cell(measures['p_value'])} ({measures['method']})"
