"""`agentrl sft`, `dpo`: make a model from demonstrations, from the best stored episodes, or from pairs of them."""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.find import find_policy, stored_database, stored_start
from cli.output import Json, cell, console, say, show, show_json
from workflow.config import NAME_PATTERN, build
from workflow.errors import ConfigError, ConflictError, StateError

if TYPE_CHECKING:
    from workers.stored import Material
    from workflow.config import ModelConfig
    from workflow.harvest import Candidate
    from workflow.offline import Made, Recipe, Start
    from workflow.store.connect import Database
    from workflow.trajectory import Episode, PolicyRef

RewardSet = Annotated[
    str | None, typer.Option(help="Whose rewards choose among stored episodes [default].", show_default=False)
]
StartPolicy = Annotated[
    str | None,
    typer.Option("--policy", metavar="RUN[@V]", help="With stored episodes: start from this [theirs].", show_default=False),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a model of that name.")]


def sft(
    dataset: Annotated[str | None, typer.Option(help="Dataset with demonstrations [arithmetic].", show_default=False)] = None,
    model: Annotated[
        str | None, typer.Option(help="tiny for a new small model [tiny]; a folder, a hub name, RUN@V.", show_default=False)
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
    seed: Annotated[int, typer.Option(min=0, help="Of new weights, the teacher and the order.")] = 0,
    name: Annotated[
        str | None, typer.Option(help="Name of the model made [MODEL-DATASET, RUN-sft].", show_default=False)
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a model on demonstrations, or on what stored episodes sampled; prints its folder.

    Without --min-reward and --best it learns from every finished episode, the bad ones too.
    """
    asked = _asked(steps, batch_size, learning_rate, seed)
    if min_reward is not None and not isfinite(min_reward):
        raise ConfigError(f"--min-reward must be a finite number, not {min_reward:g}.", "Leave it out to take every episode.")
    chosen = {"--min-reward": min_reward, "--best": best, "--reward-set": reward_set, "--policy": policy}
    if not from_episodes:
        _refuse(chosen, "of use with stored episodes only.", "Add --from-episodes RUN.")
        _on_demonstrations(dataset or "arithmetic", model or "tiny", asked, name, force, as_json)
        return
    _refuse({"--dataset": dataset, "--model": model}, "of no use with stored episodes, which have theirs.", "Leave it out.")
    stored = _stored(from_episodes, reward_set, policy, least=1)
    _on_episodes(stored, min_reward, best, asked, _target(name, f"{stored.name}-sft", force), force, as_json)


def dpo(
    from_episodes: Annotated[
        list[str], typer.Option(metavar="RUN", help="Whose stored episodes; repeatable.", show_default=False)
    ],
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of a group, at most; no episode is in two.")] = 1,
    beta: Annotated[float, typer.Option(help="What a nat counts: the smaller, the further from the reference.")] = 0.1,
    reference: Annotated[
        str, typer.Option(metavar="start|sampler", help="The weights it starts from, or what sampled each episode.")
    ] = "start",
    reward_set: RewardSet = None,
    policy: StartPolicy = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps [3 passes].", show_default=False)] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Pairs per step [16].", show_default=False)] = None,
    learning_rate: Annotated[float | None, typer.Option(help="AdamW, highest [the run's].", show_default=False)] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the order.")] = 0,
    name: Annotated[str | None, typer.Option(help="Name of the model made [RUN-dpo].", show_default=False)] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train a run's model to prefer its better episodes to their siblings (DPO); prints the folder of the model made.

    Of each group the best episode is paired with the worst, the second best with the second worst, and so on.
    """
    asked = _asked(steps, batch_size, learning_rate, seed)
    if not 0 < beta < float("inf"):
        raise ConfigError(f"--beta must be above 0, not {beta:g}.", "0.1 is customary.")
    if reference not in ("start", "sampler"):
        raise ConfigError(f"--reference does not know {reference!r}.", "Write start or sampler.")
    stored = _stored(from_episodes, reward_set, policy, least=2)
    options = {"beta": beta, "reference": reference}
    _on_pairs(stored, pairs, options, asked, _target(name, f"{stored.name}-dpo", force), force, as_json)


def _asked(steps: int | None, batch_size: int | None, learning_rate: float | None, seed: int) -> dict[str, Any]:
    """What was asked of the recipe."""
    if learning_rate is not None and not 0 < learning_rate < float("inf"):
        raise ConfigError(f"--learning-rate must be above 0, not {learning_rate:g}.")
    wanted = {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate, "seed": seed}
    return {key: value for key, value in wanted.items() if value is not None}


def _refuse(options: Mapping[str, Any], why: str, hint: str) -> None:
    given = [option for option, value in options.items() if value is not None]
    if given:
        raise ConfigError(f"{', '.join(given)}: {why}", hint)


def _target(asked: str | None, made: str, force: bool) -> Path:
    """The folder of the model to make."""
    from workflow.settings import settings

    if asked is not None and not re.match(NAME_PATTERN, asked):
        raise ConfigError(f"--name {asked!r} is no name.", "Use a-z, 0-9, '.', '_' and '-', at most 64.")
    name = asked or made
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"No name can be made of {name!r}.", "Pass --name.")
    target = settings().models_dir / name
    if target.exists() and not force:
        raise ConflictError(f"There is a model in {str(target)!r} already.", "Pass --force to make it anew, or another --name.")
    return target


def _on_demonstrations(
    dataset: str, model: str, asked: Mapping[str, Any], name: str | None, force: bool, as_json: bool
) -> None:
    from workflow.datasets import Dataset
    from workflow.models import made_name, resolve_model
    from workflow.plugins import find

    if dataset.endswith(".jsonl"):
        raise ConfigError(
            f"{dataset!r} holds questions and answers, and no demonstrations to imitate.",
            "Write a dataset file with `demonstrations`; see workflow/datasets/arithmetic.py.",
        )
    found: Dataset = find("datasets", dataset)
    config, policy, manifest = _policy_named(model)
    path = policy.base if policy else model if model == "tiny" else resolve_model(model, dataset)
    target = _target(name, made_name(model.replace("@", "-v") if policy else path, dataset), force)

    from workflow.offline import Start
    from workflow.sft import sft as fine_tune

    start = Start(config, policy, manifest=manifest) if policy else None
    recipe = _recipe(path, asked, config)
    made = _watched(partial(fine_tune, found, path, target, recipe=recipe, start=start, overwrite=force))
    _show(made, recipe, f"{made.examples} demonstrations", {}, as_json)
    say(f"Train it: agentrl submit --dataset {dataset} --model {model if model == 'tiny' and name is None else target.name}")


def _policy_named(model: str) -> "tuple[ModelConfig, PolicyRef | None, Mapping[str, Any]]":
    """What `RUN@V` means: the run's section on its model, the policy and the run's manifest; of any other name no policy.

    Raises:
        NotFoundError: no such run or version.
    """
    from workflow.config import ModelConfig

    if "@" not in model or Path(model).exists():
        return ModelConfig.model_validate({"path": model}), None, {}
    from workflow.store import planning

    made, policy = find_policy(model)
    row = planning.find_run(stored_database(), str(made.name))
    return made.model, policy, row["manifest"]


def _recipe(model: str, asked: Mapping[str, Any], config: "ModelConfig") -> "Recipe":
    from workflow.models import lora_rank, model_folder
    from workflow.sft import default_recipe

    full = model == "tiny" or lora_rank(config, model_folder(model)) == 0
    return replace(default_recipe(model, full), **asked)


@dataclass(frozen=True)
class _Stored:
    """Stored episodes to choose from, and what learns from them."""

    db: "Database"
    found: "Material"
    candidates: "list[Candidate]"

    @property
    def name(self) -> str:
        return str(self.found.sources[0].row["name"])

    @property
    def start(self) -> "Start":
        from workflow.offline import Start

        made = self.found.config
        manifest = self.found.sources[0].row["manifest"]
        return Start(made.model, self.found.start, made.rollout.temperature, manifest)

    def recipe(self, examples: int, passes: int, asked: Mapping[str, Any]) -> "Recipe":
        from workflow.offline import recipe_for

        rate = self.found.config.update.learning_rate
        return replace(recipe_for(examples, passes, rate, asked.get("batch_size")), **asked)

    def episodes(self, chosen: "list[Candidate]") -> "list[Episode]":
        from workflow.store import offline

        return offline.chosen(self.db, [one.id for one in chosen])


def _stored(runs: list[str], reward_set: str | None, policy: str | None, least: int) -> _Stored:
    from workers.stored import material
    from workflow.store import offline

    db, start = stored_start(policy)
    source = build({"source.runs": runs, "source.reward_set": reward_set or "default"}).source
    found = material(db, source, least, start)
    for remark in found.remarks:
        say(remark)
    candidates = [
        one for each in found.sources for one in offline.candidates(db, each.row["id"], each.groups, source.reward_set)
    ]
    return _Stored(db, found, candidates)


def _on_episodes(
    stored: _Stored,
    min_reward: float | None,
    best: int | None,
    asked: Mapping[str, Any],
    target: Path,
    force: bool,
    as_json: bool,
) -> None:
    from workflow import harvest

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

    recipe = stored.recipe(len(chosen), PASSES, asked)
    episodes = stored.episodes(chosen)
    made = _watched(partial(sft_on_episodes, episodes, stored.start, target, recipe=recipe, overwrite=force))
    _show(made, recipe, f"{made.examples} episodes", {"of": len(stored.candidates), "mean_reward": mean}, as_json)
    _say_next(stored, target)


def _on_pairs(
    stored: _Stored,
    most: int,
    options: Mapping[str, Any],
    asked: Mapping[str, Any],
    target: Path,
    force: bool,
    as_json: bool,
) -> None:
    from workflow import harvest

    pairs = harvest.pairs(stored.candidates, most)
    groups = len({one.group for one in stored.candidates})
    if not pairs:
        raise StateError(
            f"In none of {groups} groups two episodes have different rewards, so that none is to be preferred.",
            f"Take another --reward-set, or episodes of more groups; agentrl episodes {stored.name}",
        )
    paired = len({better.group for better, _ in pairs})
    others = "; in the others all rewards are the same" if paired < groups else ""
    say(f"{stored.name}: {len(pairs)} pairs from {paired} of {groups} groups{others}")

    from workflow.dpo import PASSES, dpo

    recipe = stored.recipe(len(pairs), PASSES, asked)
    sides = [stored.episodes([pair[side] for pair in pairs]) for side in (0, 1)]
    episodes = list(zip(*sides, strict=True))
    made = _watched(partial(dpo, episodes, stored.start, target, **options, recipe=recipe, overwrite=force))
    _show(made, recipe, f"{made.examples} pairs", {"groups": paired, "of": groups, **options}, as_json)
    _say_next(stored, target)


def _watched(training: "Callable[..., Made]") -> "Made":
    """Trains as this machine is set up to, and shows how far it is."""
    from workflow.settings import settings

    where = settings()
    with Progress() as progress:
        return training(device=where.device, threads=where.threads, progress=progress.step)


def _say_next(stored: _Stored, target: Path) -> None:
    dataset = stored.found.config.dataset.name
    say(f"Measure it: agentrl eval --policy {target.name} --dataset {dataset}")
    say(f"Train it: agentrl submit --dataset {dataset} --model {target.name}")


def _show(made: "Made", recipe: "Recipe", learned: str, more: Mapping[str, Any], as_json: bool) -> None:
    left_out = "".join(f"; left out {count}: {why}" for why, count in made.left_out.items())
    say(f"Learned from {learned}{left_out}.")
    if not as_json:
        show(str(made.folder))
        return
    told = {"model": made.folder, "name": made.folder.name, "steps": recipe.steps, **made.metrics}
    show_json({**told, "examples": made.examples, "left_out": dict(made.left_out), **more})


class Progress:
    """A bar on a terminal, else a line for every tenth."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            from rich.progress import Progress as Bar

            self._bar = Bar(console=console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("reading", total=None)
        return self

    def __exit__(self, *ending: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Shows how far it is."""
        said = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        if self._bar is not None:
            self._bar.update(self._task, total=steps, completed=step, description=said)
        elif step == steps or step % max(1, steps // 10) == 0:
            say(f"step {step}/{steps}  {said}")
