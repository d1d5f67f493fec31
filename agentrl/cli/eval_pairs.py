"""Selects the two evaluations that `agentrl compare` compares: the pair whose tasks, rewards and limits are most alike.

All runs with the same base have the same weights at version 0. So an evaluation of another run may measure the same policy.
Such an evaluation is used only if the policy's own evaluations are less alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any, Literal

from agentrl.cli.resolve_targets import find_policy, stored_reader
from agentrl.workers.requests.eval_comparison import compare_rewards
from agentrl.workflow.config import RunConfig, build
from agentrl.workflow.errors import ConfigError, NotFoundError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class EvaluationPair:
    """Two evaluations on the same split of a dataset.

    Attributes:
        one, other: the rows of the evaluations.
        newest: "yes" if both are the newest evaluations of their policies. Otherwise it says why the newest evaluations were
            not chosen: they differ in "tasks", "rewards" or "limits".
    """

    one: Row
    other: Row
    newest: Literal["yes", "tasks", "rewards", "limits"] = "yes"

    @property
    def rewards(self) -> int:
        """The similarity of the rewards: SAME_REWARDS, OTHER_CODE or OTHER_REWARDS."""
        return compare_rewards(self.one, self.other)


@dataclass(frozen=True)
class _Candidate:
    row: Row
    foreign: bool


def find_pair(first: str, second: str, dataset: str | None, split: str | None) -> EvaluationPair:
    """Return the pair of evaluations that is most alike.

    Pairs with equal tasks come first, then pairs with similar rewards, then pairs with equal sampling options. If several pairs
    remain, pairs without an evaluation of another run come first, then the newest pair.

    Args:
        first, second: an evaluation, or a policy in a form that `find_policy` accepts.
        dataset, split: use only evaluations on this dataset and split.

    Raises:
        NotFoundError: a name has no evaluation.
        ConfigError: the two names have no evaluation on the same split of the same dataset, or both name the same evaluation.
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
            raise NotFoundError(f"{name!r} has no finished evaluation{where}.", f"agentrl eval --policy {name}{there}")
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
        raise ConfigError(
            f"{first!r} was measured on {_split_name(one)} and {second!r} on {_split_name(other)}.",
            f"Evaluate it there too: agentrl eval --policy {second}{_same_tasks_options(one, len(tasks(one['id'])))}",
        )
    different = [(a, b) for a, b in pairs if a.row["id"] != b.row["id"]]
    if not different:
        row = pairs[0][0].row
        again = _same_tasks_options(row, len(tasks(row["id"])))
        raise ConfigError(
            f"{first!r} and {second!r} have the same evaluation, {row['run']}: there is nothing to compare.",
            f"The weights are the same. Evaluate them again: agentrl eval --policy {second}{again}",
        )
    return different


def _find_candidates(name: str, dataset: str | None) -> Sequence[_Candidate]:
    """Return the evaluations that a name refers to, newest first."""
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
    """Return True if the evaluation belongs to a run other than the config's. The config of a plain model has no name, so every
    run is another run.

    An evaluation that a user started records the run of the policy. Older evaluations do not; if their rewards differ from the
    config's, they belong to another run.
    """
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
    """Return the options with which `agentrl eval` uses the same tasks."""
    return f" --dataset {row['dataset']} --split {row['split']} -n {tasks}"
