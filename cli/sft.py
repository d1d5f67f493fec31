"""`agentrl sft`: make a model from demonstrations, or from the best stored episodes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.find import find_policy, stored_database
from cli.learning import (
    Force,
    OptionsFile,
    OutputDir,
    Place,
    RewardSet,
    StartPolicy,
    Stored,
    called,
    find_stored,
    recipe_options,
    refuse,
    say_next,
    show_made,
    watched,
)
from cli.output import Json, cell, say
from workflow.errors import ConfigError, StateError

if TYPE_CHECKING:
    from workflow.config import ModelConfig
    from workflow.offline import Recipe
    from workflow.trajectory import PolicyRef


def sft(
    dataset: Annotated[str | None, typer.Option(help="Dataset with demonstrations [arithmetic].", show_default=False)] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "--model-path",
            help="tiny for a new small model [tiny]; a folder, a hub name, RUN@V.",
            show_default=False,
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            "--epochs", "--num-epochs", min=1, help="Passes over the demonstrations, instead of --steps.", show_default=False
        ),
    ] = None,
    max_samples: Annotated[
        int | None, typer.Option(min=1, help="Only the first N tasks of the dataset.", show_default=False)
    ] = None,
    lora_r: Annotated[
        int | None,
        typer.Option(min=0, help="LoRA rank; 0 trains all weights [8, or 0 below 50M parameters].", show_default=False),
    ] = None,
    load_in_4bit: Annotated[
        bool, typer.Option("--load-in-4bit", help="Train LoRA beside a base of 4 bits; what is made is whole.")
    ] = False,
    tool_format: Annotated[
        str | None,
        typer.Option(help="How calls are written [as the model's chat template writes them].", show_default=False),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A Jinja file in place of the model's template.", show_default=False),
    ] = None,
    from_episodes: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="Learn from a run's stored episodes instead; repeatable.", show_default=False),
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option(help="Of these only those with this reward or more.", show_default=False)
    ] = None,
    best: Annotated[int | None, typer.Option(min=1, help="Of these only the N best of a task.", show_default=False)] = None,
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
        typer.Option(help="AdamW, highest [tiny 3e-3, else 2e-4 LoRA, 2e-5 full; episodes: the run's].", show_default=False),
    ] = None,
    gradient_accumulation_steps: Annotated[
        int, typer.Option(min=1, help="Pieces that a step's examples are read in, at least: less memory, the same gradient.")
    ] = 1,
    held_out: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of the demonstrations that is measured and not learned.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of new weights, the teacher and the order.")] = 0,
    name: Annotated[
        str | None, typer.Option(help="Name of the model made [MODEL-DATASET, RUN-sft].", show_default=False)
    ] = None,
    output_dir: OutputDir = None,
    config: OptionsFile = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a model on demonstrations, or on what stored episodes sampled; prints its folder.

    Without --min-reward and --best it learns from every finished episode, the bad ones too.
    """
    asked = recipe_options(steps, batch_size, learning_rate, seed, gradient_accumulation_steps)
    if min_reward is not None and not isfinite(min_reward):
        raise ConfigError(f"--min-reward must be a finite number, not {min_reward:g}.", "Leave it out to take every episode.")
    if epochs is not None and steps is not None:
        raise ConfigError("--epochs and --steps both say how long.", "Leave one out.")
    chosen = {"--min-reward": min_reward, "--best": best, "--reward-set": reward_set, "--policy": policy}
    place = Place(name, output_dir, force)
    how = _How(asked, epochs, max_samples, lora_r, load_in_4bit, tool_format, chat_template)
    of_dataset = {"--dataset": dataset, "--model": model, "--max-samples": max_samples, "--held-out": held_out or None}
    if not from_episodes:
        refuse(chosen, "of use with stored episodes only.", "Add --from-episodes RUN.")
        asked["held_out"] = _share(held_out)
        _on_demonstrations(dataset or "arithmetic", model or "tiny", how, place, as_json)
        return
    refuse(of_dataset | how.of_model | how.of_words, "of no use with stored episodes, which have theirs.", "Leave it out.")
    stored = find_stored(from_episodes, reward_set, policy, least=1)
    _on_episodes(stored, min_reward, best, how, place, as_json)


@dataclass(frozen=True)
class _How:
    """How it is to be learned: `asked` of the recipe, and the rest."""

    asked: Mapping[str, Any]
    epochs: int | None
    max_samples: int | None
    lora_r: int | None
    load_in_4bit: bool
    tool_format: str | None
    chat_template: str | None

    @property
    def of_words(self) -> dict[str, str | None]:
        """The options that say how a model is spoken to."""
        return {"--tool-format": self.tool_format, "--chat-template": self.chat_template}

    @property
    def of_model(self) -> dict[str, Any]:
        """The options that say what of a model trains, None where they were not given."""
        return {"--lora-r": self.lora_r, "--load-in-4bit": self.load_in_4bit or None}


def _share(held_out: float) -> float:
    if not 0 <= held_out < 1:
        raise ConfigError(f"--held-out must be at least 0 and below 1, not {held_out:g}.", "0.05 holds one in twenty out.")
    return held_out


def _on_demonstrations(dataset: str, model: str, how: _How, place: Place, as_json: bool) -> None:
    from workflow.conversations import Demonstration, read_demonstrations
    from workflow.datasets import Dataset
    from workflow.models import made_name, model_folder, resolve_model
    from workflow.plugins import find
    from workflow.templates import settled

    found: Dataset | list[Demonstration]
    found = read_demonstrations(Path(dataset), how.max_samples) if dataset.endswith(".jsonl") else find("datasets", dataset)
    config, policy, manifest = _policy_named(model, how)
    path = policy.base if policy else model if model == "tiny" else resolve_model(model, dataset)
    config = settled(config, None if path == "tiny" else model_folder(path), policy is None)
    target = place.of(made_name(model.replace("@", "-v") if policy else path, dataset))

    from workflow.offline import Start
    from workflow.sft import sft as fine_tune

    start = Start(config, policy, manifest=manifest) if policy else None
    learn = partial(fine_tune, found, path, target, recipe=_recipe(path, how.asked, config), start=start, config=config)
    made = watched(target, partial(learn, epochs=how.epochs, max_samples=how.max_samples, overwrite=place.force))
    if config.load_in_4bit or config.load_in_8bit:
        say("The base was dequantised, as what was learned was learned beside it, and then merged.")
    show_made(made, f"{made.examples} demonstrations", {}, as_json)
    usual = model == "tiny" and not (place.name or place.output_dir)
    say(f"Train it: agentrl submit --dataset {dataset} --model {'tiny' if usual else called(target)}")


def _policy_named(model: str, how: _How) -> "tuple[ModelConfig, PolicyRef | None, Mapping[str, Any]]":
    """What `RUN@V` means: the run's section on its model, the policy and the run's manifest; of any other name no policy.

    Raises:
        NotFoundError: no such run or version.
    """
    from workflow.config import ModelConfig

    if "@" not in model or Path(model).exists():
        if model == "tiny":
            refuse(how.of_model, "a new model is made whole.", "Leave it out.")
        if how.load_in_4bit and how.lora_r == 0:
            raise ConfigError("A quantised base cannot train all weights.", "Pass --lora-r 8, or leave --load-in-4bit out.")
        options = {"path": model, "lora_r": how.lora_r, "load_in_4bit": how.load_in_4bit}
        options |= {"tool_format": how.tool_format, "chat_template": how.chat_template}
        return ModelConfig.model_validate(options), None, {}
    refuse(how.of_model | how.of_words, "of no use with a run's policy, which has its own.", "Leave it out.")
    from workflow.store import planning

    made, policy = find_policy(model)
    row = planning.find_run(stored_database(), str(made.name))
    return made.model, policy, row["manifest"]


def _recipe(model: str, asked: Mapping[str, Any], config: "ModelConfig") -> "Recipe":
    from workflow.models import lora_rank, model_folder
    from workflow.sft import default_recipe

    full = model == "tiny" or lora_rank(config, model_folder(model)) == 0
    return replace(default_recipe(model, full), **asked)


def _on_episodes(
    stored: Stored,
    min_reward: float | None,
    best: int | None,
    how: _How,
    place: Place,
    as_json: bool,
) -> None:
    from workflow import harvest

    target = place.of(f"{stored.name}-sft")
    chosen = harvest.best(stored.candidates, min_reward, best)
    if not chosen:
        top = cell(max((one.reward for one in stored.candidates), default=None))
        raise StateError(
            f"None of {len(stored.candidates)} episodes has a reward of at least {cell(min_reward)}; the highest is {top}.",
            f"Lower --min-reward; agentrl episodes {stored.name}",
        )
    mean = sum(one.reward for one in chosen) / len(chosen)
    say(f"{stored.name}: {len(chosen)} of {len(stored.candidates)} episodes taken, mean reward {cell(mean)}")

    from workflow.sft import PASSES, sft_on_episodes

    recipe = stored.recipe(len(chosen), how.epochs or PASSES, how.asked)
    episodes = stored.episodes(chosen)
    made = watched(target, partial(sft_on_episodes, episodes, stored.start, target, recipe=recipe, overwrite=place.force))
    show_made(made, f"{made.examples} episodes", {"of": len(stored.candidates), "mean_reward": mean}, as_json)
    say_next(stored, target)
