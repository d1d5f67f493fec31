"""qa: 96 generated questions with answers of a word or a number, without tools. Every fourth is held out."""

import random
from collections.abc import Callable, Iterator, Sequence

from agentrl.workflow.datasets import Dataset
from agentrl.workflow.errors import DatasetError
from agentrl.workflow.trajectory import Message, Task

TASKS = 96
HELD_OUT = 4
SPLITS = ("train", "test")
OPPOSITES = (
    "hot cold|early late|empty full|wide narrow|deep shallow|heavy light|loud quiet|rough smooth|wet dry|strong weak|"
    "tall short|young old|bright dark|cheap expensive|clean dirty|soft hard|thick thin|rich poor|first last|sharp blunt"
)
WORDS = (
    "anchor balcony candle dolphin engine forest garden hammer island jacket kettle ladder mirror needle orchard pencil quarry "
    "rocket saddle teapot umbrella velvet window yogurt zipper basket cactus drawer"
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
PEOPLE = "Amina Boris Chiara Dmitri Elif Franz Giulia Hugo"
COLOURS = "red blue green yellow white black"
THINGS = "kite hat boat mug scarf bicycle"
Question = tuple[str, str]


def load(split: str) -> Iterator[Task]:
    """Yield the tasks of `train` or `test`. Raise DatasetError if the split does not exist."""
    if split not in SPLITS:
        raise DatasetError(f"qa has no split {split!r}.", f"Splits: {', '.join(SPLITS)}.")
    return (
        Task(f"{split}/{number}", (Message("user", question),), answer, {"kind": kind})
        for number, (kind, question, answer) in enumerate(_questions())
        if (number % HELD_OUT == HELD_OUT - 1) == (split == "test")
    )


def demonstrations(tasks: Sequence[Task], seed: int) -> Iterator[tuple[Message, ...]]:
    """Yield the answer of each task. `seed` is not used."""
    return ((*task.messages, Message("assistant", task.reference)) for task in tasks)


def _questions() -> list[tuple[str, str, str]]:
    rng = random.Random("qa")
    kinds = list(KINDS)
    seen: dict[str, tuple[str, str, str]] = {}
    while len(seen) < TASKS:
        kind = kinds[len(seen) % len(kinds)]
        question, answer = KINDS[kind](rng)
        seen.setdefault(question, (kind, question, answer))
    return list(seen.values())


def _opposite(rng: random.Random) -> Question:
    pairs = [pair.split() for pair in OPPOSITES.split("|")]
    (word, answer), (wrong, _) = rng.sample(pairs, 2)
    return f"What is the opposite of {word}: {' or '.join(rng.sample([answer, wrong], 2))}?", answer


def _letters(rng: random.Random) -> Question:
    word = rng.choice(WORDS.split())
    return f"How many letters has the word {word}?", str(len(word))


def _day(rng: random.Random) -> Question:
    week, start, days = DAYS.split(), rng.randrange(7), rng.randint(2, 6)
    return f"Today is {week[start]}. Which day will it be in {days} days?", week[(start + days) % 7]


def _alphabet(rng: random.Random) -> Question:
    candidates = rng.sample(WORDS.split(), 3)
    return f"Which of these words comes first in the alphabet: {', '.join(candidates)}?", min(candidates)


def _owner(rng: random.Random) -> Question:
    one, other = rng.sample(PEOPLE.split(), 2)
    colour, second = rng.sample(COLOURS.split(), 2)
    thing = rng.choice(THINGS.split())
    statement = f"{one} has a {colour} {thing}, and {other} has a {second} one."
    wanted_colour, answer = rng.choice([(colour, one), (second, other)])
    return f"{statement} Who has the {wanted_colour} {thing}?", answer


KINDS: dict[str, Callable[[random.Random], Question]] = {
    "opposite": _opposite,
    "letters": _letters,
    "day": _day,
    "alphabet": _alphabet,
    "owner": _owner,
}

qa = Dataset(load=load, env="qa", demonstrations=demonstrations)
