"""An agent on the OpenAI Agents SDK, by its chat completions model, with a tool that is a function."""

import argparse
import math
from typing import Any

from agents import Agent, MaxTurnsExceeded, ModelBehaviorError, OpenAIChatCompletionsModel, Runner, function_tool
from agents import set_tracing_disabled as disable_tracing
from openai import AsyncOpenAI

import agentrl

disable_tracing(True)


@function_tool(strict_mode=False)
def calculator(expression: str) -> str:
    """Computes whole numbers with + - *, for example 48 + 24."""
    terms = expression.replace(" ", "").replace("-", "+-").split("+")
    return str(sum(math.prod(int(factor) for factor in term.split("*")) for term in terms if term))


async def solve(task: agentrl.AgentTask, llm: agentrl.LLM) -> str:
    """Runs the SDK's own loop; what a half-trained model does wrong ends the episode, and not the run."""
    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        model = OpenAIChatCompletionsModel(model=llm.model, openai_client=client)
        agent = Agent(name="Sums", model=model, tools=[calculator])
        try:
            result = await Runner.run(agent, task.input, max_turns=3)
        except (MaxTurnsExceeded, ModelBehaviorError):
            return ""
    return str(result.final_output)


def main() -> None:
    """Trains it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-arithmetic")
    parser.add_argument("--iterations", type=int, default=32)
    parser.add_argument("--tasks", type=int, default=16, help="of an iteration")
    parser.add_argument("--group-size", type=int, default=8)
    asked = parser.parse_args()
    options: dict[str, Any] = {"group_size": asked.group_size, "tasks_per_iteration": asked.tasks, "max_new_tokens": 32}
    trainer = agentrl.Trainer("grpo", model=asked.model, learning_rate=4e-4, **options)
    run = trainer.fit(solve, "arithmetic", iterations=asked.iterations, eval={"every": 10, "tasks": 4 * asked.tasks})
    print(run.curve())
    print(f"{run.name}: {run.status}, {sum(1 for _ in run.episodes().rows())} episodes")


if __name__ == "__main__":
    main()
