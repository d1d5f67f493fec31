"""Finds the run, the episode and the policy that a command's arguments name, and the database if it exists."""

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from agentrl.cli.console import say

if TYPE_CHECKING:
    from agentrl.workflow.config import RunConfig
    from agentrl.workflow.store.driver_reader import Reader

NewestRun = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Name or number of the run [the newest that is no evaluation].",
        show_default=False,
    ),
]


def _episode_number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        from agentrl.workflow.errors import ConfigError

        run = shlex.quote(word) if len(word) <= 100 else "RUN"
        raise ConfigError(f"{word[:100]!r} is not an episode number.", f"List those of a run: agentrl episodes {run}") from None


GivenEpisode = Annotated[
    int, typer.Argument(metavar="EPISODE", help="Number of the episode.", show_default=False, parser=_episode_number)
]
LastEpisode = Annotated[
    int | None,
    typer.Argument(
        metavar="EPISODE",
        help="Number of the episode [the last one done in no evaluation].",
        show_default=False,
        parser=_episode_number,
    ),
]


Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Allow code from the model's folder to run.")]


def pick_run(db: Any, run: str | None) -> str:
    """Return `run`. If `run` is None, return the newest run that is not an evaluation, or else the newest evaluation, and print
    its name. Raise NotFoundError if there is no run.
    """
    from agentrl.workflow.errors import NotFoundError
    from agentrl.workflow.store.reads import run_rows

    name = run or run_rows.find_newest_run(db)
    if not name:
        raise NotFoundError("There is no run yet.", first_run_hint())
    if not run:
        say(f"The run: {name}")
    return name


def pick_episode(db: Any, episode: int | None) -> int:
    """Return `episode`. If it is None, return the last done episode and print its id and run. An episode of an evaluation is
    only returned if no other is done. Raise NotFoundError if no episode is done.
    """
    from agentrl.workflow.errors import NotFoundError
    from agentrl.workflow.store.reads import episode_rows

    if episode is not None:
        return episode
    last = episode_rows.find_last_episode(db)
    if last is None:
        raise NotFoundError("No episode is done yet.", "Follow the newest run: agentrl watch")
    number, run = last
    say(f"The episode: {number}, of the run {run}")
    return number


def existing_database() -> Any:
    """Return the database; None if it does not exist yet. So a command can check a request before it writes anything."""
    from agentrl.workers.stack.process import database
    from agentrl.workflow.settings import settings
    from agentrl.workflow.store.reads.user_sql import sqlite_file

    file = sqlite_file(settings())
    return None if file is not None and not file.exists() else database()


def existing_reader() -> "Reader | None":
    """Return a read-only database that opens quickly; None if the database does not exist yet."""
    from agentrl.workflow.settings import settings
    from agentrl.workflow.store.driver_reader import Reader
    from agentrl.workflow.store.reads.user_sql import sqlite_file

    file = sqlite_file(settings())
    return None if file is not None and not file.exists() else Reader(settings().database, _open_database)


def _open_database() -> Any:
    from agentrl.workers.stack.process import database

    return database()


def stored_reader() -> "Reader":
    """Return a read-only database for a command that shows stored rows. Raise NotFoundError if there is no database yet."""
    return existing_reader() or _refuse_empty()


def stored_database() -> Any:
    """Return the existing database. Raise NotFoundError if it does not exist; this function never creates it."""
    return existing_database() or _refuse_empty()


def _refuse_empty() -> NoReturn:
    from agentrl.workflow.errors import NotFoundError
    from agentrl.workflow.settings import settings

    raise NotFoundError(f"Nothing is stored in {str(settings().root)!r} yet.", first_run_hint())


def first_run_hint() -> str:
    """Return the commands for a first run. They work on every machine."""
    from agentrl.workflow.settings import settings

    has_model = (settings().models_dir / "tiny-arithmetic" / "config.json").is_file()
    model = "" if has_model else "agentrl sft --dataset arithmetic --model tiny, then "
    return f"Submit one: {model}agentrl submit --dataset arithmetic --model tiny"


def find_policy(policy: str) -> "tuple[RunConfig, Any]":
    """Return the run's config and the policy for `RUN[@VERSION|@best|@epochN]` or for a run's checkpoint folder. The texts in
    the config are those that the run's search chose.

    For a model, return the default config with this model, and None. Raise NotFoundError if the run or the version does not
    exist, and the text cannot be the name of a model.
    """
    from agentrl.workflow.config import build
    from agentrl.workflow.errors import NotFoundError
    from agentrl.workflow.experiment import Experiment
    from agentrl.workflow.store import run_names
    from agentrl.workflow.store.epoch_ends import Epoch
    from agentrl.workflow.store.reads.resource_rows import load_current_texts

    db = existing_reader()
    at = _policy_of_checkpoint(db, policy)
    name, _, word = at.partition("@") if at else policy.partition("@")
    version = run_names.parse_version(word) if word else None
    if db is not None:
        try:
            run = run_names.find_run(db, name)
        except NotFoundError:
            if version is not None:
                raise
        else:
            ref = run_names.find_stored_policy(db, name, version)
            if isinstance(version, Epoch):
                _link_again(db, run["id"])
            config = Experiment.load(run["config"]).config
            return config.model_copy(update={"resources": load_current_texts(db, run["name"], run["config"])}), ref
    if version is not None:
        raise NotFoundError(f"There is no run {name!r}.", "List them with `agentrl runs`.")
    if not _may_be_a_model(policy):
        raise NotFoundError(
            f"There is no run or model folder {policy!r}; hub models have a '/' in their name.",
            "List the runs: agentrl runs",
        )
    return build({"model.path": policy}), None


def find_trained_policy(policy: str, option: str) -> "tuple[RunConfig, Any, Mapping[str, Any]]":
    """Return the config of the run that trained a policy, the policy, and the run's manifest.

    Args:
        policy: RUN or RUN@VERSION.
        option: the command-line option that has this value, for the error message.

    Raises:
        NotFoundError: the run or the version does not exist.
        ConfigError: `policy` is the name of a model.
    """
    from agentrl.workflow.errors import ConfigError
    from agentrl.workflow.store import run_names

    config, ref = find_policy(policy)
    if ref is None:
        raise ConfigError(f"{policy!r} is not a run's policy.", f"Pass {option} RUN or {option} RUN@3.")
    return config, ref, run_names.find_run(stored_reader(), str(config.name))["manifest"]


def is_stored_policy(text: str) -> bool:
    """Return True if the text names a run's policy (`RUN@N`, a checkpoint folder, or `RUN`), and False if it names a model.
    Raise NotFoundError if the text names a checkpoint that belongs to no run in this database.
    """
    from pathlib import Path

    from agentrl.workflow.settings import is_url
    from agentrl.workflow.store import run_names

    db = existing_reader()
    if _policy_of_checkpoint(db, text):
        return True
    if is_url(text) or Path(text).expanduser().exists():
        return False
    return "@" in text or (db is not None and not _may_be_a_model(text) and run_names.is_run(db, text))


def find_stored_start(policy: str | None) -> tuple[Any, Any]:
    """Return the database and the policy from which training starts. The policy is None if training starts from the policy of
    the episodes. Raise NotFoundError if there is no database yet, or the run does not exist. Raise ConfigError if the policy
    does not belong to a run.
    """
    from agentrl.workflow.errors import NotFoundError

    db = existing_database()
    if db is None:
        raise NotFoundError("There are no stored episodes yet: no run exists.", first_run_hint())
    return db, find_trained_policy(policy, "--policy")[1] if policy else None


def _may_be_a_model(name: str) -> bool:
    """Return True if the name is that of a local model folder, or may be that of a hub model."""
    from pathlib import Path

    from agentrl.workflow.models.lookup import TINY
    from agentrl.workflow.settings import settings

    return name == TINY or "/" in name or (settings().models_dir / name).is_dir() or Path(name).expanduser().is_dir()


def _link_again(db: Any, run_id: int) -> None:
    """Create missing links to the checkpoints with which the run's epochs ended."""
    from contextlib import suppress

    from agentrl.workflow.checkpoints.epoch_links import link_epochs
    from agentrl.workflow.store import epoch_ends

    with suppress(OSError):  # a user who may not write there needs no links
        link_epochs(epoch_ends.load_epoch_ends(db, run_id))


def _policy_of_checkpoint(db: Any, policy: str) -> str:
    """Return `RUN@VERSION` for the checkpoint at this path; empty if the path is not that of a checkpoint."""
    import os
    from pathlib import Path

    from agentrl.workflow.checkpoints import MANIFEST, MAX_NAME, STATE
    from agentrl.workflow.checkpoints.epoch_links import epoch_number
    from agentrl.workflow.errors import NotFoundError
    from agentrl.workflow.settings import is_url, settings
    from agentrl.workflow.store import epoch_ends, run_names

    if "\0" in policy or max(len(os.fsencode(part)) for part in policy.split("/")) > MAX_NAME:
        raise NotFoundError(f"No run or model is called {policy!r:.80}.", "List the runs: agentrl runs")
    typed = Path(policy).expanduser()
    typed = typed if typed.exists() or not (settings().root / typed).parent.is_dir() else settings().root / typed
    folder, epoch = typed.resolve(), epoch_number(typed.name)
    if db is not None and epoch is not None:  # the link may not exist yet, or lead to an older run's folder
        run = epoch_ends.find_run_of_folder(db, str(typed.parent.resolve()))
        if run:
            return f"{run}@epoch{epoch}"
    is_checkpoint = not is_url(policy) and (folder / MANIFEST).is_file() and (folder / STATE).is_file()
    if not is_url(policy) and not is_checkpoint:
        return ""
    name = "" if db is None else run_names.find_policy_at(db, policy.rstrip("/") if is_url(policy) else str(folder))
    if not name:
        raise NotFoundError(
            f"{policy!r} is a checkpoint of a run that is not in this database, so its base model is unknown.",
            "Pass RUN@VERSION with the database of its run, or a model folder.",
        )
    return name


def find_trusted_policy(policy: str, trust: bool) -> "tuple[RunConfig, Any]":
    """Return the result of `find_policy`. The model's code may run if `trust` is true or the run had --trust-remote-code."""
    config, ref = find_policy(policy)
    trusted = config.model.trust_remote_code or trust
    return config.model_copy(update={"model": config.model.model_copy(update={"trust_remote_code": trusted})}), ref


def check_model_is_there(policy: str, config: "RunConfig", dataset: str = "") -> None:
    """If `policy` is the name of a model and not of a run's policy, check that the model exists. Raise ModelError if it does
    not exist. `tiny` is the model of `dataset`; if it is empty, of the config's dataset.
    """
    from agentrl.workflow.errors import ModelError
    from agentrl.workflow.models.lookup import existing_model

    try:
        existing_model(config.model.path, dataset or config.dataset.name)
    except ModelError as error:
        raise ModelError(f"No run or model is called {policy!r}: {error.message}", error.hint) from error
