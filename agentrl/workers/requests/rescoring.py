"""Rescoring computes other rewards for stored episodes. All rewards are computed before anything is written."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentrl.workflow.config import NAME_PATTERN
from agentrl.workflow.errors import ConfigError, RewardError, StateError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.plugins import find
from agentrl.workflow.resolve import parse_weights
from agentrl.workflow.rewards import Part, code_hash, part_sum, score, total_reward
from agentrl.workflow.store import reward_sets, run_names
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.imported_runs import EXACT
from agentrl.workflow.store.run_format import check_format


def rescore(db: Database, run: str, rewards: Sequence[str], name: str | None) -> dict[str, Any]:
    """Add a reward set to the run, and return a summary.

    Args:
        rewards: the rewards as `NAME` or `NAME=WEIGHT`; a name may be `package.module:function`.
        name: the name of the reward set; None for a name made from the first reward's.

    Returns:
        A dict with these keys. `run`, `reward_set`: names. `episodes`: the number of rescored episodes. `changed`: the number
            of episodes whose reward differs from that of the default set. `mean_before`, `mean`: the mean rewards in the
            default set and in the new set. `parts`: each reward with its weight and mean. `trainable`: whether all tokens and
            logprobs are those of the sampler.

    Raises:
        ConfigError: a reward does not exist, or a name or weight is invalid.
        ConflictError: the run already has a reward set of that name.
        RewardError: a reward raised an exception; nothing was written.
        StateError: no episode of the run is done.
    """
    row = run_names.find_run(db, run)
    check_format(row["name"], row["format"], "rescore")
    weights = parse_weights(rewards)
    for reward in weights:
        find("rewards", reward)
    chosen = name if name is not None else _reward_set_name(next(iter(weights)))
    _check_name(chosen)
    limits = Experiment.load(row["config"]).config.rollout
    before: list[float] = []
    scored: dict[int, dict[str, Part]] = {}
    after: list[float] = []
    for episode in reward_sets.iterate_done_episodes(db, row["id"]):
        try:
            parts = score(replace(episode, limits=limits), weights)
            after.append(total_reward(parts, weights))
        except RewardError as error:
            problem = f"Episode {episode.id}: {' '.join(str(error).split())}"
            raise RewardError(problem, "Nothing was written. Correct the reward in its file, and rescore again.") from error
        scored[episode.id] = parts
        before.append(episode.reward or 0.0)
    if not after:
        raise StateError(f"No episode of {row['name']!r} is done.", f"Wait until some are done: agentrl watch {row['name']}")
    reward_sets.add_reward_set(db, row["id"], chosen, code_hash(weights), weights, scored)
    return {
        "run": row["name"],
        "reward_set": chosen,
        "episodes": len(after),
        "changed": sum(old != new for old, new in zip(before, after, strict=True)),
        "mean_before": _mean(before),
        "mean": _mean(after),
        "trainable": bool(row["manifest"].get(EXACT, True)),
        "parts": [
            {"part": part, "weight": weight, "mean": _mean([part_sum(parts[part]) for parts in scored.values()])}
            for part, weight in weights.items()
        ],
    }


def _reward_set_name(reward: str) -> str:
    return re.sub(r"[^a-z0-9._-]", "-", reward.rpartition(":")[2].lower()).lstrip("._-")[:64] or "rescored"


def _check_name(name: str) -> None:
    if name == "default" or not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(f"Invalid name of a reward set: {name!r}.", "Pass --name with a-z, 0-9, dots and dashes.")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
