"""code_tiny: functions of one expression, `Write f(x, y) that gives x plus y times 2.` The tasks are always the same.

There are 256 tasks for training, 128 held-out tasks, and 8,192 more (split `warmup`) for supervised fine-tuning. The question
shows one test, and five are hidden. At least one hidden test fails if two operators are confused.

In the demonstrations, an unreliable teacher tries out its function with the tool python, ignores the output, and often confuses
one operator with another.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import islice, product

from agentrl.workflow.datasets import Dataset
from agentrl.workflow.datasets.code import code_metadata
from agentrl.workflow.errors import DatasetError
from agentrl.workflow.sandbox.function_tests import Case
from agentrl.workflow.trajectory import Message, Task, ToolCall

OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
SPLITS = {"test": 128, "train": 256, "warmup": 8_192}
LEVELS = (2, 3, 3)
"""The numbers of terms of the questions, used in turn."""

TERMS = ("x", "y", *map(str, range(2, 21)))
CASES = 6
CONFUSED_OPERATORS = {"plus": "-", "minus": "*", "times": "+"}
MISTAKE_RATE = 0.4
"""The probability that the teacher writes the confused operator. About half of its functions are right."""


def load(split: str) -> Iterator[Task]:
    """Yield the tasks of `train`, `test` or `warmup`. Raise DatasetError if the split does not exist."""
    if split not in SPLITS:
        raise DatasetError(f"code_tiny has no split {split!r}.", f"Splits: {', '.join(SPLITS)}.")
    names = list(SPLITS)
    start = sum(SPLITS[name] for name in names[: names.index(split)])
    return (
        _task(f"{split}/{i}", phrase) for i, phrase in enumerate(islice(_distinct_questions(), start, start + SPLITS[split]))
    )


def demonstrations(tasks: Sequence[Task], seed: int) -> Iterator[tuple[Message, ...]]:
    """Yield one conversation per task: a call that tries out a function, often a wrong one, then the answer."""
    rng = random.Random(f"code_tiny demonstrations {seed}")
    for task in tasks:
        terms = str(task.metadata["words"]).split()
        expression = _expression(
            terms, [(CONFUSED_OPERATORS if rng.random() < MISTAKE_RATE else OPERATORS)[word] for word in terms[1::2]]
        )
        x, y = Case.of(task.metadata["visible"][0]).args
        yield (
            *task.messages,
            Message(
                "assistant", "", tool_calls=(ToolCall("python", {"code": f"{_function(expression)}\nprint(f({x}, {y}))"}),)
            ),
            Message("tool", str(_value(expression, x, y)), name="python"),
            Message("assistant", _function(expression)),
        )


def _distinct_questions() -> Iterator[str]:
    """Yield endless questions in words. The questions of `test` and `train` occur once; the others may repeat."""
    rng = random.Random("code_tiny")
    reserved: set[str] = set()
    max_reserved = SPLITS["test"] + SPLITS["train"]
    count = 0
    while True:
        phrase = _words(rng, LEVELS[count % len(LEVELS)])
        if phrase in reserved:
            continue
        if count < max_reserved:
            reserved.add(phrase)
        count += 1
        yield phrase


def _words(rng: random.Random, terms: int) -> str:
    """Return an expression in words, such as `x plus y times 2`, with `terms` terms in random order."""
    chosen = ["x", "y", rng.choice(TERMS)][:terms] if terms > 2 else [rng.choice("xy"), rng.choice(TERMS)]
    rng.shuffle(chosen)
    phrase = chosen[0]
    for term in chosen[1:]:
        phrase += f" {rng.choice(list(OPERATORS))} {term}"
    return phrase


def _task(key: str, phrase: str) -> Task:
    rng = random.Random(f"code_tiny cases {phrase}")
    expression = _expression(phrase.split(), [OPERATORS[word] for word in phrase.split()[1::2]])
    while True:
        cases = [_case(expression, rng.randint(2, 9), rng.randint(2, 9)) for _ in range(CASES)]
        if _is_telling(phrase.split(), cases[1:]):
            break
    x, y = cases[0].args
    question = f"Write f(x, y) that gives {phrase}. f({x}, {y}) is {cases[0].value}."
    metadata = {**code_metadata("f", cases[1:], visible=cases[:1]), "words": phrase}
    return Task(key, (Message("user", question),), _function(expression), metadata)


def _is_telling(terms: Sequence[str], cases: Sequence[Case]) -> bool:
    """Return True if each function with other operators fails at least one case, or is equivalent."""
    right = _expression(terms, [OPERATORS[word] for word in terms[1::2]])
    grid = list(product(range(2, 10), repeat=2))
    for signs in product(OPERATORS.values(), repeat=len(terms) // 2):
        other = _expression(terms, signs)
        same = all(_value(other, x, y) == _value(right, x, y) for x, y in grid)
        if not same and all(_value(other, *case.args) == case.value for case in cases):
            return False
    return True


def _case(expression: str, x: int, y: int) -> Case:
    return Case((x, y), _value(expression, x, y))


def _function(expression: str) -> str:
    return f"def f(x, y): return {expression}"


def _expression(terms: Sequence[str], signs: Sequence[str]) -> str:
    return terms[0] + "".join(f" {sign} {term}" for sign, term in zip(signs, terms[2::2], strict=True))


def _value(expression: str, x: int, y: int) -> int:
    """Return the value of an expression of terms with + - *. Products are computed first."""
    total, sign, factor = 0, 1, 1
    for word in ["*", *expression.split(), "+"]:
        if word in ("+", "-"):
            total, sign, factor = total + sign * factor, 1 if word == "+" else -1, 1
        elif word != "*":
            factor *= {"x": x, "y": y}[word] if word in "xy" else int(word)
    return total


code_tiny = Dataset(load=load, env="code_tiny", demonstrations=demonstrations, sft_split="warmup")
