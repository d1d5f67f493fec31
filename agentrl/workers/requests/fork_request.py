"""Forks: continuations of a stored episode from one of its steps on, with the same policy or another one. A fork run has one
group and makes no update. `submit --from-groups` trains on the group of a fork run.
"""

from dataclasses import dataclass, replace
from typing import Any

from agentrl.workers.requests.eval_config import SINGLE_PASS, sampling_values
from agentrl.workers.requests.submit import PreparedRun, manifest, submission_of
from agentrl.workflow.agent import QUESTION
from agentrl.workflow.config import CLIENTS, build
from agentrl.workflow.errors import ConfigError, ModelError, StateError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.forks import Fork, ForkPoint, load_fork_point
from agentrl.workflow.store.run_format import check_format
from agentrl.workflow.store.run_names import Version, find_stored_policy, parse_version
from agentrl.workflow.store.steps import load_requests
from agentrl.workflow.trajectory import Message, PolicyRef

OTHER_CODE = "The code of the rewards has changed since the parent was scored; parent and forks still share a group."


@dataclass(frozen=True)
class ForkRequest:
    """The request of an `agentrl fork` command.

    Args:
        episode, step: the id of the parent episode, and the first step that is sampled again.
        n: the number of forks.
        edit: a text that replaces the last message before the step; None to keep that message.
        policy: `RUN[@VERSION]`, or a version of the run whose policy sampled the step; None for the policy that sampled the
            step.
        with_parent: whether the group also contains the parent.
        name: the name of the fork run; None for a generated name.
    """

    episode: int
    step: int
    n: int
    edit: str | None = None
    policy: str | None = None
    with_parent: bool = False
    name: str | None = None


def prepare_fork(db: Database, request: ForkRequest) -> PreparedRun:
    """Check the request and build the submission of the fork run. Nothing is written. Raise NotFoundError, StateError,
    ConfigError, ModelError, CheckpointError if the request is invalid; the message says why.
    """
    if request.with_parent and request.edit is not None:
        raise ConfigError(
            "--with-parent and --edit-message exclude each other: parent and forks must have the same messages.",
            "Leave --with-parent or --edit-message out.",
        )
    point = load_fork_point(db, request.episode, request.step)
    check_format(point.run["name"], point.run["format"], "fork")
    parent = Experiment.load(point.run["config"])
    if parent.config.agent is not None:
        _check_agents_episode(db, request, parent.config.agent.name)
    elif parent.env.resumability == "restart" and request.step:
        raise ConfigError(
            f"The env {parent.config.env!r} cannot be rebuilt in the middle of an episode.", "Fork its first step: --step 0."
        )
    values = {"name": request.name, "output_dir": None, "rollout.group_size": request.n, "rollout.tasks_per_iteration": 1}
    config = build(sampling_values(parent.config) | SINGLE_PASS | values)
    experiment = Experiment(config, point.weights)
    submission = submission_of(
        db,
        experiment,
        "fork",
        _find_policy(db, request, point),
        f"{point.run['name'][:50]}-fork",
        manifest=manifest(config) | {"fork": _fork_origin(request)},
        tasks=(),
        code_hash=experiment.scoring_hash(),
        fork=Fork(request.episode, request.step, _opening_messages(request, point), request.with_parent),
    )
    unlike = request.with_parent and submission.code_hash != point.code_hash
    return PreparedRun(submission, experiment, remarks=(OTHER_CODE,) if unlike else ())


def _check_agents_episode(db: Database, request: ForkRequest, agent: str) -> None:
    """Check that the forks' agents can be answered from the episode up to the step. Raise StateError, ConfigError if not."""
    if agent == CLIENTS:
        message = f"Episode {request.episode} cannot be forked: an outside client made it, which agentrl cannot start again."
        raise StateError(message, "Continue training with its policy: --model RUN@N.")
    if request.edit is not None:
        raise ConfigError("--edit-message cannot be used with an agent: an agent writes its messages itself.", "Leave it out.")
    requests = load_requests(db, [request.episode]).get(request.episode, {})
    if any(step not in requests for step in range(request.step + 1)):
        message = f"Episode {request.episode} cannot be forked: the requests of its agent are not recorded."
        raise StateError(message, "Continue training with its policy: --model RUN@N.")
    first = max(step for step in range(request.step + 1) if "." not in requests[step].id)
    if first != request.step:
        raise StateError(
            f"Step {request.step} and step {first} answer the same request.",
            f"Fork the whole request: agentrl fork {request.episode} --step {first}",
        )


def _fork_origin(request: ForkRequest) -> dict[str, Any]:
    return {
        "episode": request.episode,
        "step": request.step,
        "edit": request.edit,
        "policy": request.policy,
        "with_parent": request.with_parent,
    }


def _opening_messages(request: ForkRequest, point: ForkPoint) -> tuple[Message, ...] | None:
    """Return the messages before the forked step if this request or the parent's edited them; else None."""
    if request.edit is None:
        first_own = point.episode.parent_id is not None and request.step == point.episode.fork_step
        return point.episode.steps[request.step].prompt if first_own else None
    read = point.episode.steps[request.step].prompt
    question = read[-1:] if len(read) > 1 and read[-1] == QUESTION else ()
    *others, last = read[: len(read) - len(question)]
    return (*others, replace(last, content=request.edit), *question)


def _parse_policy(policy: str, point: ForkPoint) -> tuple[str, Version]:
    run, at, word = policy.partition("@")
    if not at and run.removeprefix("v").isdecimal():
        run, at, word = point.policy_run, "@", run
    return run, parse_version(word) if at else None


def _find_policy(db: Database, request: ForkRequest, point: ForkPoint) -> PolicyRef:
    run, version = (
        _parse_policy(request.policy, point) if request.policy is not None else (point.policy_run, point.policy_version)
    )
    ref = find_stored_policy(db, run, version)
    if ref.base_hash != point.run["base_hash"]:
        raise ModelError(
            f"Policy {run}@{ref.version} has another base model than episode {request.episode}, and so other tokens.",
            "Choose a version of the episode's own run.",
        )
    return ref
