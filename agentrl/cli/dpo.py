"""`agentrl dpo`: trains a model to prefer the better of its stored episodes."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from agentrl.cli.console import Json, say
from agentrl.cli.offline_options import (
    Devices,
    Force,
    Optimizer,
    OutputDir,
    OutputPlace,
    RewardSet,
    SaveEvery,
    StartPolicy,
    StoredEpisodes,
    choose_devices,
    find_stored,
    parse_devices,
    recipe_options,
    say_next_steps,
    show_made,
    train_with_progress,
)
from agentrl.workflow.errors import ConfigError, StateError
from agentrl.workflow.runtime.gc_pause import pause_gc
from agentrl.workflow.runtime.shown_text import format_count


def dpo(
    from_episodes: Annotated[
        list[str], typer.Option(metavar="RUN", help="Run of the stored episodes; repeatable.", show_default=False)
    ],
    pairs: Annotated[int, typer.Option(min=1, help="Maximum pairs per group; each episode is in at most one.")] = 1,
    beta: Annotated[
        float, typer.Option(help="Strength of the pull towards the reference; smaller values move further from it.")
    ] = 0.1,
    reference: Annotated[
        str,
        typer.Option(
            metavar="start|sampler", help="start: the starting weights; sampler: the weights that sampled each episode."
        ),
    ] = "start",
    reward_set: RewardSet = None,
    policy: StartPolicy = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps [3 passes].", show_default=False)] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Pairs per step [16].", show_default=False)] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate [the run's].", show_default=False)] = None,
    optimizer: Optimizer = None,
    devices: Devices = "1",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of the pairs.")] = 0,
    name: Annotated[str | None, typer.Option(help="Name of the new model [RUN-dpo].", show_default=False)] = None,
    output_dir: OutputDir = None,
    save_every: SaveEvery = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train a run's model on pairs of better and worse episodes (DPO); prints the folder of the new model.

    In each group the best episode is paired with the worst, the second best with the second worst, and so on.
    """
    recipe = recipe_options(steps, batch_size, learning_rate, seed, 1, optimizer)
    if not 0 < beta < float("inf"):
        raise ConfigError(f"--beta must be above 0, not {beta:g}.", "0.1 is customary.")
    if reference not in ("start", "sampler"):
        raise ConfigError(f"--reference does not know {reference!r}.", "Write --reference start or --reference sampler.")
    number = parse_devices(devices)
    stored = find_stored(from_episodes, reward_set, policy, least=2)
    chosen_devices = choose_devices(number, stored.start.model.numerics)
    options = {"beta": beta, "reference": reference}
    place = OutputPlace(name, output_dir, force, save_every)
    _train_on_pairs(stored, pairs, options, recipe, place, chosen_devices, as_json)


def _train_on_pairs(
    stored: StoredEpisodes,
    limit: int,
    options: Mapping[str, Any],
    recipe_values: Mapping[str, Any],
    place: OutputPlace,
    devices: Sequence[str],
    as_json: bool,
) -> None:
    from agentrl.workflow.stats import best_episodes

    target = place.of(f"{stored.name}-dpo")
    pairs = best_episodes.select_pairs(stored.candidates, limit)
    groups = len({one.group for one in stored.candidates})
    if not pairs:
        raise StateError(
            f"No preference pairs: rewards are equal within {'the only group' if groups == 1 else f'all {groups} groups'}.",
            f"Pass another --reward-set, or more groups. List the episodes: agentrl episodes {stored.name}",
        )
    paired = len({better.group for better, _ in pairs})
    others = "; the other groups have equal rewards" if paired < groups else ""
    say(f"{stored.name}: {format_count(len(pairs), 'pair')} from {paired} of {format_count(groups, 'group')}{others}")

    with pause_gc():
        from agentrl.workflow.training.preference import PASSES, dpo

    recipe = stored.recipe(len(pairs), PASSES, recipe_values)
    sides = [stored.episodes([pair[side] for pair in pairs]) for side in (0, 1)]
    episodes = list(zip(*sides, strict=True))
    learn = partial(dpo, episodes, start=stored.start, target=target, **options, recipe=recipe, **place.writing_options)
    trained_model = train_with_progress(target, learn, devices)
    show_made(trained_model, format_count(trained_model.examples, "pair"), {"groups": paired, "of": groups, **options}, as_json)
    say_next_steps(stored, target)
