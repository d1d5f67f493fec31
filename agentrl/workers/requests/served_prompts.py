"""`submit --from-episodes RUN` for a served run: the conversations that clients began become the tasks of a new run."""

from collections.abc import Mapping
from typing import Any

from agentrl.workflow.config import DatasetConfig, RunConfig, build
from agentrl.workflow.datasets import LoadedTasks, load_tasks
from agentrl.workflow.errors import ConfigError, DatasetError, NotFoundError
from agentrl.workflow.store import served_runs
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.forks import load_stored_run
from agentrl.workflow.store.run_names import find_run
from agentrl.workflow.trajectory import Task

EPISODES = "episodes:"
"""The prefix of the name of a dataset whose tasks are the prompts of a served run."""
PROMPT_ROLES = {"system", "user"}
REWARD_HINT = "Pass --reward module:function with a reward that needs no reference answers."
RUN_KEYS = ("source.runs", "source.groups", "source.reward_set")


def with_served_prompts(
    db: Database, config: RunConfig, origins: Mapping[str, str], policy: str | None
) -> tuple[RunConfig, dict[str, str]] | None:
    """Return the config of a run whose tasks are the prompts of the served run in `config.source`, and the origins of the
    config's values. Return None if the source is not a served run. If the user set no model, the served policy is trained.

    Args:
        db: the database.
        config: the request.
        origins: the origin of each value.
        policy: the policy to start from, if the user named one.

    Raises:
        NotFoundError: a run does not exist.
        ConfigError: the source mixes a served run with others, a dataset is named too, or nothing rewards an episode.
    """
    rows = [find_run(db, run) for run in config.source.runs]
    if not any(row["kind"] == "serve" for row in rows):
        return None
    name = rows[0]["name"]
    if len(rows) > 1 or config.source.groups or config.source.reward_set != "default":
        raise ConfigError(
            "The prompts of a served run cannot be mixed with other episodes.",
            f"Pass only --from-episodes {name}, without other runs, --from-groups and --reward-set.",
        )
    if origins["dataset.name"] != "default":
        raise ConfigError("--dataset and --from-episodes exclude each other.", "Leave one out.")
    if not (config.rewards or config.env or config.hooks or config.agent):
        raise ConfigError(f"The prompts of {name} have no reference answers, and the run has no reward.", REWARD_HINT)
    values = {"dataset.name": EPISODES + name, "env": config.env or "plain"}
    if policy or origins["model.path"] == "default":
        values["model.path"] = policy or _served_policy(db, rows[0])
    without = {key: value for key, value in RunConfig().flat().items() if key in RUN_KEYS}
    changed = {key: "--from-episodes" for key, value in values.items() if config.flat()[key] != value}
    return build(config.flat() | without | values), {**origins, **dict.fromkeys(RUN_KEYS, "default"), **changed}


def _served_policy(db: Database, run: Mapping[str, Any]) -> str:
    of = run["manifest"].get("of")
    version = load_stored_run(db, run["id"], (), "default", 1).version
    return f"{of}@{version}" if of else str(run["config"]["model"]["path"])


def load_run_tasks(db: Database | None, dataset: DatasetConfig, seed: int = 0) -> LoadedTasks:
    """Return the tasks of a dataset, which may be the prompts of a served run. See `load_tasks` and `load_prompts`."""
    return load_prompts(db, dataset) if dataset.name.startswith(EPISODES) else load_tasks(dataset, seed)


def load_prompts(db: Database | None, dataset: DatasetConfig) -> LoadedTasks:
    """Return the conversations that the clients of a served run began, each once, as tasks without references.

    A conversation is left out if it begins with messages of other roles than system and user.

    Raises:
        NotFoundError: there is no such run.
        DatasetError: the run is not a served run, or has no such conversation.
    """
    run = dataset.name.removeprefix(EPISODES)
    if db is None:
        raise NotFoundError(f"There is no run {run!r}.", "List them with `agentrl runs`.")
    row = find_run(db, run)
    if row["kind"] != "serve":
        name = row["name"]
        message = f"The run {name} was not made by `agentrl serve`, so it has no prompts of clients."
        raise DatasetError(message, f"To train on the stored episodes of {name}, pass --from-episodes {name}")
    tasks, skipped, repeated = dict[object, Task](), list[str](), 0
    for episode, step, messages in served_runs.load_prompts(db, row["id"]):
        if not messages or messages[-1].role != "user" or {message.role for message in messages} - PROMPT_ROLES:
            skipped.append(f"episode {episode}, step {step}: it does not begin with messages of the roles system and user")
        elif messages in tasks:
            repeated += 1
        else:
            tasks[messages] = Task(f"{row['name']}/{episode}.{step}", messages, "", {"episode": episode})
    if not tasks:
        raise DatasetError(f"{row['name']} has no conversation that begins with a message of the user.")
    return LoadedTasks(tuple(tasks.values())[: dataset.max_tasks], "plain", tuple(skipped), repeated)
