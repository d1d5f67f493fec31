"""Datasets: a file here yields Tasks. See `Dataset`; `load_tasks` is the way in."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from workflow.config import DatasetConfig
from workflow.errors import ConfigError, DatasetError
from workflow.plugins import find
from workflow.trajectory import Message, Task


@dataclass(frozen=True, slots=True)
class Dataset:
    """Where tasks come from.

    Args:
        load: split -> tasks, in a fixed order; raises DatasetError.
        env: the env its tasks are made for.
        demonstrations: tasks -> for each, a conversation that solves it (for `agentrl sft`), or None where it has none.
        sft_split: the split whose tasks `agentrl sft` shows.
    """

    load: Callable[[str], Iterator[Task]]
    env: str
    demonstrations: Callable[[Sequence[Task], int], Iterator[tuple[Message, ...]]] | None = None
    sft_split: str = "train"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a config's dataset section names.

    Args:
        tasks: in the dataset's order; never empty, their keys all different.
        env: name of the env they are made for.
        skipped: malformed rows that were left out, each as `line N: why`.
    """

    tasks: tuple[Task, ...]
    env: str
    skipped: tuple[str, ...] = ()


def load_tasks(config: DatasetConfig) -> Loaded:
    """The tasks of a plug-in, of a user's `package.module:name`, or of a .jsonl file.

    Raises:
        ConfigError: no dataset is called so, or `skip_bad_rows` is asked of one that is no .jsonl file.
        DatasetError: no such file or split, malformed rows, no task at all, or two tasks of one key.
    """
    found, env, skipped = _read(config)
    tasks = tuple(islice(found, config.max_samples))
    if not tasks:
        raise DatasetError(f"The split {config.split!r} of {config.name!r} holds no task.", "Name another.")
    key, count = Counter(task.key for task in tasks).most_common(1)[0]
    if count > 1:
        raise DatasetError(f"{count} tasks of {config.name!r} have the key {key!r}.", "Give every task a key of its own.")
    return Loaded(tasks, env, tuple(skipped))


def _read(config: DatasetConfig) -> tuple[Iterable[Task], str, list[str]]:
    if config.name.endswith(".jsonl"):
        from workflow.datasets.jsonl import ENV, read_tasks  # it imports this file

        tasks, skipped = read_tasks(Path(config.name), config.split, config.skip_bad_rows)
        return tasks, ENV, skipped
    if config.skip_bad_rows:
        raise ConfigError(f"skip_bad_rows is for .jsonl files, and the dataset is {config.name!r}.", "Leave it out.")
    dataset = find("datasets", config.name)
    if not isinstance(dataset, Dataset):
        raise ConfigError(f"{config.name!r} is no dataset but a {type(dataset).__name__}.", "Name a FILE.jsonl or a `Dataset`.")
    return dataset.load(config.split), dataset.env, []
