"""`python -m bench.learning.fit_agent SEED`: what `learn_agents` submits with the openai agent, from Python."""

import sys

import agentrl
from examples.openai_agent.agent import solve


def main(seed: int) -> None:
    """Trains it; the run is called `learn`."""
    trainer = agentrl.Trainer("grpo", model="tiny", seed=seed, group_size=8, tasks_per_iteration=16, max_new_tokens=32)
    trainer.fit(agent=solve, train_dataset="arithmetic", epochs=3, batch_size=64, name="learn")


if __name__ == "__main__":
    main(int(sys.argv[1]))
