"""An env of your own for the built-in loop: guess a number, told higher or lower; no agent, no SDK."""

import argparse
import re
from collections.abc import Mapping

import agentrl


class Guess(agentrl.Env):
    """Keeps no state: what it says follows from the episode alone."""

    def reset(self, task: agentrl.Task) -> tuple[agentrl.Message, ...]:
        """What the model reads first."""
        return (agentrl.Message("user", "Guess my number, from 1 to 20. Say nothing but a number."),)

    def step(self, episode: agentrl.Episode) -> tuple[agentrl.Message, ...]:
        """What it reads after a guess; nothing where that was right."""
        said, right = guessed(episode.steps[-1]), int(episode.task.reference)
        return () if said == right else (agentrl.Message("user", "higher" if said < right else "lower"),)

    def final_reward(self, episode: agentrl.Episode) -> Mapping[str, float]:
        """1 for a first right guess, less for a later one; a tenth for numbers at all."""
        right = guessed(episode.steps[-1]) == int(episode.task.reference)
        return {"guessed": right / len(episode.steps), "numbers": 0.1 * all(guessed(step) for step in episode.steps)}


def guessed(step: agentrl.Step) -> int:
    """The number of a turn; 0 where it says none."""
    found = re.search(r"\d{1,4}", step.message.content)
    return int(found[0]) if found else 0


def main() -> None:
    """Trains in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-arithmetic")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--group-size", type=int, default=8)
    asked = parser.parse_args()
    rows = [{"question": "Guess.", "answer": str(number)} for number in range(1, 21)]
    trainer = agentrl.Trainer("grpo", model=asked.model, env=Guess(correct=("guessed",)), group_size=asked.group_size)
    run = trainer.fit(rows, iterations=asked.iterations, tasks_per_iteration=10, max_steps=5, max_new_tokens=4)
    print(run.curve())
    print(f"{run.name}: {run.status}, {sum(1 for _ in run.episodes().rows())} games")


if __name__ == "__main__":
    main()
