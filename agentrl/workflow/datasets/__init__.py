"""Datasets: each file here yields Tasks. See `Dataset`; `load_tasks` is the entry point."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from agentrl.workflow.config import DatasetConfig
from agentrl.workflow.errors import AgentRLError, ConfigError, DatasetError
from agentrl.workflow.plugins import find
from agentrl.workflow.trajectory import Message, Task


@dataclass(frozen=True, slots=True)
class Dataset:
    """A source of tasks.

    Args:
        load: split -> tasks, in a fixed order; raises DatasetError.
        env: the env for its tasks.
        demonstrations: tasks -> for each, a conversation that solves it (for `agentrl sft`), or None; unset if the dataset
            has no demonstrations at all.
        sft_split: the split that `agentrl sft` trains on.
    """

    load: Callable[[str], Iterator[Task]]
    env: str
    demonstrations: Callable[[Sequence[Task], int], Iterator[tuple[Message, ...] | None]] | None = None
    sft_split: str = "train"


_Reader = Callable[[Path, str, bool], tuple[list[Task], list[str]]]


@dataclass(frozen=True, slots=True)
class LoadedTasks:
    """The tasks that a config's dataset section names.

    Args:
        tasks: the tasks in the dataset's order; at least one, with different keys.
        env: name of the env for the tasks.
        skipped: malformed rows that were left out, each as `line N: why`.
    """

    tasks: tuple[Task, ...]
    env: str
    skipped: tuple[str, ...] = ()


def load_tasks(config: DatasetConfig) -> LoadedTasks:
    """Loads the tasks of a plug-in, of a user's `package.module:name`, or of a .jsonl file.

    Raises:
        ConfigError: there is no such dataset, or `skip_bad_rows` is set for one that is not a .jsonl file.
        DatasetError: there is no such file or split, rows are malformed, the loader raises or yields something other than
            Tasks, there is no task, or two tasks have one key.
    """
    found, env, skipped = _find_reader(config)
    tasks = _select_tasks(config, found)
    if not tasks:
        hint = "Write one JSON object per line into it." if config.name.endswith(".jsonl") else "Name another."
        raise DatasetError(f"The split {config.split!r} of {config.name!r} holds no task.", hint)
    key, count = Counter(task.key for task in tasks).most_common(1)[0]
    if count > 1:
        raise DatasetError(f"{count} tasks of {config.name!r} have the key {key!r}.", "Give every task a key of its own.")
    return LoadedTasks(tasks, env, tuple(skipped))


def env_of(config: DatasetConfig) -> str:
    """Name of the env for the dataset's tasks; none of them is read.

    Raises:
        ConfigError: there is no such dataset.
    """
    if config.name.endswith(".jsonl"):
        from agentrl.workflow.datasets import code, jsonl  # they import this file

        return code.ENV if code.is_code(Path(config.name)) else jsonl.ENV
    dataset: Dataset = find("datasets", config.name)
    return dataset.env


def _select_tasks(config: DatasetConfig, found: Callable[[], Iterable[Task]]) -> tuple[Task, ...]:
    try:
        tasks = tuple(islice(found(), config.max_samples))
    except AgentRLError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        raise DatasetError(f"The dataset {config.name!r} cannot be loaded: {said}.", "Correct its load().") from error
    strange = next((task for task in tasks if not isinstance(task, Task)), None)
    if strange is not None:
        raise DatasetError(f"The dataset {config.name!r} yields a {type(strange).__name__}, not a Task.", "Correct its load().")
    return tasks


def _find_reader(config: DatasetConfig) -> tuple[Callable[[], Iterable[Task]], str, list[str]]:
    if config.name.endswith(".jsonl"):
        from agentrl.workflow.datasets import code, jsonl  # they import this file

        path = Path(config.name)
        form: tuple[_Reader, str] = (code.read_tasks, code.ENV) if code.is_code(path) else (jsonl.read_tasks, jsonl.ENV)
        read_tasks, env = form
        tasks, skipped = read_tasks(path, config.split, config.skip_bad_rows)
        return lambda: tasks, env, skipped
    if config.skip_bad_rows:
        raise ConfigError(f"skip_bad_rows is for .jsonl files, and the dataset is {config.name!r}.", "Leave it out.")
    dataset: Dataset = find("datasets", config.name)
    return lambda: dataset.load(config.split), dataset.env, []
