"""Options that `agentrl sft` and `dpo` share (output folder, stored episodes, recipe), and the progress display."""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentrl.cli.console import console, format_duration, say, show, show_json
from agentrl.cli.resolve_targets import find_stored_start
from agentrl.workflow.config import MAX_DEVICES, NAME_PATTERN, build
from agentrl.workflow.errors import ConfigError, Stopped, did_you_mean
from agentrl.workflow.models.lookup import refuse_existing
from agentrl.workflow.resolve import read_yaml

if TYPE_CHECKING:
    from agentrl.workers.requests.stored_groups import StoredGroups
    from agentrl.workflow.stats.best_episodes import Candidate
    from agentrl.workflow.store.connect import Database
    from agentrl.workflow.training.offline_training import Recipe, Start, TrainedModel
    from agentrl.workflow.trajectory import Episode

RewardSet = Annotated[str | None, typer.Option(help="Reward set that ranks stored episodes [default].", show_default=False)]
StartPolicy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="RUN[@V]",
        help="With stored episodes: the policy to start from [that of their run].",
        show_default=False,
    ),
]


def _read_options_file(ctx: typer.Context, file: Path | None) -> Path | None:
    """Read options from a YAML file. They become the defaults of the options that the user did not type."""
    if file is None:
        return None
    options = {spelling.lstrip("-").replace("-", "_"): option.name for option in ctx.command.params for spelling in option.opts}
    values: dict[str, Any] = {}
    for key, value in read_yaml(file).items():
        name = options.get(key.replace("-", "_"))
        if name is None or name == "config":
            raise ConfigError(f"{str(file)!r} has an unknown option {key!r}.", did_you_mean(key, sorted(options)))
        values[name] = value
    ctx.default_map = values
    return file


OptionsFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        callback=_read_options_file,
        is_eager=True,
        help="YAML file with these options.",
        show_default=False,
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace a model of that name, or an interrupted training with other options.")
]
Optimizer = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="adamw, or adamw_8bit with 8-bit moments [adamw].", show_default=False),
]
SaveEvery = Annotated[
    int | None,
    typer.Option(
        metavar="STEPS",
        min=1,
        help="Steps between checkpoints; the same command resumes from the last [one per minute].",
        show_default=False,
    ),
]
Devices = Annotated[
    str, typer.Option(metavar="N|auto", help="Devices of this machine that train together; auto: all of its GPUs.")
]
OutputDir = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Folder of the new model [one in AGENTRL_HOME].", show_default=False),
]


@dataclass(frozen=True)
class OutputPlace:
    """The options for the model's folder, and for how often training writes a checkpoint."""

    name: str | None
    output_dir: Path | None
    force: bool
    save_every: int | None

    @property
    def writing_options(self) -> dict[str, Any]:
        """The keyword arguments that a training function takes about writing the model, except the folder."""
        return {"overwrite": self.force, "save_every": self.save_every}

    def of(self, default_name: str) -> Path:
        """Return the model's folder. If neither --name nor --output-dir is given, the folder has the name `default_name`."""
        if self.output_dir and self.name:
            raise ConfigError("--name and --output-dir exclude each other: both set the model's folder.", "Leave one out.")
        target = self.output_dir.expanduser() if self.output_dir else _named_folder(self.name, default_name)
        refuse_existing(target, self.force)
        return target


def _named_folder(own_name: str | None, default_name: str) -> Path:
    """Return the folder of this name in agentrl's models folder. Without `own_name`, use `default_name`."""
    from agentrl.workflow.settings import settings

    if own_name is not None and not re.fullmatch(NAME_PATTERN, own_name):
        raise ConfigError(f"--name {own_name!r} is not a valid name.", "Use at most 64 of a-z, 0-9, '.', '_' and '-'.")
    name = own_name or default_name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"{name!r} cannot be a model's name.", "Pass --name.")
    return settings().models_dir / name


def recipe_options(
    steps: int | None, batch_size: int | None, learning_rate: float | None, seed: int, pieces: int, optimizer: str | None
) -> dict[str, Any]:
    """Return the options that the user gave, by the field names of the recipe. `pieces` is the minimum number of microbatches
    per step.
    """
    if learning_rate is not None and not 0 < learning_rate < float("inf"):
        raise ConfigError(f"--learning-rate must be above 0, not {learning_rate:g}.")
    values: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate, "seed": seed}
    values["gradient_accumulation_steps"] = pieces
    values["optimizer"] = build({} if optimizer is None else {"update.optimizer": optimizer}).update.optimizer
    return {key: value for key, value in values.items() if value is not None}


def parse_devices(devices: str) -> int | Literal["auto"]:
    """Return the value of --devices. Raise ConfigError if it is neither a number of devices nor auto."""
    try:
        return build({"update.devices": devices}).update.devices
    except ConfigError:
        message = f"--devices must be a number from 1 to {MAX_DEVICES}, or auto, not {devices!r:.40}."
        raise ConfigError(message, "For example --devices 2.") from None


def choose_devices(number: int | Literal["auto"], numerics: str) -> list[str]:
    """Return the devices that train together. Raise ConfigError if this machine does not have so many.

    Args:
        number: the value of --devices.
        numerics: `model.numerics`.
    """
    from agentrl.workflow.settings import settings

    if number == 1:  # torch is imported later
        return [settings().device]
    from agentrl.workflow.models.devices import devices_of_ranks

    return devices_of_ranks(number, settings().device, numerics, option="--devices ")


def refuse_options(options: Mapping[str, Any], why: str, hint: str) -> None:
    """If the user gave any of these options, raise ConfigError with their names."""
    names = [option for option, value in options.items() if value is not None]
    if names:
        raise ConfigError(f"{', '.join(names)}: {why}", hint)


@dataclass(frozen=True)
class StoredEpisodes:
    """Stored episodes to select from, and the weights to train on them."""

    db: "Database"
    groups: "StoredGroups"
    candidates: "list[Candidate]"

    @property
    def name(self) -> str:
        """The name of the run whose stored groups come first."""
        return str(self.groups.sources[0].row["name"])

    @property
    def start(self) -> "Start":
        """The weights from which training starts, with the config of their run."""
        from agentrl.workflow.training.offline_training import Start

        config = self.groups.config
        manifest = self.groups.sources[0].row["manifest"]
        return Start(config.model, self.groups.start, config.rollout.temperature, manifest)

    def recipe(self, examples: int, passes: int, options: Mapping[str, Any]) -> "Recipe":
        """Return the recipe for this number of examples and passes. The default learning rate is the run's."""
        from agentrl.workflow.training.offline_training import recipe_for

        rate = self.groups.config.update.learning_rate
        return replace(recipe_for(examples, passes, rate, options.get("batch_size")), **options)

    def episodes(self, chosen: "list[Candidate]") -> "list[Episode]":
        from agentrl.workflow.store import training_groups

        return training_groups.load_chosen_episodes(self.db, [one.id for one in chosen])


def find_stored(runs: list[str], reward_set: str | None, policy: str | None, least: int) -> StoredEpisodes:
    """Return the stored episodes of these runs from groups with at least `least` done episodes. Print remarks."""
    from agentrl.workers.requests.stored_groups import load_stored_groups
    from agentrl.workflow.store import training_groups

    db, start = find_stored_start(policy)
    source = build({"source.runs": runs, "source.reward_set": reward_set or "default"}).source
    groups = load_stored_groups(db, source, least, start)
    for remark in groups.remarks:
        say(remark)
    candidates = [
        one
        for run_groups in groups.sources
        for one in training_groups.load_candidates(db, run_groups.row["id"], run_groups.groups, source.reward_set)
    ]
    return StoredEpisodes(db, groups, candidates)


def train_with_progress(target: Path, training: "partial[TrainedModel]", devices: Sequence[str]) -> "TrainedModel":
    """Create the parent folder of the model. Then train with this machine's settings, and show the progress.

    With several devices, each has a process, and `training` has the form that `encode_training` takes.
    """
    from agentrl.workflow.settings import settings

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"Cannot create the folder {str(target.parent)!r}: {error.strerror}."
        raise ConfigError(problem, "Pass --output-dir, or set AGENTRL_HOME.") from error
    where = settings()
    try:
        with ProgressBar() as progress:
            if len(devices) == 1:
                return training(device=devices[0], threads=where.threads, progress=progress)
            from agentrl.workers.ranks.ranked_training import train_on_ranks

            return train_on_ranks(devices, training, progress)
    except Stopped as stopped:
        say(str(stopped))
        raise


def model_name(target: Path) -> str:
    """Return the name by which commands find the model: the name of its folder in agentrl's models folder, or else its path."""
    from agentrl.workflow.settings import settings

    return target.name if target.parent == settings().models_dir else str(target)


def say_next_steps(stored: StoredEpisodes, target: Path) -> None:
    """Print commands that use the new model."""
    dataset = stored.groups.config.dataset.name
    say(f"Evaluate it: agentrl eval --policy {model_name(target)} --dataset {dataset}")
    say(f"Train it: agentrl submit --dataset {dataset} --model {model_name(target)}")


def show_made(model: "TrainedModel", learned: str, more: Mapping[str, Any], as_json: bool) -> None:
    """Print the folder of the new model, and the text `learned`, which says what the model learned from."""
    left_out = "".join(f"; left out {count}: {why}" for why, count in model.left_out.items())
    say(f"Learned from {learned}{left_out}.")
    if not as_json:
        show(str(model.folder))
        return
    document = {"model": model.folder, "name": model.folder.name, "steps": model.recipe.steps, **model.metrics}
    show_json({**document, "examples": model.examples, "left_out": dict(model.left_out), **more})


class ProgressBar:
    """The progress of a training: a bar on a terminal, or else a line for every tenth of the steps."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._began, self._tokens, self._before = time.monotonic(), 0, 0

    def __enter__(self) -> "ProgressBar":
        if sys.stderr.isatty():
            from rich.progress import Progress as Bar

            self._bar = Bar(console=console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("reading", total=None)
        return self

    def __exit__(self, *ending: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begins(self, parameters: object, steps: int, done: int) -> None:
        """Print which parameters are trained, and from which step the training is resumed. Start the clock."""
        self._began, self._before = time.monotonic(), done
        say(str(parameters))
        if done:
            say(f"resuming at step {done} of {steps}")

    def step(self, done: int, steps: int, tokens: int, metrics: Mapping[str, float]) -> None:
        self._tokens += tokens
        seconds = time.monotonic() - self._began
        text = "  ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in metrics.items())
        pace = (
            f"{self._tokens / seconds:,.0f} tokens/s  {format_duration(seconds * (steps - done) / (done - self._before))} left"
        )
        if self._bar is not None:
            self._bar.update(self._task, total=steps, completed=done, description=f"{text}  {pace}")
        elif done == steps or done % max(1, steps // 10) == 0:
            say(f"step {done}/{steps}  {text}  {pace}")
