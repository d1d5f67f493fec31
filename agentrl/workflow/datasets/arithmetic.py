"""arithmetic: generated sums in words, `What is 12 plus 7?`, in three levels of difficulty. The tasks are always the same.

There are 512 tasks for training, 256 held-out tasks, and 16,384 more (split `warmup`) for supervised fine-tuning. No question
is in two splits. In the demonstrations, an unreliable teacher calls the calculator and answers with the result, but often
confuses one operator with another. So a model that imitates the teacher solves half of the tasks. Reinforcement learning can
then teach it which operator each word means.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import islice

from agentrl.workflow.datasets import Dataset
from agentrl.workflow.errors import DatasetError
from agentrl.workflow.trajectory import Message, Task, ToolCall

OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
SPLITS = {"test": 256, "train": 512, "warmup": 16_384}
LEVELS = (2, range(1, 21)), (2, range(10, 100)), (3, range(1, 11))
"""The number of operands and their range, for each level."""

CONFUSED_OPERATORS = {"plus": "-", "minus": "*", "times": "+"}
MISTAKE_RATE = 0.4
"""The probability that the teacher writes the confused operator. Each word is always confused with the same other operator. A
model learns such a teacher's answers ten times faster than those of a teacher that draws wrong operators at random, at the same
share of right answers.
"""


def load(split: str) -> Iterator[Task]:
    """Yield the tasks of a split. `metadata["level"]` is 1, 2 or 3. Raise DatasetError for an unknown split."""
    if split not in SPLITS:
        raise DatasetError(f"arithmetic has no split {split!r}.", f"Splits: {', '.join(SPLITS)}.")
    names = list(SPLITS)
    start = sum(SPLITS[name] for name in names[: names.index(split)])
    questions = islice(_distinct_questions(), start, start + SPLITS[split])
    return (_task(f"{split}/{i}", level, phrase) for i, (level, phrase) in enumerate(questions))


def demonstrations(tasks: Sequence[Task], seed: int) -> Iterator[tuple[Message, ...]]:
    """Yield one conversation of two turns per task: a calculator call, which is often wrong, and its result as the answer."""
    rng = random.Random(f"arithmetic demonstrations {seed}")
    for task in tasks:
        terms = str(task.metadata["words"]).split()
        signs = [(CONFUSED_OPERATORS if rng.random() < MISTAKE_RATE else OPERATORS)[word] for word in terms[1::2]]
        expression = _expression(terms[::2], signs)
        result = _value(expression)
        call = ToolCall("calculator", {"expression": expression})
        yield (
            *task.messages,
            Message("assistant", "", tool_calls=(call,)),
            Message("tool", result, name="calculator"),
            Message("assistant", result),
        )


def _distinct_questions() -> Iterator[tuple[int, str]]:
    """Yield endless questions as (level, phrase), with the levels in turn."""
    rng = random.Random("arithmetic")
    seen: set[str] = set()
    reserved = SPLITS["test"] + SPLITS["train"]
    count = 0
    while True:
        level = count % len(LEVELS)
        phrase = _words(rng, *LEVELS[level])
        if phrase in seen:
            continue
        # The small levels have fewer questions than the warm-up needs: those may repeat, but only among themselves.
        if count < reserved:
            seen.add(phrase)
        count += 1
        yield level + 1, phrase


def _words(rng: random.Random, count: int, numbers: range) -> str:
    parts = [str(rng.choice(numbers))]
    for _ in range(count - 1):
        parts += [rng.choice(list(OPERATORS)), str(rng.choice(numbers))]
    return " ".join(parts)


def _task(key: str, level: int, phrase: str) -> Task:
    parts = phrase.split()
    reference = _value(_expression(parts[::2], [OPERATORS[word] for word in parts[1::2]]))
    return Task(key, (Message("user", f"What is {phrase}?"),), reference, {"level": level, "words": phrase})


def _expression(numbers: Sequence[str], signs: Sequence[str]) -> str:
    return numbers[0] + "".join(sign + number for sign, number in zip(signs, numbers[1:], strict=True))


def _value(expression: str) -> str:
    """Return the value of an expression of integers with + - *. Products are computed first."""
    terms = expression.replace("-", "+-").split("+")
    return str(sum(_product(term) for term in terms))


def _product(term: str) -> int:
    value = 1
    for factor in term.split("*"):
        value *= int(factor)
    return value


arithmetic = Dataset(load=load, env="arithmetic", demonstrations=demonstrations, sft_split="warmup")
