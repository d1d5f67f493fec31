"""`agentrl compare`: compares two evaluations task by task, and tests whether chance explains the difference. With
`--runs`: two runs, by config, numbers and tasks.

The command compares the pair of evaluations whose tasks, rewards and limits are most alike. All runs with the same base have
the same weights at version 0, so an evaluation of another run may measure the same policy. The evaluation of another run is
used only if the evaluations of the policy's own run are less alike.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentrl.cli.console import Json, format_interval, say, show, show_json, show_rows
from agentrl.cli.resolve_targets import find_policy, stored_reader
from agentrl.workers.requests.eval_comparison import (
    MEASURES,
    OTHER_REWARDS,
    compare_rewards,
    counted_rewards,
    list_remarks,
    load_sides,
    right_by_names,
)
from agentrl.workflow.config import RunConfig, build
from agentrl.workflow.errors import ConfigError, NotFoundError
from agentrl.workflow.runtime.shown_text import cell, format_count, one_line

if TYPE_CHECKING:
    from agentrl.workflow.stats.paired_test import PairedComparison


Row = Mapping[str, Any]
QUESTION_CHARS = 60


@dataclass(frozen=True)
class EvaluationPair:
    """Two evaluations on the same split of a dataset.

    Attributes:
        newest: "yes" if both are the newest evaluations of their policies. Otherwise "tasks", "rewards" or "limits": the newest
            evaluations differ in this respect, and so were not chosen.
    """

    one: Row
    other: Row
    newest: Literal["yes", "tasks", "rewards", "limits"] = "yes"

    @property
    def rewards(self) -> int:
        """The similarity of the rewards: SAME_REWARDS, OTHER_CODE or OTHER_REWARDS."""
        return compare_rewards(self.one, self.other)


class Unmeasured(NotFoundError):
    """A policy that has no finished evaluation."""


class NoEvaluationPair(ConfigError):
    """Two policies without two evaluations to compare: theirs are on different splits, or one evaluation is that of both."""


@dataclass(frozen=True)
class _Candidate:
    row: Row
    foreign: bool


def _side_argument(which: str) -> Any:
    help_text = f"The {which}: an evaluation's run, or a policy (its newest evaluation of the same tasks)."
    return typer.Argument(metavar="EVAL|POLICY", help=help_text, show_default=False)


def compare(
    first: Annotated[str, _side_argument("one")],
    second: Annotated[str, _side_argument("other")],
    dataset: Annotated[str | None, typer.Option(help="Only evaluations on this dataset.", show_default=False)] = None,
    split: Annotated[str | None, typer.Option(help="Only evaluations on this split.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the permutation test, used if there are many tasks.")] = 0,
    runs: Annotated[
        bool, typer.Option("--runs", help="Compare two runs instead: config, numbers, and the tasks of both.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare two policies on the tasks that both were measured on: B - A, with a paired sign-flip permutation test.

    The p-value is the probability of a difference at least this large if the two policies were equally good.
    """
    if runs:
        _compare_runs(first, second, as_json)
        return
    try:
        pair = find_pair(first, second, dataset, split)
    except Unmeasured as error:
        raise Unmeasured(error.message, f"{error.hint}{_runs_hint(first, second)}") from error
    one, other = pair.one, pair.other
    sides = load_sides(stored_reader(), one, other)
    means = sides.means
    if means[0].keys() != means[1].keys():
        shared = len(means[0].keys() & means[1].keys())
        count = format_count(len(means[0]), "task")
        raise ConfigError(
            f"{one['run']} has {count}, {other['run']} has {len(means[1])}, and they share {shared}.",
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


def _runs_hint(first: str, second: str) -> str:
    """Return how to compare two runs without evaluations; empty if one of the names is no run."""
    from agentrl.workflow.store import run_names

    try:
        for name in (first, second):
            run_names.find_run(stored_reader(), name)
    except NotFoundError:
        return ""
    return f"\nCompare their configs, numbers and sampled tasks: agentrl compare {first} {second} --runs"


def _compare_runs(first: str, second: str, as_json: bool) -> None:
    from dataclasses import asdict

    from agentrl.workflow.store.reads.run_differences import load_run_differences

    differences = load_run_differences(stored_reader(), first, second)
    if as_json:
        show_json(asdict(differences))
        return
    show(f"A {differences.runs[0]['run']}  B {differences.runs[1]['run']}")
    columns = ("one=A", "other=B")
    if {row["key"] for row in differences.config} == {"seed"}:
        say("Their configs are the same except for the seed.")
    if differences.config:
        values = [{"key": row["key"], "one": _short(row["one"]), "other": _short(row["other"])} for row in differences.config]
        show_rows(values, ("key=config", *columns))
    else:
        say("Their configs are the same.")
    show_rows(_name_missing_evaluations(differences.numbers), ("name=final number", *columns))
    if differences.tasks:
        tasks = [{**row, "question": one_line(row["question"], QUESTION_CHARS)} for row in differences.tasks]
        episodes = ("one_episode=episode of A", "other_episode=episode of B")
        iterations = ("one_iteration=iteration of A", "other_iteration=iteration of B")
        show_rows(tasks, ("task", "question", *columns, *iterations, *episodes), ("question",))
        say(
            "A and B are the mean rewards of the task where each run sampled it last, in `iteration of A` and `iteration of B`."
        )
        pair = f"{differences.tasks[0]['one_episode']} --diff {differences.tasks[0]['other_episode']}"
        say(f"The first difference of the first pair: agentrl replay {pair}")
    say(f"{len(differences.tasks)} of {format_count(differences.shared, 'task')} that both sampled have different rewards.")
    say(_policies_hint(*(row["run"] for row in differences.runs)))


def _name_missing_evaluations(numbers: Sequence[Row]) -> list[Row]:
    """Return the numbers of two runs, with "never evaluated" for the numbers of a run without an evaluation."""
    from agentrl.workflow.store.reads.run_differences import EVALUATIONS

    measured = [row for row in numbers if row["name"] in EVALUATIONS]
    never = {side: "never evaluated" for side in ("one", "other") if all(row[side] is None for row in measured)}
    return [{**row, **(never if row["name"] in EVALUATIONS else {})} for row in numbers]


def _policies_hint(first: str, second: str) -> str:
    """Return how to compare the policies of two runs on the same tasks."""
    compare_command = f"agentrl compare {first} {second}"
    try:
        find_pair(first, second, None, None)
    except Unmeasured as error:
        return f"To compare their policies on the same tasks, first: {error.hint}; then: {compare_command}"
    except NoEvaluationPair as error:
        return f"Their policies cannot be compared on the same tasks yet. {error}; then: {compare_command}"
    return f"Compare their policies on the same tasks: {compare_command}"


def _short(value: Any) -> str:
    if value is None:
        return "none"
    return one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), QUESTION_CHARS)


def _list_remarks(pair: EvaluationPair, document: Mapping[str, Any]) -> Iterator[str]:
    """Yield one sentence for each cause, other than the policies, that may explain the difference."""
    if pair.newest != "yes":
        evaluations = " and ".join(f"{row['run']} of {cell(row['created_at'])}" for row in (pair.one, pair.other))
        yield f"Their newest evaluations differ in {pair.newest}; compared are the newest that agree: {evaluations} (UTC)."
    yield from list_remarks(pair.one, pair.other, bool(document["accuracy"]))


def _document(pair: EvaluationPair, rewards: "PairedComparison", rights: "PairedComparison", tasks: int) -> dict[str, Any]:
    """Return the JSON document."""
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
    show(f"{format_count(comparison['tasks'], 'task')} of {comparison['dataset']} ({comparison['split']})")
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
        show(f"  {format_count(comparison['left_out'], 'task')} left out: one side has no done episode")


def _format_difference(measures: Mapping[str, Any]) -> str:
    return f"{cell(measures['difference'])}  {format_interval(measures)}  p {cell(measures['p_value'])} ({measures['method']})"


def find_pair(first: str, second: str, dataset: str | None, split: str | None) -> EvaluationPair:
    """Return the pair of evaluations that is most alike.

    Pairs with equal tasks come first, then pairs with similar rewards, then pairs with equal sampling options. If several pairs
    remain, evaluations of the policies' own runs are preferred, then newer evaluations. Raise Unmeasured if a name has no
    evaluation. Raise NoEvaluationPair if the two names have no evaluations on the same split of the same dataset, or only one
    evaluation, which is that of both.

    Args:
        first, second: an evaluation, or a policy in a form that `find_policy` accepts.
        dataset, split: use only evaluations on this dataset and split.
    """
    from agentrl.workers.requests.eval_config import stored_sampling_values
    from agentrl.workflow.store.reads import eval_results

    conditions = {key: value for key, value in (("dataset", dataset), ("split", split)) if value is not None}
    sides = [
        [candidate for candidate in _find_candidates(name, dataset) if conditions.items() <= dict(candidate.row).items()]
        for name in (first, second)
    ]
    tasks = cache(partial(eval_results.load_measured_tasks, stored_reader()))
    for name, mine, others in ((first, sides[0], sides[1]), (second, sides[1], sides[0])):
        if not mine:
            where = "".join(f" --{key} {value}" for key, value in conditions.items())
            there = _same_tasks_options(others[0].row, len(tasks(others[0].row["id"]))) if others else where
            raise Unmeasured(f"{name!r} has no finished evaluation{where}.", f"agentrl eval --policy {name}{there}")
    pairs = _pairs_on_one_split(first, second, sides, tasks)
    sampling = {candidate.row["id"]: stored_sampling_values(candidate.row["config"]) for side in sides for candidate in side}

    def unlike(pair: tuple[_Candidate, _Candidate]) -> tuple[bool, int, bool, int]:
        one, other = (candidate.row for candidate in pair)
        otherwise = sampling[one["id"]] != sampling[other["id"]]
        return (
            tasks(one["id"]) != tasks(other["id"]),
            compare_rewards(one, other),
            otherwise,
            sum(candidate.foreign for candidate in pair),
        )

    best = min(pairs, key=unlike)  # among equals the first, which is the newest
    newest = tuple(min(side, key=lambda candidate: candidate.foreign) for side in sides)
    if newest == best or newest[0].row["id"] == newest[1].row["id"]:
        return EvaluationPair(best[0].row, best[1].row)
    one, other = (candidate.row for candidate in newest)
    if tasks(one["id"]) != tasks(other["id"]):
        return EvaluationPair(best[0].row, best[1].row, "tasks")
    same_rewards = compare_rewards(one, other) == compare_rewards(best[0].row, best[1].row)
    return EvaluationPair(best[0].row, best[1].row, "limits" if same_rewards else "rewards")


def _pairs_on_one_split(
    first: str, second: str, sides: Sequence[Sequence[_Candidate]], tasks: Callable[[int], frozenset[int]]
) -> list[tuple[_Candidate, _Candidate]]:
    """Return the pairs of evaluations on the same split of a dataset. The exceptions are those of `find_pair`."""
    pairs = [(a, b) for a, b in product(*sides) if _dataset_and_split(a.row) == _dataset_and_split(b.row)]
    one, other = sides[0][0].row, sides[1][0].row
    if not pairs:
        again = _same_tasks_options(one, len(tasks(one["id"])))
        raise NoEvaluationPair(
            f"{first!r} was measured on {_split_name(one)}, and {second!r} on {_split_name(other)}.",
            f"Evaluate {second!r} on {_split_name(one)} too: agentrl eval --policy {second}{again}",
        )
    different = [(a, b) for a, b in pairs if a.row["id"] != b.row["id"]]
    if not different:
        row = pairs[0][0].row
        again = _same_tasks_options(row, len(tasks(row["id"])))
        raise NoEvaluationPair(
            f"{first!r} and {second!r} have the same weights, and only one evaluation: {row['run']}.",
            f"To see how much two evaluations of them differ, evaluate them again: agentrl eval --policy {second}{again}",
        )
    return different


def _find_candidates(name: str, dataset: str | None) -> Sequence[_Candidate]:
    from agentrl.workflow.models.lookup import TINY, starting_policy
    from agentrl.workflow.store.reads import eval_results

    try:
        its: Sequence[Row] = eval_results.find_evals(stored_reader(), name)
    except NotFoundError:
        its = []
    if its:
        return [_Candidate(row, False) for row in its]
    config, policy = find_policy(name)
    if policy is None and config.model.path == TINY:
        return _tiny_candidates([dataset] if dataset else eval_results.list_measured_datasets(stored_reader()))
    rows = eval_results.find_evals_of_policy(stored_reader(), policy or starting_policy(config.model.path, config.dataset.name))
    return [_Candidate(row, _is_foreign(row, config)) for row in rows]


def _tiny_candidates(datasets: Sequence[str]) -> list[_Candidate]:
    """Return the evaluations of the model "tiny" on each dataset. Every dataset has a different model of this name."""
    from agentrl.workflow.models.lookup import TINY, sft_model_name, starting_policy
    from agentrl.workflow.settings import settings
    from agentrl.workflow.store.reads import eval_results

    candidates = []
    for dataset in datasets:
        if (settings().models_dir / sft_model_name(TINY, dataset) / "config.json").is_file():
            config = build({"model.path": TINY, "dataset.name": dataset})
            rows = eval_results.find_evals_of_policy(stored_reader(), starting_policy(TINY, config.dataset.name))
            candidates += [_Candidate(row, _is_foreign(row, config)) for row in rows if row["dataset"] == dataset]
    return sorted(candidates, key=lambda candidate: -candidate.row["id"])


def _is_foreign(row: Row, config: RunConfig) -> bool:
    """Return True if the evaluation belongs to a run other than the config's."""
    if row["measures"] is not None:
        return bool(row["measures"] != config.name)
    if "of" in row["manifest"]:
        return bool(row["manifest"]["of"] != (config.name or ""))
    return bool(row["config"].get("rewards", {}) != config.rewards)


def _dataset_and_split(row: Row) -> tuple[str, str]:
    return row["dataset"], row["split"]


def _split_name(row: Row) -> str:
    return f"{row['dataset']} ({row['split']})"


def _same_tasks_options(row: Row, tasks: int) -> str:
    return f" --dataset {row['dataset']} --split {row['split']} -n {tasks}"
