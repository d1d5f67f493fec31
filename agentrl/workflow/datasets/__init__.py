"""Datasets: each file here yields Tasks. See `Dataset`; `load_tasks` is the entry point."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
        repeated: tasks that were left out because an earlier one says the same.
    """

    tasks: tuple[Task, ...]
    env: str
    skipped: tuple[str, ...] = ()
    repeated: int = 0


def load_tasks(config: DatasetConfig) -> LoadedTasks:
    """Loads the tasks of a plug-in, of a user's `package.module:name`, or of a .jsonl file.

    Raises:
        ConfigError: there is no such dataset, or `skip_bad_rows` is set for one that is not a .jsonl file.
        DatasetError: there is no such file or split, rows are malformed, the loader raises or yields something other than
            Tasks, there is no task, or two tasks have one key.
    """
    found, env, skipped = _find_reader(config)
    repeats = _Repeats()
    tasks = _select_tasks(config, lambda: repeats.left_out(found()))
    if not tasks:
        hint = "Write one JSON object per line into it." if is_file(config.name) else "Name another."
        raise DatasetError(f"The split {config.split!r} of {config.name!r} holds no task.", hint)
    key, count = Counter(task.key for task in tasks).most_common(1)[0]
    if count > 1:
        raise DatasetError(f"{count} tasks of {config.name!r} have the key {key!r}.", "Give every task a key of its own.")
    return LoadedTasks(tasks, env, tuple(skipped), repeats.count)


class _Repeats:
    """Leaves out tasks that differ from an earlier one in nothing but their keys; `count` of them so far."""

    def __init__(self) -> None:
        self.count = 0
        self._alike: defaultdict[tuple[str, ...], list[Task]] = defaultdict(list)

    def left_out(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """The tasks without the repeated ones."""
        for task in tasks:
            if isinstance(task, Task):  # what is none is named later
                found = self._alike[task.reference, *(message.content for message in task.messages)]
                if any(replace(task, key=other.key) == other for other in found):
                    self.count += 1
                    continue
                found.append(task)
            yield task


def is_file(name: str) -> bool:
    """Whether a dataset's name is the path of a file of one's own, whose only split is `train`."""
    return name.endswith(".jsonl")


def env_of(config: DatasetConfig) -> str:
    """Name of the env for the dataset's tasks; none of them is read.

    Raises:
        ConfigError: there is no such dataset.
    """
    if is_file(config.name):
        from agentrl.workflow.datasets import code, jsonl  # they import this file

        return code.ENV if code.is_code(Path(config.name)) else jsonl.ENV
    dataset: Dataset = find("datasets", config.name)
    return dataset.env


def _select_tasks(config: DatasetConfig, found: Callable[[], Iterable[Task]]) -> tuple[Task, ...]:
    try:
        tasks = tuple(islice(found(), config.max_tasks))
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
    if is_file(config.name):
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
