"""The request of `agentrl serve`: how the policy samples for clients, and what is stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workers.requests.eval_config import LOOP_KEYS, SINGLE_PASS, sampling_values
from agentrl.workers.requests.submit import manifest
from agentrl.workflow.config import CLIENTS, RunConfig, build
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.store import planning
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.imported_runs import EXACT
from agentrl.workflow.store.planning import Submission
from agentrl.workflow.store.served_runs import KEEP_DAYS
from agentrl.workflow.trajectory import PolicyRef, Task

MAX_CALLS = 1000
"""The most requests of one episode; the client's next request begins another episode."""
MAX_TURN = 131_072
"""The most tokens of a turn, unless the client sets a lower limit. The model's context window may end the turn earlier."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The options of a served policy.

    Args:
        key: the API key that clients must send; if it is empty, every client on this machine is accepted.
        idle_seconds: the time without a request, in seconds, after which an episode ends.
        keep_days: the number of days for which episodes are kept; None for ever.
        origins: the origins of web pages that may read responses.
        has_upstream: True if the user named the server that samples by `--upstream`.
    """

    key: str = ""
    idle_seconds: float = 600.0
    keep_days: float | None = None
    records: bool = True
    origins: frozenset[str] = frozenset()
    has_upstream: bool = False

    @property
    def forgets(self) -> bool:
        """True if an episode is deleted as soon as it ends."""
        return not self.records or self.keep_days == 0


def serve_config(config: RunConfig, name: str | None, rollout: Mapping[str, Any]) -> RunConfig:
    """Return the config of a served policy: the model and the sampling options of its run, without rewards. `rollout` has
    sampling options that replace those of the run.
    """
    default = RunConfig().flat()
    left_out = ("env", "rewards", "hooks", "output_dir", *LOOP_KEYS, *(key for key in default if key.startswith("dataset.")))
    values = {**sampling_values(config), **SINGLE_PASS, **{key: default[key] for key in left_out}, "name": name}
    values |= {key: value for key, value in default.items() if key.startswith("agent.")}
    values |= {"agent.name": CLIENTS, "agent.max_calls": MAX_CALLS, "agent.own_rewards": True}
    values |= {"rollout.max_new_tokens": MAX_TURN, "rollout.group_size": 1, "rollout.tasks_per_iteration": 1}
    return build(values | {f"rollout.{key}": value for key, value in rollout.items() if value is not None})


def serve_submission(db: Database, config: RunConfig, policy: PolicyRef, of: str, keep_days: float | None) -> Submission:
    """Return the submission of a served policy. `of` is the name of the policy's run; empty if the policy belongs to no run.
    Episodes are kept for `keep_days`.
    """
    retention = {} if keep_days is None else {KEEP_DAYS: keep_days}
    tokens = {} if Experiment(config).engine.logprobs else {EXACT: False}
    return recorded_submission(db, "serve", config, policy, {"of": of} | retention | tokens)


def recorded_submission(
    db: Database | None,
    kind: str,
    config: RunConfig,
    policy: PolicyRef,
    more_manifest: Mapping[str, Any],
    tasks: Sequence[Task] = (),
    weights: Mapping[str, float] | None = None,
) -> Submission:
    """Return the submission of a run that plans no episodes: the caller adds the episodes later. If the config has no name, the
    run is named after its kind.

    Args:
        db: the database in which a free name is looked up; None if it does not exist yet.
        kind: the run's kind.
        policy: the policy that sampled or samples the episodes.
        more_manifest: entries that are added to the usual manifest.
        tasks: the tasks of the episodes.
        weights: the weights of the rewards that come with the episodes; None for those of the config.
    """
    experiment = Experiment(config)
    unnamed = Submission(
        name="",
        kind=kind,
        config=config.model_dump(mode="json"),
        manifest=manifest(config) | dict(more_manifest),
        policy=policy,
        tasks=tasks,
        dataset="",
        seed=config.seed,
        epochs=1,
        tasks_per_iteration=1,
        group_size=1,
        weights=experiment.weights if weights is None else weights,
        code_hash=experiment.scoring_hash(),
        stem="" if config.name else kind,
    )
    free = f"{kind}-1" if db is None else planning.find_free_name(db, kind)
    return unnamed.with_name(config.name or free)
