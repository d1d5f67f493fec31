"""What an update of both sides trains on: 8 groups of 8 completions of one prompt each, all of one length, with rewards."""

import random
from dataclasses import dataclass

GROUPS, GROUP_SIZE = 8, 8
PROMPT_TOKENS, SAMPLED_TOKENS = 256, 256
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Recorded:
    """Prompts by group; completions and rewards by group and episode."""

    prompts: list[tuple[int, ...]]
    completions: list[list[tuple[int, ...]]]
    rewards: list[list[float]]


def recorded() -> Recorded:
    """The same each time: random ids that every model here has, and random rewards."""
    draw = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(20, 300) for _ in range(count))

    return Recorded(
        [ids(PROMPT_TOKENS) for _ in range(GROUPS)],
        [[ids(SAMPLED_TOKENS) for _ in range(GROUP_SIZE)] for _ in range(GROUPS)],
        [[draw.random() for _ in range(GROUP_SIZE)] for _ in range(GROUPS)],
    )
