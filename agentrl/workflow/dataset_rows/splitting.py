"""Finds repeated questions, and splits rows into two files so that equal questions are in the same file."""

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2s
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO

from agentrl.workflow.errors import ConflictError, DatasetError, ServiceError
from agentrl.workflow.trajectory import Task


def question_key(task: Task) -> bytes:
    """Return a hash of a task's question. The hash ignores case and white space."""
    texts = (f"{message.role}\0{' '.join(message.content.split()).casefold()}" for message in task.messages)
    return blake2s("\0".join(texts).encode("utf-8", "replace"), digest_size=16).digest()


def find_repeated(tasks: Iterable[Task]) -> Iterator[tuple[Task, Task]]:
    """Yield (first task, task) for each task whose question an earlier task already had."""
    first: dict[bytes, Task] = {}
    for task in tasks:
        earlier = first.setdefault(question_key(task), task)
        if earlier is not task:
            yield earlier, task


def find_shared(tasks: Sequence[Task], others: Iterable[Task]) -> Iterator[tuple[Task, Task]]:
    """For each task in `others` whose question is also in `tasks`, yield the pair (task of `tasks`, task of `others`)."""
    mine = {question_key(task): task for task in tasks}
    for other in others:
        if (task := mine.get(question_key(other))) is not None:
            yield task, other


SPLITS = ("train", "test")


def is_held_out(key: bytes, share: float, seed: int) -> bool:
    """Return True if the question belongs to the test split. Only a hash of the seed and `key` decides, so equal questions get
    the same split. `key` is the `question_key` of the question.
    """
    digest = hashlib.sha256(f"{seed}|split|".encode() + key).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def write_splits(rows: Iterable[tuple[dict[str, Any], bool]], folder: Path, force: bool = False) -> dict[str, int]:
    """Write the held-out rows to `test.jsonl` and the other rows to `train.jsonl`. Return the number of rows of each split.

    `rows` are pairs (columns, True if held out). Either both files are written or neither. Raise ConflictError if a file
    exists, and `force` is off. Raise DatasetError if a split has no row, or the rows cannot be read. Raise ServiceError if the
    folder cannot be written, or the disk is full.
    """
    files = {split: folder / f"{split}.jsonl" for split in SPLITS}
    if not force and (existing := next((file for file in files.values() if file.exists()), None)):
        raise ConflictError(f"The file {str(existing)!r} exists.", "Pass another --out, or overwrite it with --force.")
    counts = dict.fromkeys(SPLITS, 0)
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            beside = {split: stack.enter_context(_open_beside(folder)) for split in SPLITS}
            for values, held_out in rows:
                split = SPLITS[held_out]
                beside[split].write(json.dumps(values, ensure_ascii=False).encode() + b"\n")
                counts[split] += 1
            for split, file in beside.items():
                file.flush()
                os.fsync(file.fileno())
                if not counts[split]:
                    raise DatasetError(f"No row is in the split {split!r}.", "Pass another --share or --seed.")
            for split, file in beside.items():
                os.replace(file.name, files[split])
        except OSError as error:
            full = "no space is left" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else error.strerror
            raise ServiceError(
                f"Cannot write to {str(folder)!r}: {full}.", "Free some space, or pass another --out."
            ) from error
    return counts


@contextmanager
def _open_beside(folder: Path) -> Iterator[BinaryIO]:
    """Open a temporary file in the folder. At the end the file is removed, unless the caller has renamed it."""
    file = NamedTemporaryFile(dir=folder, prefix=".split-", delete=False)  # noqa: SIM115 - its close may fail
    try:
        yield file  # type: ignore[misc]
    finally:
        with suppress(OSError):  # a full disk was reported when the file was flushed
            file.close()
        Path(file.name).unlink(missing_ok=True)
