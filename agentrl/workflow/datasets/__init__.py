"""Datasets. Each file of this folder defines a source of tasks. See `Dataset`; `load_tasks` loads the tasks."""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

from agentrl.workflow.config import DatasetConfig
from agentrl.workflow.dataset_rows import sources
from agentrl.workflow.errors import AgentRLError, ConfigError, DatasetError
from agentrl.workflow.plugins import find
from agentrl.workflow.trajectory import Message, Task


@dataclass(frozen=True, slots=True)
class Dataset:
    """A source of tasks.

    Args:
        load: a function that takes the name of a split, and returns the split's tasks in a fixed order. It raises DatasetError
            if there is no such split, or the tasks cannot be read.
        env: the name of the env for the tasks.
        demonstrations: a function of (tasks, seed). For each task it yields a conversation that solves the task, for `agentrl
            sft`, or None if it has none. Unset if the dataset has no demonstrations.
        sft_split: the split that `agentrl sft` trains on.
    """

    load: Callable[[str], Iterator[Task]]
    env: str
    demonstrations: Callable[[Sequence[Task], int], Iterator[tuple[Message, ...] | None]] | None = None
    sft_split: str = "train"


@dataclass(frozen=True, slots=True)
class LoadedTasks:
    """The tasks that a config's section `dataset` selects.

    Args:
        tasks: the tasks in the dataset's order; at least one, with different keys.
        env: the name of the env for the tasks; empty if several datasets have different envs.
        skipped: the malformed rows that were left out, each as `line N: why`.
        repeated: the number of tasks that were left out because they equal an earlier task.
        shares: for several datasets with weights, a mapping from each name to (tasks used, tasks read).
    """

    tasks: tuple[Task, ...]
    env: str
    skipped: tuple[str, ...] = ()
    repeated: int = 0
    shares: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Source:
    """The tasks of one dataset, read lazily. `skipped` grows while the tasks are read."""

    tasks: Iterable[Task]
    env: str
    skipped: list[str] = field(default_factory=list)


def load_tasks(config: DatasetConfig, seed: int = 0) -> LoadedTasks:
    """Load the tasks of one dataset or several: plug-ins, a user's `package.module:name`, files, folders or hub datasets.

    Without weights, all tasks of all datasets are loaded. With weights, tasks are loaded in these proportions until one dataset
    is used up.

    Args:
        seed: the seed of the random choice of tasks, for datasets of which only a part is used.

    Raises:
        ConfigError: a dataset does not exist, or an option for rows is set for a plug-in.
        DatasetError: a file or split does not exist, rows are malformed, the loader raises an exception or yields something
            other than Tasks, there is no task, or two tasks have the same key.
    """
    parts = split_mixture(config.name)
    loaded = [_load_one(config.model_copy(update={"name": name})) for name in parts]
    (result, *others) = [_take_shares(parts, loaded, config.max_tasks, seed)] if len(parts) > 1 else loaded
    assert not others
    if len({task.key for task in result.tasks}) < len(result.tasks):
        key, count = Counter(task.key for task in result.tasks).most_common(1)[0]
        hint = "Rename one of the files, or name their folders." if len(parts) > 1 else "Give each task a unique key."
        raise DatasetError(f"{count} tasks of {config.name!r} have the key {key!r}.", hint)
    return result


def split_mixture(name: str) -> dict[str, float | None]:
    """Parse `A,B` or `A=0.7,B=0.3`, and return the weight of each dataset. A dataset without a weight has None. Raise
    ConfigError if only some datasets have a weight, a weight is not above 0, or a dataset is named twice.
    """
    if "," not in name or Path(name).is_file():
        return {name: None}
    parts: dict[str, float | None] = {}
    for text in name.split(","):
        part, separator, weight = text.strip().rpartition("=")
        try:
            value = float(weight) if separator else None
        except ValueError:
            value = math.nan
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{weight!r} is not a valid weight of the dataset {part!r}.", "Write --dataset A=0.7,B=0.3")
        part = part if separator else weight
        if not part or part in parts:
            raise ConfigError(f"--dataset {name!r:.200} names {part!r} twice." if part else f"--dataset {name!r} lacks a name.")
        parts[part] = value
    if len({value is None for value in parts.values()}) > 1:
        raise ConfigError(f"--dataset {name!r:.200} gives some datasets a weight and others none.", "Give each one a weight.")
    return parts


def _take_shares(
    parts: dict[str, float | None], loaded: Sequence[LoadedTasks], max_tasks: int | None, seed: int
) -> LoadedTasks:
    """Join the tasks of several datasets in the order of the datasets. With weights, take only each dataset's share."""
    chosen = [dataset.tasks for dataset in loaded]
    shares: dict[str, tuple[int, int]] = {}
    if None not in parts.values():
        whole = sum(weight or 0.0 for weight in parts.values())
        weights = [(weight or 0.0) / whole for weight in parts.values()]
        count = min(len(tasks) / weight for tasks, weight in zip(chosen, weights, strict=True))
        count = min(count, max_tasks or count)
        sizes = [min(len(tasks), max(1, round(count * weight))) for tasks, weight in zip(chosen, weights, strict=True)]
        shares = {name: (size, len(tasks)) for name, size, tasks in zip(parts, sizes, chosen, strict=True)}
        chosen = [_draw(tasks, size, seed) for tasks, size in zip(chosen, sizes, strict=True)]
    envs = {dataset.env for dataset in loaded}
    return LoadedTasks(
        tuple(islice(chain(*chosen), None if shares else max_tasks)),
        envs.pop() if len(envs) == 1 else "",
        tuple(f"{name}, {row}" for name, dataset in zip(parts, loaded, strict=True) for row in dataset.skipped),
        sum(dataset.repeated for dataset in loaded),
        shares,
    )


def _draw(tasks: Sequence[Task], size: int, seed: int) -> tuple[Task, ...]:
    """Select `size` of the tasks by hash(seed, key), and keep their order. The selection is the same on every machine."""
    ranked = sorted(tasks, key=lambda task: hashlib.sha256(f"{seed}|mixture|{task.key}".encode()).digest())
    keys = {task.key for task in ranked[:size]}
    return tuple(task for task in tasks if task.key in keys)


def _load_one(config: DatasetConfig) -> LoadedTasks:
    source = _open(config)
    repeats = _Repeats()
    tasks = _select_tasks(config, lambda: repeats.left_out(source.tasks))
    if source.skipped and not config.skip_bad_rows:
        from agentrl.workflow.datasets import jsonl

        raise jsonl.malformed_error(config.name, source.skipped, jsonl.SKIP_HINT)
    if not tasks:
        hint = "Name another."
        if is_rows(config.name):
            hint = "No row passes --filter." if config.filter else "Write one JSON object per line into it."
        raise DatasetError(f"The split {config.split!r} of {config.name!r} has no tasks.", hint)
    return LoadedTasks(tasks, source.env, tuple(source.skipped), repeats.count)


class _Repeats:
    """A filter that removes repeated tasks: tasks that equal an earlier task except for the key."""

    def __init__(self) -> None:
        self.count = 0
        self._first: dict[int, Task] = {}
        self._others: defaultdict[int, list[Task]] = defaultdict(list)

    def left_out(self, tasks: Iterable[Task]) -> Iterator[Task]:
        for task in tasks:
            if isinstance(task, Task):  # what is none is named later
                texts = hash((task.reference, *(message.content for message in task.messages)))
                first = self._first.setdefault(texts, task)
                if first is not task:
                    others = self._others[texts]
                    if any(replace(task, key=other.key) == other for other in (first, *others)):
                        self.count += 1
                        continue
                    others.append(task)
            yield task


def is_file(name: str) -> bool:
    """Return True if the name, or each name of a mixture, is a file of rows. A file has only the split `train`."""
    return all(sources.kind_of_source(part) == "file" for part in split_mixture(name))


def is_rows(name: str) -> bool:
    """Return True if the dataset consists of rows in a file, in a folder or on the hub; False for a plug-in."""
    return sources.kind_of_source(name) != "plugin"


def absolute_name(name: str) -> str:
    """Make the paths of files and folders in a dataset's name absolute, so a run can be resumed from any folder."""
    paths = [
        (str(sources.expand_home(part).resolve()) if sources.kind_of_source(part) in ("file", "folder") else part, weight)
        for part, weight in split_mixture(name).items()
    ]
    return ",".join(part if weight is None else f"{part}={weight:g}" for part, weight in paths)


def hash_dataset(config: DatasetConfig) -> dict[str, str]:
    """Return the SHA-256 of the split's rows for each file or folder of the dataset."""
    hashes = {part: sources.hash_source(part, config.split) for part in split_mixture(config.name)}
    return {part: sha256 for part, sha256 in hashes.items() if sha256}


def changed_files(hashes: Mapping[str, str], split: str) -> list[str]:
    """Return the files and folders that are missing, or whose rows have changed since `hash_dataset`."""
    changed = []
    for name, sha256 in hashes.items():
        try:
            same = sources.hash_source(name, split) == sha256
        except DatasetError:
            same = False
        changed += [] if same else [name]
    return changed


def env_of(config: DatasetConfig) -> str:
    """Return the name of the dataset's env. For a mixture, return the env that all of its datasets share; empty if their envs
    differ. The function reads at most the first task. Raise ConfigError if the dataset does not exist. Raise DatasetError if
    the dataset cannot be read.
    """
    envs = {_open(config.model_copy(update={"name": name})).env for name in split_mixture(config.name)}
    return envs.pop() if len(envs) == 1 else ""


def _select_tasks(config: DatasetConfig, load: Callable[[], Iterable[Task]]) -> tuple[Task, ...]:
    try:
        tasks = tuple(islice(load(), config.max_tasks))
    except AgentRLError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        raise DatasetError(f"The dataset {config.name!r} cannot be loaded: {problem}.", "Correct its load().") from error
    strange = next((task for task in tasks if not isinstance(task, Task)), None)
    if strange is not None:
        raise DatasetError(f"The dataset {config.name!r} yields a {type(strange).__name__}, not a Task.", "Correct its load().")
    return tasks


def _open(config: DatasetConfig) -> _Source:
    if not is_rows(config.name):
        for name in ("skip_bad_rows", "map", "filter"):
            if getattr(config, name):
                message = f"{name} does not apply to the dataset {config.name!r}: it is for files, folders and the hub."
                raise ConfigError(message, "Leave it out.")
        dataset: Dataset = find("datasets", config.name)
        return _Source(_load_plugin(dataset, config.split), dataset.env)
    from agentrl.workflow.datasets import code, jsonl  # they import this file

    rows = sources.read_source(config)
    first = list(islice(rows, 1))
    form = code if first and code.is_code(first[0].values) else jsonl
    problems: list[str] = []
    return _Source(form.read_tasks(chain(first, rows), config, problems), form.ENV, problems)


def _load_plugin(dataset: Dataset, split: str) -> Iterator[Task]:
    yield from dataset.load(split)  # what it raises is raised where its tasks are read
