"""search_qa: questions whose answers are only in a collection of generated texts about an invented country.

There are 36 villages and founders, with one text each (`texts`), and 72 questions, half of which need two texts
(`metadata["hops"]` is 1 or 2). Every fifth question is held out.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from agentrl.workflow.datasets import Dataset
from agentrl.workflow.errors import DatasetError
from agentrl.workflow.trajectory import Message, Task, ToolCall

VILLAGES = 36
HELD_OUT = 5
SPLITS = ("train", "test")
STARTS = "Bel Cor Dra Fen Gal Hol Kes Lor Mar Nor Ost Pel Quen Ros Sel Tor Ul Ver Wes Yar"
ENDS = "amar brook dale eth fell grove hurst ingen isk low mere nara ossa rick stead thorpe una vik wold"
GIVEN_NAMES = "Aldo Brina Casimir Dalia Ewin Fenna Gorm Hesta Ivo Jorun Kerrin Lasse Milda Nevin Orla Petra Rurik Senna"
CRAFTS = (
    "glass bells|woven baskets|bone combs|painted tiles|copper kettles|silk ribbons|clay whistles|oak barrels|felt hats|"
    "reed flutes|salt cheese|beeswax candles|iron gates|paper kites|slate roofs|walnut oil|wool carpets|stone mills"
)
TRADES = "astronomer|bridge builder|cartographer|clockmaker|gardener|physician|poet|potter|shipwright|weaver"
BIRDS = "heron|magpie|kestrel|swallow|plover|owl|wren|stork|finch|raven|bittern|lapwing"


@dataclass(frozen=True, slots=True)
class Village:
    """A village and its founder, with the facts about them."""

    name: str
    founder: str
    year: int
    craft: str
    bird: str
    trade: str
    born: int


@cache
def villages() -> tuple[Village, ...]:
    """Return all villages. Every village has a different name and a different founder."""
    rng = random.Random("search_qa")
    names = rng.sample([start + end for start in STARTS.split() for end in ENDS.split()], 2 * VILLAGES)
    people = [f"{rng.choice(GIVEN_NAMES.split())} {name}" for name in names[VILLAGES:]]
    years = rng.sample(range(1320, 1790), VILLAGES)
    return tuple(_village(rng, *facts) for facts in zip(names[:VILLAGES], people, years, strict=True))


def _village(rng: random.Random, name: str, founder: str, year: int) -> Village:
    craft, bird, trade = (rng.choice(kinds.split("|")) for kinds in (CRAFTS, BIRDS, TRADES))
    return Village(name, founder, year, craft, bird, trade, born=year - rng.randint(22, 60))


def texts() -> Iterator[tuple[str, str]]:
    """Yield (title, text) of every text in the collection."""
    for village in villages():
        yield (
            village.name,
            f"{village.name} is a village that {village.founder} founded in {village.year}. It is known for its "
            f"{village.craft}. The coat of arms of {village.name} shows a {village.bird}.",
        )
        yield (
            village.founder,
            f"{village.founder} was born in {village.born} and worked as a {village.trade}. In later years "
            f"{village.founder.split()[0]} left home and founded a village.",
        )


def load(split: str) -> Iterator[Task]:
    """Yield the tasks of a split. `metadata["searches"]` lists searches that lead to the answer. Raise DatasetError for an
    unknown split.
    """
    if split not in SPLITS:
        raise DatasetError(f"search_qa has no split {split!r}.", f"Splits: {', '.join(SPLITS)}.")
    return (
        Task(f"{split}/{number}", (Message("user", question),), answer, {"hops": len(searches), "searches": searches})
        for number, (question, answer, searches) in enumerate(_questions())
        if (number % HELD_OUT == HELD_OUT - 1) == (split == "test")
    )


def demonstrations(tasks: Sequence[Task], seed: int) -> Iterator[tuple[Message, ...]]:
    """Yield for each task the searches with their real results, and the answer. `seed` is not used."""
    from agentrl.workflow.plugins import find  # the env imports this file

    search = find("envs", "search_qa").toolset()["search"]
    for task in tasks:
        turns: list[Message] = []
        for query in task.metadata["searches"]:
            call = ToolCall("search", {"query": query})
            turns.append(Message("assistant", "", tool_calls=(call,)))
            turns.append(Message("tool", search.call(call.arguments), name="search"))
        yield (*task.messages, *turns, Message("assistant", task.reference))


def _questions() -> Iterator[tuple[str, str, list[str]]]:
    for number, it in enumerate(villages()):
        one = [
            (f"What is the village of {it.name} known for?", it.craft),
            (f"In which year was the village of {it.name} founded?", str(it.year)),
            (f"Which bird is on the coat of arms of {it.name}?", it.bird),
        ][number % 3]
        two = [
            (f"What was the trade of the founder of {it.name}?", it.trade),
            (f"In which year was the founder of {it.name} born?", str(it.born)),
        ][number % 2]
        yield (*one, [it.name])
        yield (*two, [it.name, it.founder])


search_qa = Dataset(load=load, env="search_qa", demonstrations=demonstrations)
