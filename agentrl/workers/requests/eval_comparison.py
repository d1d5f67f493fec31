"""Compares two evaluations. It decides which measures are comparable, and lists the causes, besides the policies, that may
explain a difference.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.runtime.shown_text import cell
from agentrl.workflow.stats.paired_test import PairedComparison, compare_paired
from agentrl.workflow.store.driver_reader import Queryable
from agentrl.workflow.store.reads import eval_results

Row = Mapping[str, Any]

SAME_REWARDS, OTHER_CODE, OTHER_REWARDS = 0, 1, 2
"""The degrees of similarity between the rewards of two evaluations. SAME_REWARDS: same rewards, weights and code. OTHER_CODE:
same rewards and weights, but different code. OTHER_REWARDS: different rewards or weights.
"""
MEASURES = ("difference", "low", "high", "interval_by", "p_value", "method", "won", "lost", "tied")
"""The fields of a comparison that the output contains."""


@dataclass(frozen=True, slots=True)
class Sides:
    """Two evaluations and their results on each task. Each tuple has the results of `one` first, then those of `other`.

    Args:
        one, other: the rows of the evaluations.
        means: the mean reward of each task, by the task's id; None for a task without a done episode.
        rights: the share of right episodes of each task, by the task's id; empty if no reward decides which episodes are right.
    """

    one: Row
    other: Row
    means: tuple[Mapping[int, float | None], Mapping[int, float | None]]
    rights: tuple[Mapping[int, float], Mapping[int, float]]

    @property
    def rewards(self) -> int:
        """The similarity of the rewards: SAME_REWARDS, OTHER_CODE or OTHER_REWARDS."""
        return compare_rewards(self.one, self.other)

    def compare_means(self, seed: int = 0) -> PairedComparison:
        """Compare the mean rewards on the tasks that have a mean on both sides."""
        first, second = (
            {task: mean for task, mean in side.items() if mean is not None and math.isfinite(mean)} for side in self.means
        )
        return compare_paired(first, second, seed)

    def compare_rights(self, seed: int = 0) -> PairedComparison:
        """Compare the shares of right episodes. The result has no tasks if no reward decides which episodes are right."""
        return compare_paired(*self.rights, seed)

    @property
    def same_rule(self) -> bool:
        """True if the same rewards decide on both sides which episodes are right."""
        return right_by_names(self.one) == right_by_names(self.other)


def load_sides(db: Queryable, one: Row, other: Row) -> Sides:
    """Load the results of two evaluations on each task.

    Args:
        one, other: the rows of the evaluations, as `find_evals` returns them.
    """
    means = (eval_results.load_task_means(db, one["id"]), eval_results.load_task_means(db, other["id"]))
    return Sides(one, other, means, (load_right_shares(db, one), load_right_shares(db, other)))


def load_right_shares(db: Queryable, row: Row) -> dict[int, float]:
    """Return the share of right episodes by task id; empty if no reward decides which episodes are right."""
    right = eval_results.find_right_episodes(db, row["iteration"])
    if right is None:
        return {}
    done = eval_results.load_done_episodes(db, row["id"])
    return {task: len(right.intersection(its)) / len(its) for task, its in done.items()}


def right_by_names(row: Row) -> list[str]:
    """Return the names of the rewards that decide whether an episode is right (see `stats.evaluation.is_right`)."""
    right_by = row["manifest"].get("right_by", {})
    if right_by.get("correct"):
        return sorted(right_by["correct"])
    weights = right_by.get("weights", row["weights"])
    max_weight = max(weights.values(), default=0.0)
    heaviest = sorted(name for name, weight in weights.items() if weight == max_weight > 0)
    return [*heaviest, f"env {row['config']['env']}"] if right_by.get("gives") else heaviest


def counted_rewards(row: Row) -> dict[str, float | str]:
    """Return the weights of the rewards that count, by the reward's name. If the env gives rewards itself, the key "env" has
    the env's name.
    """
    gives = row["manifest"].get("right_by", {}).get("gives")
    counting = {name: weight for name, weight in row["weights"].items() if weight}
    return {**counting, **({"env": row["config"]["env"]} if gives else {})}


def compare_rewards(one: Row, other: Row) -> int:
    """Return how similar the rewards of two evaluations are: SAME_REWARDS, OTHER_CODE or OTHER_REWARDS."""
    if counted_rewards(one) != counted_rewards(other):
        return OTHER_REWARDS
    same_weights = one["weights"] == other["weights"]  # the hash covers the weights too, even those of 0
    return OTHER_CODE if same_weights and one["code_hash"] != other["code_hash"] else SAME_REWARDS


def list_remarks(one: Row, other: Row, accuracies: bool) -> Iterator[str]:
    """Yield a sentence for each cause, besides the policies, that may explain a difference.

    Args:
        one, other: the rows of the evaluations.
        accuracies: whether the shares of right episodes are compared too.
    """
    from agentrl.workers.requests.eval_config import sampling_differences

    otherwise = sampling_differences(one["config"], other["config"]).items()
    if otherwise:
        differences = ", ".join(f"{key} {cell(a)} and {cell(b)}" for key, (a, b) in otherwise)
        yield f"They were sampled differently ({differences}), which may explain the difference."
    rewards = compare_rewards(one, other)
    if rewards == OTHER_CODE:
        yield "Their rewards were computed by different code, which may explain the difference."
    if rewards == OTHER_REWARDS:
        descriptions = "; ".join(f"{side} {_describe_rewards(row)}" for side, row in (("A", one), ("B", other)))
        instead = "accuracy is" if accuracies else "they have no other reward in common"
        yield f"Means are not compared: the rewards differ ({descriptions}); {instead}."
    if right_by_names(one) != right_by_names(other):
        yield "Accuracies are not compared: they come from different reward parts."


def _describe_rewards(row: Row) -> str:
    parts = counted_rewards(row).items()
    return ", ".join(f"env {value}" if name == "env" else f"{name} x {cell(value)}" for name, value in parts) or "none"
