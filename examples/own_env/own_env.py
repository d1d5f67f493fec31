"""An env of your own for the built-in loop: a sum, asked again after a wrong answer; no agent, no SDK."""

import argparse
import random
from collections.abc import Mapping, Sequence
from typing import Any

import agentrl

TRIES = 3


class Sums(agentrl.Env):
    """Keeps no state: what it says follows from the episode alone."""

    def step(self, episode: agentrl.Episode) -> tuple[agentrl.Message, ...]:
        """What the model reads after a turn: the calculator's result, or the question again; nothing when it is over."""
        if episode.steps[-1].message.tool_calls:
            return super().step(episode)
        said = answers(episode)
        return () if said[-1] == episode.task.reference or len(said) == TRIES else self.reset(episode.task)

    def final_reward(self, episode: agentrl.Episode) -> Mapping[str, float]:
        """1 for a right first answer, a half for a second, a third for a third."""
        said = answers(episode)
        return {"answered": 1 / len(said) if said and said[-1] == episode.task.reference else 0.0}


def answers(episode: agentrl.Episode) -> Sequence[str]:
    """The turns that do not call the calculator."""
    return [step.message.content.strip() for step in episode.steps if not step.message.tool_calls]


SUMS = Sums(tools=("calculator",), correct=("answered",))


def main() -> None:
    """Trains in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-arithmetic")
    parser.add_argument("--iterations", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    asked = parser.parse_args()
    pairs = random.Random(0).sample([(a, b) for a in range(20, 100) for b in range(1, 20)], 320)
    rows = [{"question": f"What is {a} minus {b}?", "answer": str(a - b)} for a, b in pairs]
    options: dict[str, Any] = {"group_size": asked.group_size, "max_new_tokens": 32, "learning_rate": 4e-4}
    trainer = agentrl.Trainer("grpo", model=asked.model, env=SUMS, **options)
    run = trainer.fit(train_dataset=rows[64:], val_dataset=rows[:64], iterations=asked.iterations, tasks_per_iteration=16)
    print(run.curve())
    print(f"{run.name}: {run.status}, {sum(1 for _ in run.episodes().rows())} episodes")


if __name__ == "__main__":
    main()
