"""The tool workload as a user would write it: a dataset, an env per latency, a tool that only waits. Free of torch.

Each episode has two calls and an answer. What is said is decided by a table, so that any sampler says it: each turn begins
with a cue, the last word that was read, and goes on word by word to a call whose result is the next turn's cue.
"""

import random
import time
from collections.abc import Callable, Iterator
from functools import cache

from agentrl.workflow.datasets import Dataset
from agentrl.workflow.envs import Env
from agentrl.workflow.tools import Tool
from agentrl.workflow.trajectory import Episode, Message, Task

TASKS, TURNS = 16, 3
SHORTEST, LONGEST = 24, 64
"""Tokens of a turn, its end included, uniform."""

PROMPT_WORDS = 40
LATENCIES_MS = (0, 50, 200)


@cache
def length(task: int, turn: int) -> int:
    """Tokens of that turn."""
    return random.Random(f"{task} {turn}").randint(SHORTEST, LONGEST)


def cue(task: int, turn: int) -> str:
    """The last word that is read before that turn."""
    return f"c{task * TURNS + turn:05d}"


def word(number: int) -> str:
    """A word that is one token."""
    return f" w{number:05d}"


def call(task: int, turn: int) -> str:
    """What ends that turn, one token too: a call for the next turn's cue; of the last turn, an answer."""
    if turn == TURNS - 1:
        return f" a{task:05d}"
    return f'<tool_call>\n{{"name": "look", "arguments": {{"key": "{cue(task, turn + 1)}"}}}}\n</tool_call>'


def script(task: int, turn: int) -> list[str]:
    """The tokens of that turn but its end, as texts."""
    first = (task * TURNS + turn) * LONGEST
    return [*(word(first + number) for number in range(length(task, turn) - 2)), call(task, turn)]


def question(task: int) -> str:
    """The prompt: some words, and the first cue."""
    return "".join(word(task + number) for number in range(PROMPT_WORDS)) + f" {cue(task, 0)}"


def waiting(milliseconds: int) -> Callable[[str], str]:
    """The tool's function: waits so long, and says the word that it was asked for."""

    def look(key: str) -> str:
        """Looks a word up.

        Args:
            key: the word.
        """
        time.sleep(milliseconds / 1000)
        return f"see {key}"

    return look


def _tasks(split: str) -> Iterator[Task]:
    for task in range(TASKS):
        yield Task(f"{split}/{task}", (Message("user", question(task)),), "")


def same(episode: Episode) -> float:
    """Every episode is worth the same, so that no update follows."""
    return 1.0


def _env(tool: str) -> Env:
    return Env(tools=(f"{__name__}:{tool}",), rewards={f"{__name__}:same": 1.0})


tool_0, tool_50, tool_200 = (Tool(waiting(milliseconds)) for milliseconds in LATENCIES_MS)
env_0, env_50, env_200 = (_env(f"tool_{milliseconds}") for milliseconds in LATENCIES_MS)
dataset = Dataset(load=_tasks, env=f"{__name__}:env_0")
