"""The curves of a run: one row per iteration with all values that the charts show, and the run's evaluations. A few queries
compute the values of all iterations together, so hundreds of iterations can be read at once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from agentrl.workflow.store.driver_reader import Row, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.eval_results import MEASURED
from agentrl.workflow.store.reads.paging import storable_value
from agentrl.workflow.store.run_names import find_run

MAX_ITERATIONS = 1000
"""The maximum number of iterations in a response."""
MAX_EVALS = 2000
"""The maximum number of evaluations in a response; the newest versions are kept."""
OPEN = ("planned", "running")

_METRICS = {
    "loss": "the update's loss, mean over its optimizer steps",
    "kl": "KL to the reference, mean over tokens",
    "policy_kl": "KL to the policy before the update",
    "entropy": "entropy of the policy, mean over tokens",
    "clip_fraction": "share of tokens whose ratio was clipped",
    "grad_norm": "norm of the gradient before clipping",
    "value_loss": "the critic's loss",
    "explained_variance": "share of the returns' variance that the critic explains",
    "sampler_difference_mean": "mean difference between the sampler's logprobs and the trainer's",
    "sampler_difference_max": "the largest difference between the sampler's logprobs and the trainer's",
    "importance_outside": "share of tokens whose ratio of trainer to sampler is outside of [0.9, 1.1]",
    "importance_weight": "mean ratio of trainer to sampler, up to the cap",
    "importance_truncated": "share of tokens whose importance weight was cut",
    "effective_sample_size": "effective sample size of the importance weights, as a share of the tokens",
    "log_ratio_clamped": "share of tokens whose log ratio was clamped to +-20",
}
COLUMNS: Mapping[str, str] = {
    "iteration": "the iteration's number in its run, from 1",
    "status": "planned, running, done, cancelled",
    "skipped": "why no step was made; empty: one was made",
    "started_at": "when its rollouts began",
    "finished_at": "when its update ended",
    "reward": "mean reward of its episodes",
    "reward_low": "the reward less one standard deviation of its groups' means",
    "reward_high": "the reward and one standard deviation of its groups' means",
    "groups": "number of groups, sampled or stored ones",
    "flat_groups": "groups whose rewards are all equal",
    "dropped_groups": "groups not used for training",
    "episodes": "number of episodes",
    "trainable": "episodes that an update may use: done, and not tainted",
    **_METRICS,
    "tokens": "tokens read and sampled",
    "prompt_tokens": "tokens read",
    "sampled_tokens": "tokens sampled",
    "length": "sampled tokens per episode",
    "tool_calls": "number of tool calls",
    "tool_errors": "number of tool calls that failed",
    "tool_error_rate": "share of tool calls that failed",
    "staleness": "versions by which the trainer was ahead of the policy that sampled",
    "policy_version": "the policy that sampled",
    "seconds": "seconds from its first rollout to the end of its update",
    "rollout_seconds": "seconds until its last episode ended",
    "update_seconds": "seconds that its update took",
    "peak_memory_bytes": "peak GPU memory of its update",
    "tflops": "10**12 operations that the model needs, per second of the update",
    "mfu": "share of the GPU's peak rate that its update computed at",
}


@dataclass(frozen=True, slots=True)
class Curves:
    """Some iterations of a run in order, and all of its evaluations.

    Args:
        rows: one row per iteration, with a value for each of COLUMNS.
        cursor: the value to pass as `after` in a later read: the number, counted from 1, of the iteration before the first open
            iteration.
        more: True if there are already further iterations. To read them, pass the number of the last row as `after`.
    """

    rows: list[list[Any]]
    evals: list[dict[str, Any]]
    cursor: int
    more: bool


@sql_read_transaction
def load_curves(tx: Any, run: str, after: int = 0, limit: int = MAX_ITERATIONS) -> Curves:
    """Return the curves of a run. Raise NotFoundError if there is no such run.

    Args:
        after: return only iterations with a greater number, counted from 1.
        limit: the maximum number of iterations.
    """
    run_row = find_run(tx, run, "id, kind, reward_set")
    run_id = run_row["id"]
    after = max(0, storable_value(after))
    iterations = select_rows(tx, _ITERATIONS, id=run_id, after=after, limit=limit + 1)
    page = iterations[:limit]
    last = page[-1]["iteration"] if page else after
    sums = {part: _by_iteration(tx, query, run_id, after, last) for part, query in _SUMS.items()}
    rows = [_curve_row(run_row, row, *(sums[part].get(row["iteration"], {}) for part in _SUMS)) for row in page]
    closed = next((row["iteration"] - 1 for row in page if row["status"] in OPEN), last)
    return Curves(rows, load_run_evals(tx, run_id), closed, len(iterations) > limit)


_ITERATIONS = """
    SELECT i.number + 1 AS iteration, i.status, i.skipped, i.started_at, i.rolled_out_at, i.finished_at,
           i.mean_reward AS reward, i.dropped_groups, i.episodes, i.trainable, i.prompt_tokens, i.sampled_tokens, i.tool_calls,
           i.tool_errors, i.update_seconds, i.peak_memory_bytes, i.tflops, i.mfu, p.version AS policy_version
    FROM iterations i JOIN policies p ON p.id = i.policy_id
    WHERE i.run_id = :id AND i.number >= :after ORDER BY i.number LIMIT :limit"""

_DISTANCE = "(g.mean_reward - i.mean_reward)"
_SQUARE = f"CASE WHEN abs({_DISTANCE}) < 1e-150 THEN 0.0 WHEN abs({_DISTANCE}) <= 1e150 THEN {_DISTANCE} * {_DISTANCE} END"
"""The SQL for the square of a distance. Small distances are treated as 0, because Postgres raises an error if a result
underflows a float, even inside `avg`. Distances whose square would overflow are left out.
"""
_GROUP_SUMS = f"""
    SELECT i.number, count(*) AS groups, count(*) FILTER (WHERE g.std_reward = 0) AS flat_groups,
           avg(CASE WHEN abs({_DISTANCE}) <= 1e150 THEN {_DISTANCE} END) AS distance, avg({_SQUARE}) AS square
    FROM {{members}} WHERE i.run_id = :id AND i.number >= :after AND i.number < :last GROUP BY i.number"""
_OWN = "iterations i JOIN groups g ON g.iteration_id = i.id"
_STORED = "iterations i JOIN iteration_groups l ON l.iteration_id = i.id JOIN groups g ON g.id = l.group_id"
_AVERAGES = ", ".join(
    f"{f'max(u.{name})' if name.endswith('_max') else f'sum(u.{name}) / count(u.{name})'} AS {name}" for name in _METRICS
)
_SUMS = {
    "own": _GROUP_SUMS.format(members=_OWN),
    "stored": _GROUP_SUMS.format(members=_STORED),
    "update": f"""
        SELECT i.number, {_AVERAGES} FROM iterations i JOIN updates u ON u.iteration_id = i.id
        WHERE i.run_id = :id AND i.number >= :after AND i.number < :last GROUP BY i.number""",
}
"""Sums by iteration. They are grouped by the number, in whose order an index has the iterations: nothing is sorted."""


def _by_iteration(tx: Any, query: str, run_id: int, after: int, last: int) -> dict[int, Row]:
    return {row["number"] + 1: row for row in select_rows(tx, query, id=run_id, after=after, last=last)}


def _curve_row(run: Row, row: Row, own: Row, stored: Row, update: Row) -> list[Any]:
    groups, by_default = own or stored, bool(own) or run["reward_set"] == "default"  # groups know the rewards of no other set
    spread, closed = _deviation(groups) if by_default else None, row["status"] not in OPEN and run["kind"] != "serve"
    low, high = (None, None) if spread is None or row["reward"] is None else (row["reward"] - spread, row["reward"] + spread)
    sums = {name: row[name] if closed else None for name in ("prompt_tokens", "sampled_tokens", "tool_calls", "tool_errors")}
    values: dict[str, Any] = {
        **row,
        **{name: update.get(name) for name in _METRICS},
        **sums,
        "reward_low": low,
        "reward_high": high,
        "groups": groups.get("groups", 0),
        "flat_groups": groups.get("flat_groups", 0) if by_default else None,
        "tokens": row["prompt_tokens"] + row["sampled_tokens"] if closed else None,
        "length": _share(sums["sampled_tokens"], row["episodes"]),
        "tool_error_rate": _share(sums["tool_errors"], row["tool_calls"]),
        "staleness": row["iteration"] - 1 - row["policy_version"] if own and run["kind"] == "train" else None,
        "seconds": _seconds(row["started_at"], row["finished_at"]),
        "rollout_seconds": _seconds(row["started_at"], row["rolled_out_at"]),
    }
    return [values[name] for name in COLUMNS]


def _deviation(groups: Row) -> float | None:
    if groups.get("distance") is None:
        return None
    return math.sqrt(max(0.0, groups["square"] - groups["distance"] * groups["distance"]))


def _share(part: float | None, whole: int) -> float | None:
    return None if part is None or not whole else part / whole


def _seconds(start: datetime | None, end: datetime | None) -> float | None:
    return None if start is None or end is None else (end - start).total_seconds()


def load_run_evals(tx: Any, run_id: int) -> list[dict[str, Any]]:
    """Return the finished evaluations of the run's policies, ordered by version. Call this inside a transaction."""
    query = f"""
        SELECT m.version, v.dataset, v.split, v.mean_reward, v.low, v.high, v.interval_by, m.run_id, r.finished_at
        FROM ({MEASURED}) m JOIN evals v ON v.run_id = m.run_id JOIN runs r ON r.id = m.run_id
        ORDER BY m.version DESC, m.run_id DESC LIMIT :limit"""
    return [dict(row) for row in reversed(select_rows(tx, query, id=run_id, limit=MAX_EVALS))]
