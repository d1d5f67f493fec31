"""A math agent as a class, a prompt that thinks first, a hook that sets the reward, four runners: 50 iterations of GRPO."""

import argparse
import re
from typing import Any

from openai import OpenAI

import agentrl

PROMPT = "Think step by step, then write the answer after ####."


class MathAgent(agentrl.Agent):
    """Asks once."""

    def rollout(self, task: agentrl.AgentTask, resources: dict[str, Any], llm: agentrl.LLM) -> agentrl.Rollout:
        """The model's answer to the task."""
        messages: Any = [{"role": "system", "content": PROMPT}, *task.messages]
        with OpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            said = client.chat.completions.create(model=llm.model, messages=messages).choices[0].message.content or ""
        return agentrl.Rollout(input=task.input, output=said)


class RewardHook(agentrl.Hook):
    """Scores a rollout when it ends."""

    def on_rollout_end(self, rollout: agentrl.Rollout, task: agentrl.Task) -> agentrl.Rollout:  # type: ignore[override]
        """1 for the right number, 0.1 for any after ####."""
        found = re.findall(r"####\s*(-?\d+)", rollout.output)
        rollout.metadata["reward"] = float(found[-1] == task.reference) if found else 0.0
        rollout.metadata["reward"] += 0.1 * bool(found)
        return rollout


def main() -> None:
    """Trains, and says which policy did best on tasks that it was not trained on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-arithmetic")
    parser.add_argument("--dataset", default="arithmetic")
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--tasks", type=int, default=16, help="of an iteration")
    parser.add_argument("--group-size", type=int, default=8)
    asked = parser.parse_args()
    trainer = agentrl.Trainer(
        algorithm="grpo",
        agent=MathAgent(),
        model=asked.model,
        hooks=[RewardHook()],
        env="plain",
        n_runners=4,
        group_size=asked.group_size,
        tasks_per_iteration=asked.tasks,
        max_new_tokens=64,
        learning_rate=4e-4,
    )
    held_out: dict[str, Any] = {"eval": {"every": 10, "tasks": 4 * asked.tasks, "split": "test", "dataset": asked.dataset}}
    run = trainer.fit(train_dataset=asked.dataset, iterations=asked.iterations, **held_out)
    print(run.curve())
    print(f"{run.name}: {run.status}, best version {run.best.version}")


if __name__ == "__main__":
    main()
