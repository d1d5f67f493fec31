"""echo: 64 texts to send through the tool echo and to repeat. These are the smallest tasks with a tool. Every fourth text is
held out.
"""

import random
from collections.abc import Iterator, Sequence

from agentrl.workflow.datasets import Dataset
from agentrl.workflow.errors import DatasetError
from agentrl.workflow.trajectory import Message, Task, ToolCall

TASKS = 64
HELD_OUT = 4
SPLITS = ("train", "test")
WORDS = (
    "amber anchor basil cedar cobalt copper coral delta ember fern flint fox granite harbour hazel heron indigo iris juniper "
    "kelp lantern lilac maple marble meadow moss nectar oak olive onyx opal otter pearl pine plum quartz raven reed river "
    "saffron sage slate sparrow spruce teal thistle tulip violet walnut willow"
)


def load(split: str) -> Iterator[Task]:
    """Yield the tasks of `train` or `test`. The reference is the text. Raise DatasetError if the split does not exist."""
    if split not in SPLITS:
        raise DatasetError(f"echo has no split {split!r}.", f"Splits: {', '.join(SPLITS)}.")
    return (
        Task(f"{split}/{number}", (Message("user", f'Echo "{text}".'),), text)
        for number, text in enumerate(_texts())
        if (number % HELD_OUT == HELD_OUT - 1) == (split == "test")
    )


def demonstrations(tasks: Sequence[Task], seed: int) -> Iterator[tuple[Message, ...]]:
    """Yield the call, its result and the answer of each task. `seed` is not used."""
    for task in tasks:
        yield (
            *task.messages,
            Message("assistant", "", tool_calls=(ToolCall("echo", {"text": task.reference}),)),
            Message("tool", task.reference, name="echo"),
            Message("assistant", task.reference),
        )


def _texts() -> list[str]:
    rng = random.Random("echo")
    seen: dict[str, None] = {}
    while len(seen) < TASKS:
        seen[" ".join(rng.sample(WORDS.split(), 1 + len(seen) % 3))] = None
    return list(seen)


echo = Dataset(load=load, env="echo", demonstrations=demonstrations)
