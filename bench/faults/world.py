"""A run that takes a second and does all that a run does: two turns, each with a call, and updates of real weights.

The first turn's tool may run twice; its result is read by the policy. The second turn's may not; nobody reads its result, so
that the tokens stay the same also where its outcome is unknown. Rewards follow from the sampled tokens, in which are random
digits; a judge has its say without weight. Of one task all episodes earn the same, so that its iteration is sampled on.

In the second world, `boxed`, the first tool is a program in the sandbox. It says the same, so that every token and weight is
the first world's. In the third, `critic`, the run learns by PPO: a value head, two passes, a learning rate that falls and a
weight of the KL that moves are what the trainer must not lose either. In the fourth, `agent`, the turns of a smaller run are
decided by an agent of the user's, `world_agent`, which calls the endpoint.
"""

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.workflow.config import RunConfig, build
from agentrl.workflow.datasets import Dataset
from agentrl.workflow.envs import Env
from agentrl.workflow.hooks import Hook
from agentrl.workflow.rewards import Judge
from agentrl.workflow.settings import settings
from agentrl.workflow.tools import Tool
from agentrl.workflow.tools.python import python
from agentrl.workflow.trajectory import Episode, Message, Task, ToolCall

RUN = "faults"
ITERATIONS, GROUPS, EPISODES, TURNS = 3, 2, 2, 2
FLAT, MORE = "train/0", 1
"""Three iterations: the optimizer state of a policy is dropped two policies later. One has a group more, for the flat one."""

AGENT = "bench.faults.world_agent:solve"
AGENT_ITERATIONS = 1

NOTES = "notes"
WARM_UP_STEPS = 60


def plus(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


def note(digit: int) -> str:
    """Writes a digit down."""
    with (settings().root / NOTES).open("a") as notes:
        notes.write(str(digit % 10))
    return "noted"


def _digits(text: str) -> str:
    """How many digits it has."""
    return str(sum(letter.isdecimal() for letter in text))


def _plus_program(a: int, b: int) -> str:
    """Adds."""
    return f"print({a} + {b})"


_plus_program.__name__ = "plus"
plus_tool = Tool(plus, timeout_seconds=2.0)
plus_program = replace(python, function=_plus_program, timeout_seconds=3.0)
note_tool = Tool(note, effects="once", timeout_seconds=0.5)
judge = Judge(_digits, asks=lambda episode: {"text": episode.messages[-1].content}, timeout_seconds=2.0)
REWARDS = {f"{__name__}:judge": 0.0}
world = Env(tools=(f"{__name__}:plus_tool", f"{__name__}:note_tool"), rewards=REWARDS)
boxed = Env(tools=(f"{__name__}:plus_program", f"{__name__}:note_tool"), rewards=REWARDS)


def load(split: str) -> Iterator[Task]:
    """Tasks without end."""
    number = 0
    while True:
        yield Task(f"{split}/{number}", (Message("user", f"Play {number % 10}."),), "")
        number += 1


def demonstrations(tasks: Sequence[Task], seed: int) -> Iterator[tuple[Message, ...]]:
    """Both calls, with random digits."""
    dice = random.Random(seed)
    for task in tasks:
        a, b, c = (dice.randrange(10) for _ in range(3))
        yield (
            *task.messages,
            Message("assistant", "", tool_calls=(ToolCall("plus", {"a": a, "b": b}),)),
            Message("tool", str(a + b), name="plus"),
            Message("assistant", "", tool_calls=(ToolCall("note", {"digit": c}),)),
        )


tasks = Dataset(load=load, env=f"{__name__}:world", demonstrations=demonstrations, sft_split="warmup")


class Chance(Hook):
    """Rewards chance: a number between 0 and 1 that follows from the sampled tokens alone, but for one task."""

    def on_rollout_end(self, episode: Episode) -> Mapping[str, float]:
        """Their hash."""
        if episode.task.key == FLAT:
            return {"chance": 0.5}
        return {"chance": zlib.crc32(repr([step.sampled_ids for step in episode.steps]).encode()) / 2**32}


def make_model(folder: Path) -> None:
    """A model of some 100,000 parameters that has learned to make both calls."""
    import torch

    from agentrl.workflow.chat.rendering import Chat
    from agentrl.workflow.models.tiny import save_tiny, tiny_model, tiny_tokenizer
    from agentrl.workflow.training.offline_training import Recipe, train
    from agentrl.workflow.training.supervised import demonstrations as shown_in
    from agentrl.workflow.training.supervised import likelihood_objective, row_of, segments_of, texts_of

    torch.set_num_threads(1)
    shown = [one for one in shown_in(tasks, 16 * WARM_UP_STEPS, 0) if one]
    tokenizer = tiny_tokenizer(texts_of(shown[:200]))
    model = tiny_model(len(tokenizer), 0, layers=2, width=64)
    examples = [(row_of(segments_of(Chat(tokenizer), one)),) for one in shown]
    train(model, examples, Recipe(WARM_UP_STEPS, 16, 1e-2), likelihood_objective())
    save_tiny(folder, model, tokenizer)


PPO = {
    "algorithm.name": "ppo",
    "algorithm.kl_coef": 0.05,
    "algorithm.kl_target": 0.01,
    "update.epochs": 2,
    "update.decay": "linear",
}


def planned(env: str) -> int:
    """How many episodes a run in that world has."""
    return (AGENT_ITERATIONS * GROUPS if env == "agent" else ITERATIONS * GROUPS + MORE) * EPISODES


def config(model: Path, seed: int, env: str = "world") -> RunConfig:
    """The run in one of the worlds."""
    loop = {"rollout.max_steps": TURNS, "rollout.last_turn": "plain", "rollout.dynamic_sampling": 2}
    return build(
        {
            **(PPO if env == "critic" else {}),
            **({"agent.name": AGENT} if env == "agent" else loop),
            "name": RUN,
            "seed": seed,
            "epochs": 1,
            "env": f"{__name__}:{'boxed' if env == 'boxed' else 'world'}",
            "hooks": (f"{__name__}:Chance",),
            "dataset.name": f"{__name__}:tasks",
            "dataset.max_tasks": (AGENT_ITERATIONS if env == "agent" else ITERATIONS) * GROUPS,
            "model.path": str(model),
            "model.numerics": "exact",
            "rollout.tasks_per_iteration": GROUPS,
            "rollout.group_size": EPISODES,
            "rollout.max_new_tokens": 24,
        }
    )
