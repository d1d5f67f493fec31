"""Finds repeated questions, within a dataset or between two of its splits."""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2s

from agentrl.workflow.trajectory import Task


def question_key(task: Task) -> bytes:
    """Return a hash of a task's question. The hash ignores case and white space."""
    texts = (f"{message.role}\0{' '.join(message.content.split()).casefold()}" for message in task.messages)
    return blake2s("\0".join(texts).encode("utf-8", "replace"), digest_size=16).digest()


def find_repeated(tasks: Iterable[Task]) -> Iterator[tuple[Task, Task]]:
    """Yield (earlier task, later task) for each later task that has the question of an earlier task."""
    first: dict[bytes, Task] = {}
    for task in tasks:
        earlier = first.setdefault(question_key(task), task)
        if earlier is not task:
            yield earlier, task


def find_shared(tasks: Sequence[Task], others: Iterable[Task]) -> Iterator[tuple[Task, Task]]:
    """Yield (task, other) for each task of `others` that has the question of one of `tasks`."""
    mine = {question_key(task): task for task in tasks}
    for other in others:
        if (task := mine.get(question_key(other))) is not None:
            yield task, other
