"""`agentrl sft`: fine-tunes a model on demonstrations, or on the best stored episodes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentrl.cli.console import Json, say
from agentrl.cli.continued_policy import DEQUANTISED_NOTE, merge_base
from agentrl.cli.offline_options import (
    Devices,
    Force,
    Optimizer,
    OptionsFile,
    OutputDir,
    OutputPlace,
    RewardSet,
    SaveEvery,
    StartPolicy,
    StoredEpisodes,
    choose_devices,
    find_stored,
    model_name,
    parse_devices,
    recipe_options,
    refuse_options,
    say_next_steps,
    show_made,
    train_with_progress,
)
from agentrl.cli.options import RowsFilter, RowsMap
from agentrl.cli.resolve_targets import Trust, find_trained_policy, is_stored_policy
from agentrl.workflow.config import build
from agentrl.workflow.errors import ConfigError, DatasetError, StateError
from agentrl.workflow.runtime.gc_pause import pause_gc
from agentrl.workflow.runtime.shown_text import cell, format_count

if TYPE_CHECKING:
    from agentrl.workflow.config import DatasetConfig, ModelConfig
    from agentrl.workflow.training.offline_training import Recipe
    from agentrl.workflow.trajectory import PolicyRef


def sft(
    dataset: Annotated[str | None, typer.Option(help="Dataset with demonstrations [arithmetic].", show_default=False)] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "--model-path",
            help="tiny (a new small model), a folder, a hub name or RUN@V [tiny].",
            show_default=False,
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            "--epochs", "--num-epochs", min=1, help="Passes over the demonstrations, instead of --steps.", show_default=False
        ),
    ] = None,
    max_tasks: Annotated[
        int | None,
        typer.Option("--max-tasks", "--max-samples", min=1, help="Only the first N tasks of the dataset.", show_default=False),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of rows.")] = "train",
    map: RowsMap = None,
    filter: RowsFilter = None,
    lora_r: Annotated[
        int | None,
        typer.Option(min=0, help="LoRA rank; 0 trains all weights [8, or 0 below 50M parameters].", show_default=False),
    ] = None,
    lora_alpha: Annotated[float | None, typer.Option(help="LoRA's scale is alpha / r [16].", show_default=False)] = None,
    lora_dropout: Annotated[float | None, typer.Option(help="Dropout on the LoRA input [0].", show_default=False)] = None,
    lora_targets: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", help="Linear layers that LoRA trains, by name [all of the decoder].", show_default=False),
    ] = None,
    lora: Annotated[
        Literal["continue", "new"], typer.Option(help="LoRA of RUN@V: continue it, or merge it and start a new one.")
    ] = "continue",
    load_in_4bit: Annotated[
        bool, typer.Option("--load-in-4bit", help="Train LoRA on a 4-bit base; the new model has full precision.")
    ] = False,
    trust_remote_code: Trust = False,
    tool_format: Annotated[
        str | None,
        typer.Option(help="Tool call format [that of the model's chat template].", show_default=False),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Jinja file to use as the chat template.", show_default=False),
    ] = None,
    from_episodes: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="Train on a run's stored episodes instead; repeatable.", show_default=False),
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option(help="Only episodes with this reward or more.", show_default=False)
    ] = None,
    best: Annotated[int | None, typer.Option(min=1, help="Only the N best episodes per task.", show_default=False)] = None,
    reward_set: RewardSet = None,
    policy: StartPolicy = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps [tiny 400, else 200; episodes: 3 passes].", show_default=False)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Examples per step [tiny 32, else 16].", show_default=False)
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Peak learning rate [tiny 3e-3, else 2e-4 LoRA, 2e-5 full; episodes: the run's].", show_default=False
        ),
    ] = None,
    optimizer: Optimizer = None,
    gradient_accumulation_steps: Annotated[
        int, typer.Option(min=1, help="Minimum number of microbatches per step: less memory, the same gradient.")
    ] = 1,
    held_out: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of the demonstrations to hold out for measuring the loss.")
    ] = 0.0,
    devices: Devices = "1",
    seed: Annotated[int, typer.Option(min=0, help="Seed of new weights, the teacher and the order.")] = 0,
    name: Annotated[
        str | None, typer.Option(help="Name of the new model [MODEL-DATASET, RUN-sft].", show_default=False)
    ] = None,
    output_dir: OutputDir = None,
    save_every: SaveEvery = None,
    config: OptionsFile = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a model on demonstrations, or on stored episodes; prints the folder of the new model.

    Without --min-reward and --best the model learns from every finished episode, whatever its reward.
    """
    recipe = recipe_options(steps, batch_size, learning_rate, seed, gradient_accumulation_steps, optimizer)
    _check_options(min_reward, epochs, steps, held_out)
    chosen = {"--min-reward": min_reward, "--best": best, "--reward-set": reward_set, "--policy": policy}
    place = OutputPlace(name, output_dir, force, save_every)
    targets = tuple(name for text in lora_targets or () for name in text.split(","))
    parts = {"lora_r": lora_r, "lora_alpha": lora_alpha, "lora_dropout": lora_dropout, "lora_targets": targets or None}
    chat = {"tool_format": tool_format, "chat_template": chat_template}
    rows = {"split": split, "map": map, "filter": filter, "max_tasks": max_tasks}
    parts["load_in_4bit"] = load_in_4bit or None
    how = _LearningOptions(recipe, epochs, rows, parts, chat, lora, trust_remote_code, parse_devices(devices))
    of_dataset = {"--dataset": dataset, "--model": model, "--max-tasks": max_tasks, "--held-out": held_out or None}
    of_dataset |= {"--map": map, "--filter": filter, "--split": None if split == "train" else split}
    if not from_episodes:
        refuse_options(chosen, "for stored episodes only.", "Add --from-episodes RUN.")
        recipe["held_out"] = held_out
        _train_on_demonstrations(dataset or "arithmetic", model or "tiny", how, place, as_json)
        return
    of_dataset |= {"--lora": "new" if lora == "new" else None, "--trust-remote-code": trust_remote_code or None}
    refuse_options(of_dataset | how.of_model | how.of_chat, "not for stored episodes, which have their own.", "Leave it out.")
    stored = find_stored(from_episodes, reward_set, policy, least=1)
    _train_on_episodes(stored, min_reward, best, how, place, as_json)


@dataclass(frozen=True)
class _LearningOptions:
    """The options of a training."""

    recipe: Mapping[str, Any]
    epochs: int | None
    rows: Mapping[str, Any]
    parts: Mapping[str, Any]
    chat: Mapping[str, Any]
    lora: str
    trust_remote_code: bool
    devices: int | Literal["auto"]

    @property
    def of_model(self) -> dict[str, Any]:
        """The options that decide what trains, by flag; None for options that were not given."""
        return _as_flags(self.parts)

    @property
    def of_chat(self) -> dict[str, Any]:
        """The options for the chat format, by flag; None for options that were not given."""
        return _as_flags(self.chat)

    def model(self, path: str, trusted: bool) -> "ModelConfig":
        """Return the config's section `model`. Raise ConfigError if the options contradict the model or each other."""
        values = {**self.parts, **self.chat}
        keys = {f"model.{name}": value for name, value in values.items() if value is not None}
        return build({**keys, "model.path": path, "model.trust_remote_code": trusted}).model


def _as_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"--{name.replace('_', '-')}": value for name, value in values.items()}


def _check_options(min_reward: float | None, epochs: int | None, steps: int | None, held_out: float) -> None:
    """Raise ConfigError if a number is out of its range, or two options exclude each other."""
    if min_reward is not None and not isfinite(min_reward):
        raise ConfigError(f"--min-reward must be a finite number, not {min_reward:g}.", "Leave it out to take every episode.")
    if epochs is not None and steps is not None:
        raise ConfigError("--epochs and --steps exclude each other.", "Leave one out.")
    if not 0 <= held_out < 1:
        raise ConfigError(f"--held-out must be at least 0 and below 1, not {held_out:g}.", "For example 0.05: one in twenty.")


def _train_on_demonstrations(dataset: str, model: str, how: _LearningOptions, place: OutputPlace, as_json: bool) -> None:
    from agentrl.workflow.chat.templates import resolve_chat
    from agentrl.workflow.datasets import is_rows
    from agentrl.workflow.models.lookup import model_folder, resolve_model, sft_model_name
    from agentrl.workflow.training.demonstrations import find_demonstrations

    if place.name or place.output_dir:
        place.of("")  # before anything is merged
    options = {f"dataset.{name}": value for name, value in how.rows.items() if value is not None}
    rows = build({**options, "dataset.name": dataset}).dataset
    if not is_rows(dataset):
        own = {f"--{name}": how.rows[name] for name in ("map", "filter")}
        refuse_options(own, "for datasets from files, folders and the hub only.", "Leave it out.")
    demonstrations = find_demonstrations(rows)
    config, policy, manifest = _find_named_policy(model, how)
    devices = choose_devices(how.devices, config.numerics)
    path = policy.base if policy else model if model == "tiny" else resolve_model(config.path, dataset)
    at = None if path == "tiny" else model_folder(path, config.trust_remote_code)
    config = resolve_chat(config, at)
    target = place.of(sft_model_name(config.path.replace("@", "-v") if policy else path, dataset))

    with pause_gc():
        from agentrl.workflow.training.offline_training import Start
        from agentrl.workflow.training.supervised import sft as fine_tune

    start = Start(config, policy, manifest=manifest) if policy else None
    examples: Any = demonstrations if len(devices) == 1 else rows  # ranks read the rows themselves
    learn = partial(
        fine_tune,
        examples,
        model=path,
        target=target,
        recipe=_build_recipe(path, how, config),
        start=start,
        config=config,
        epochs=how.epochs,
        max_tasks=rows.max_tasks,
        **place.writing_options,
    )
    trained_model = train_with_progress(target, learn, devices)
    if config.load_in_4bit or config.load_in_8bit:
        say(DEQUANTISED_NOTE)
    show_made(trained_model, format_count(trained_model.examples, "demonstration"), {}, as_json)
    usual = model == "tiny" and not (place.name or place.output_dir)
    if isinstance(demonstrations, list) and not _has_references(rows):
        say(f"Chat with it: agentrl chat --model {model_name(target)}")
        say(f"Train it on a dataset with answers: agentrl submit --dataset NAME --model {model_name(target)}")
    else:
        say(f"Train it: agentrl submit --dataset {dataset} --model {'tiny' if usual else model_name(target)}")


def _has_references(rows: "DatasetConfig") -> bool:
    from agentrl.workflow.datasets import load_tasks

    try:
        return bool(load_tasks(rows).tasks)
    except DatasetError:
        return False


def _find_named_policy(model: str, how: _LearningOptions) -> "tuple[ModelConfig, PolicyRef | None, Mapping[str, Any]]":
    """Return the section `model`, the policy and the manifest for `RUN@V`."""
    if not is_stored_policy(model):
        if how.lora == "new":
            raise ConfigError("--lora new requires a run's policy.", "Write --model RUN@3, or leave --lora out.")
        if model == "tiny":
            refuse_options(how.of_model, "a new model trains all weights.", "Leave it out.")
        return how.model(model, how.trust_remote_code), None, {}
    if how.lora == "continue":
        options = how.of_model | how.of_chat
        refuse_options(options, "not for a run's policy, which has its own.", "Leave it out, or pass --lora new.")
    run_config, policy, manifest = find_trained_policy(model, "--model")
    if how.lora == "continue":
        return run_config.model.model_copy(update={"path": f"{run_config.name}@{policy.version}"}), policy, manifest
    merged = merge_base(run_config, policy, manifest).base
    return how.model(merged, run_config.model.trust_remote_code or how.trust_remote_code), None, {}


def _build_recipe(model: str, how: _LearningOptions, config: "ModelConfig") -> "Recipe":
    from agentrl.workflow.models.lookup import lora_rank, model_folder
    from agentrl.workflow.training.supervised import default_recipe

    full = model == "tiny" or lora_rank(config, model_folder(model, config.trust_remote_code)) == 0
    if full:
        others = {option: value for option, value in how.of_model.items() if option != "--lora-r"}
        refuse_options(others, "without effect if all weights train.", "Pass --lora-r 8, too.")
    return replace(default_recipe(model, full), **how.recipe)


def _train_on_episodes(
    stored: StoredEpisodes,
    min_reward: float | None,
    best: int | None,
    how: _LearningOptions,
    place: OutputPlace,
    as_json: bool,
) -> None:
    from agentrl.workflow.stats import best_episodes

    target = place.of(f"{stored.name}-sft")
    devices = choose_devices(how.devices, stored.start.model.numerics)
    chosen = best_episodes.select_best(stored.candidates, min_reward, best)
    if not chosen:
        top = cell(max((one.reward for one in stored.candidates), default=None))
        candidates = format_count(len(stored.candidates), "episode")
        raise StateError(
            f"None of {candidates} has a reward of at least {cell(min_reward)}; the highest is {top}.",
            f"Lower --min-reward, or list the episodes: agentrl episodes {stored.name}",
        )
    mean = sum(one.reward for one in chosen) / len(chosen)
    say(f"{stored.name}: {len(chosen)} of {format_count(len(stored.candidates), 'episode')} taken, mean reward {cell(mean)}")

    with pause_gc():
        from agentrl.workflow.training.supervised import PASSES, sft_on_episodes

    recipe = stored.recipe(len(chosen), how.epochs or PASSES, how.recipe)
    episodes = stored.episodes(chosen)
    learn = partial(sft_on_episodes, episodes, start=stored.start, target=target, recipe=recipe, **place.writing_options)
    trained_model = train_with_progress(target, learn, devices)
    show_made(
        trained_model,
        format_count(trained_model.examples, "episode"),
        {"of": len(stored.candidates), "mean_reward": mean},
        as_json,
    )
    say_next_steps(stored, target)
