"""Measures policies on held-out tasks, and trains nothing: mean reward with its interval, accuracy, and which one is better."""

import argparse
import json
import subprocess
import sys
from typing import Any


def measured(policy: str, dataset: str, tasks: int, more: list[str]) -> dict[str, Any]:
    """What `agentrl eval` says of a policy: a run's, by version, or a model."""
    words = ["eval", "--policy", policy, "--dataset", dataset, "-n", str(tasks), "--json", *more]
    done = subprocess.run([sys.executable, "-m", "agentrl.cli", *words], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """A line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policies", nargs="+", metavar="RUN[@VERSION]|MODEL")
    parser.add_argument("--dataset", default="arithmetic")
    parser.add_argument("--tasks", type=int, default=128)
    asked, more = parser.parse_known_args()
    for policy in asked.policies:
        found = measured(policy, asked.dataset, asked.tasks, more)
        interval = f"[{found['low']:.3f}, {found['high']:.3f}]"
        accuracy = "-" if found["accuracy"] is None else f"{found['accuracy']:.3f}"
        print(f"{policy:40} mean {found['mean_reward']:.3f} {interval}  accuracy {accuracy}  n {found['episodes']}")


if __name__ == "__main__":
    main()
