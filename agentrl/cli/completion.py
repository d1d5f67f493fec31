"""Shell completion of runs, episodes, plug-ins, models and config keys."""

import os
import pkgutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from glob import escape, glob
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

from typer.models import ParameterInfo

Choice = str | tuple[str, str]
"""A word, or a word with its description."""

MAX_CHOICES = 100
"""The most words that one completion offers."""


def complete(command: Callable[..., Any]) -> None:
    """Set the completion function of each parameter of the command."""
    for name, parameter in signature(command, eval_str=True).parameters.items():
        for metadata in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(metadata, ParameterInfo) and name in CHOICES:
                metadata.autocompletion = _without_errors(CHOICES[name])


def _without_errors(choices: Callable[[str], list[Choice]]) -> Callable[[str], list[Choice]]:
    def complete_quietly(incomplete: str) -> list[Choice]:
        with suppress(Exception):  # a traceback in the middle of somebody's line is worse than no word
            return choices(incomplete)
        return []

    return complete_quietly


def _query_database(query: Callable[..., list[Any]], begin: str) -> list[Any]:
    """Return the rows whose text begins with `begin`; empty if no database exists yet."""
    from agentrl.workflow.settings import settings
    from agentrl.workflow.store.driver_reader import Reader
    from agentrl.workflow.store.reads.user_sql import sqlite_file

    def refuse_full() -> NoReturn:
        raise LookupError("the terminal driver does not support it")

    file = sqlite_file(settings())
    there = file is None or file.exists()
    return query(Reader(settings().database, refuse_full), begin, MAX_CHOICES) if there else []


def _run_choices(incomplete: str) -> list[Choice]:
    from agentrl.workflow.store.reads.run_rows import list_run_names

    return [(row["name"], f"{row['kind']}, {row['status']}") for row in _query_database(list_run_names, incomplete)]


def _episode_choices(incomplete: str) -> list[Choice]:
    from agentrl.workflow.store.reads.episode_rows import list_newest_episodes

    rows = _query_database(list_newest_episodes, str(int(incomplete)) if incomplete else "")
    return [(str(row["id"]), f"{row['name']}, {row['status']}, reward {row['reward']}") for row in rows]


def _model_choices(incomplete: str) -> list[Choice]:
    """Return "tiny", the models that `agentrl sft` wrote on this machine, and the models in the hub's cache."""
    from agentrl.workflow.settings import settings

    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub").expanduser()
    hub = [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in cache.glob("models--*")]
    return ["tiny", *sorted(file.parent.name for file in settings().models_dir.glob("*/config.json")), *sorted(hub)]


def _policy_choices(incomplete: str) -> list[Choice]:
    return [*_run_choices(incomplete.partition("@")[0]), *_model_choices(incomplete)]


def _plugin_choices(kind: str) -> Callable[[str], list[Choice]]:
    def complete_plugin(incomplete: str) -> list[Choice]:
        spec = find_spec(f"agentrl.workflow.{kind}")
        places = (spec.submodule_search_locations if spec else None) or []
        return sorted(module.name for module in pkgutil.iter_modules(places))

    return complete_plugin


def _dataset_choices(incomplete: str) -> list[Choice]:
    return [*_plugin_choices("datasets")(incomplete), *sorted(glob(f"{escape(incomplete)}*.jsonl"))[:MAX_CHOICES]]


def _assignment_choices(incomplete: str) -> list[Choice]:
    """Return `key=` for each config key. After the `=`, return the values, if the key names a plug-in or has fixed values."""
    from agentrl.workflow.config import DESCRIPTIONS, KEYS

    key, separator, word = incomplete.partition("=")
    if not separator:
        return [(f"{option}=", DESCRIPTIONS.get(option, "")) for option in KEYS]
    last = {"dataset.name": "dataset", "model.path": "model", "rollout.engine": "engine", "algorithm.name": "algorithm"}
    values = CHOICES.get(last.get(key, key))
    return [f"{key}={value if isinstance(value, str) else value[0]}" for value in (values(word) if values else [])]


def _fixed_choices(*choices: str) -> Callable[[str], list[Choice]]:
    return lambda incomplete: list(choices)


def _column_choices(constant: str) -> Callable[[str], list[Choice]]:
    def choices(incomplete: str) -> list[Choice]:
        from agentrl.workflow.tables import column_values

        return list(getattr(column_values, constant))

    return choices


def _view_choices(incomplete: str) -> list[Choice]:
    from agentrl.workflow.tables.views import VIEWS

    return [(view, kind.meaning()) for view, kind in VIEWS.items()]


CHOICES: Mapping[str, Callable[[str], list[Choice]]] = {
    "run": _run_choices, "runs": _run_choices, "from_episodes": _run_choices, "from_groups": _run_choices,
    "first": _policy_choices, "second": _policy_choices, "policy": _policy_choices, "reference": _policy_choices,
    "model": _model_choices, "episode": _episode_choices, "diff": _episode_choices, "dataset": _dataset_choices,
    "split": _fixed_choices("train", "test"), "env": _plugin_choices("envs"), "tools": _plugin_choices("tools"),
    "reward": _plugin_choices("rewards"), "algorithm": _plugin_choices("algorithms"), "engine": _plugin_choices("engines"),
    "trainer": _plugin_choices("trainers"), "assignments": _assignment_choices,
    "status": _column_choices("EPISODE_STATUS"), "stop_reason": _column_choices("STOP_REASONS"),
    "kind": _column_choices("RUN_KINDS"),
    "verify": _fixed_choices("tools", "tokens", "rewards", "all"), "query": _view_choices,
    "role": _fixed_choices("rollout", "tools", "train", "control", "rollout,train", "supervisor", "redis"),
}  # fmt: skip
"""A mapping from the name of a parameter to its completion function."""
