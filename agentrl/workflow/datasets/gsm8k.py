"""gsm8k: 7,473 training and 1,319 test problems of school mathematics (Cobbe et al. 2021, arXiv:2110.14168).

The published JSON lines are read from the folder AGENTRL_GSM8K_DIR if it is set, else from the hub. A task's reference is the
number after `####`. The task's key ends with the number of its row, counted from 1.

In a demonstration, each computation (`<<48/2=24>>`) becomes a call of the calculator with its real result. A row has no
demonstration if the calculator gets another result.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from agentrl.workflow.config import DatasetConfig
from agentrl.workflow.dataset_rows.sources import read_source
from agentrl.workflow.datasets import Dataset
from agentrl.workflow.datasets.jsonl import TaskRow, malformed_error, read_file, read_values
from agentrl.workflow.errors import DatasetError, ToolFailure, did_you_mean
from agentrl.workflow.plugins import find
from agentrl.workflow.settings import settings
from agentrl.workflow.trajectory import Message, Task, ToolCall

Calculate = Callable[[Mapping[str, Any]], str]
SPLITS = ("train", "test")
HUB_NAME = "openai/gsm8k"
ANNOTATION = re.compile(r"<<(.*?)=([^=]*?)>>")
ROUNDING_SHARE = Fraction(1, 100)
"""The largest relative rounding error of a result in a solution (`<<1/3=0.33>>`)."""
HINT = "Set AGENTRL_GSM8K_DIR to the folder that holds train.jsonl and test.jsonl."


def load(split: str) -> Iterator[Task]:
    """Yield the split's tasks in the published order. Raise DatasetError if the rows cannot be read or are not gsm8k's."""
    return (_task(split, row) for row in _rows(split))


def demonstrations(tasks: Sequence[Task], seed: int) -> Iterator[tuple[Message, ...] | None]:
    """Yield for each task the question, calculator calls with their real results, and the final answer; None if the solution's
    computations cannot be repeated. The seed is not used.
    """
    splits = {task.key.split("/")[1] for task in tasks}
    solutions = {_key(split, row): row.reference for split in splits for row in _rows(split)}
    calculate = find("tools", "calculator").call
    for task in tasks:
        turns = _turns(solutions[task.key], task.reference, calculate)
        yield None if turns is None else (*task.messages, *turns)


def _turns(solution: str, reference: str, calculate: Calculate) -> list[Message] | None:
    # Splitting at a pattern with two groups gives text, expression, result, text, expression, result, ..., text.
    *pieces, rest = ANNOTATION.split(solution.rpartition("####")[0])
    turns = []
    for text, expression, written in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        call = ToolCall("calculator", {"expression": expression})
        try:
            result = calculate(call.arguments)
        except ToolFailure:
            return None
        if not _is_same(result, written):
            return None
        turns += [Message("assistant", text.strip(), tool_calls=(call,)), Message("tool", result, name="calculator")]
    return [*turns, Message("assistant", f"{rest.strip()}\n#### {reference}".strip())]


def _is_same(result: str, written: str) -> bool:
    """Return True if the calculator's result equals the result in the solution, up to rounding."""
    try:
        meant = Fraction(written.strip().lstrip("$").rstrip("%").replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return False
    return abs(Fraction(result) - meant) <= ROUNDING_SHARE * abs(Fraction(result))


def _task(split: str, row: TaskRow) -> Task:
    annotations = len(ANNOTATION.findall(row.reference))
    return Task(_key(split, row), row.messages, _number(row), {"annotations": annotations})


def _key(split: str, row: TaskRow) -> str:
    return f"gsm8k/{split}/{row.line}"


def _number(row: TaskRow) -> str:
    return row.reference.rpartition("####")[2].strip().replace(",", "")


def _rows(split: str) -> list[TaskRow]:
    if split not in SPLITS:
        raise DatasetError(f"gsm8k has no split {split!r}.", did_you_mean(split, SPLITS))
    folder = settings().gsm8k_dir
    rows, problems = read_file(Path(folder) / f"{split}.jsonl") if folder else _read_hub(split)
    problems += [f"line {row.line}: no '#### ANSWER' in the answer" for row in rows if "####" not in row.reference]
    if problems:
        raise malformed_error(f"gsm8k {split}", problems, "Take the published files.")
    return rows


def _read_hub(split: str) -> tuple[list[TaskRow], list[str]]:
    try:
        return read_values(read_source(DatasetConfig(name=f"{HUB_NAME}:main", split=split)))
    except DatasetError as error:
        raise DatasetError(f"gsm8k cannot be loaded: {error.message}", HINT) from error


gsm8k = Dataset(load=load, env="math", demonstrations=demonstrations)
