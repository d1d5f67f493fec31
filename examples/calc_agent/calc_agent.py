"""An agent with a calculator, on the openai SDK, trained from Python: rows of your own, a reward of your own."""

import argparse
import json
import math
import random
from typing import Any

from openai import OpenAI

import agentrl

TURNS = 3
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an arithmetic expression exactly, for example 48 + 24.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def solve(task: agentrl.AgentTask, llm: agentrl.LLM) -> str:
    """Asks the model until it answers without a call; its last words are the answer."""
    messages: list[Any] = list(task.messages)
    with OpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        for _ in range(TURNS):
            said = client.chat.completions.create(model=llm.model, messages=messages, tools=[CALCULATOR]).choices[0].message
            if not said.tool_calls:
                break
            results = [{"role": "tool", "tool_call_id": call.id, "content": computed(call)} for call in said.tool_calls]
            messages += [said, *results]
    return said.content or ""


def computed(call: Any) -> str:
    """The value of whole numbers with + - *, such as 48+24; a half-trained model writes anything."""
    try:
        expression = str(json.loads(call.function.arguments)["expression"])
        terms = expression.replace(" ", "").replace("-", "+-").split("+")
        return str(sum(math.prod(int(factor) for factor in term.split("*")) for term in terms if term))
    except (ValueError, TypeError, KeyError) as error:
        return f"error: {type(error).__name__}"


def right(episode: agentrl.Episode) -> float:
    """Whether the answer ends with the right number."""
    said = (episode.answer or "").split()
    return float(bool(said) and said[-1] == episode.task.reference)


def main() -> None:
    """Trains, and shows what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-arithmetic")
    parser.add_argument("--iterations", type=int, default=32)
    parser.add_argument("--tasks", type=int, default=256)
    parser.add_argument("--group-size", type=int, default=8)
    asked = parser.parse_args()
    held_out = max(2, asked.tasks // 4)
    pairs = random.Random(0).sample([(a, b) for a in range(10, 100) for b in range(10, 100)], asked.tasks + held_out)
    rows = [{"question": f"What is {a} plus {b}?", "answer": str(a + b)} for a, b in pairs]
    options: dict[str, Any] = {"group_size": asked.group_size, "max_new_tokens": 32, "learning_rate": 4e-4}
    trainer = agentrl.Trainer("grpo", model=asked.model, rewards=[right], hooks=[agentrl.LoggingHook], **options)
    length = {"iterations": asked.iterations, "tasks_per_iteration": min(16, asked.tasks)}
    run = trainer.fit(solve, rows[held_out:], rows[:held_out], **length)
    print(run.curve())
    print(f"{run.name}: {run.status}, {sum(1 for _ in run.episodes(min_reward=1).rows())} right answers")


if __name__ == "__main__":
    main()
