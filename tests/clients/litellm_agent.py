"""An agent that is a program, with litellm as its client, in an environment of its own: it knows the task by a file alone."""

import json
import os
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices
import litellm

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an arithmetic expression exactly.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
RESULTS = {"15-8": "7", "2+3": "5", "4*5": "20"}


def main() -> None:
    """Turns until one calls nothing."""
    messages: list[Any] = json.loads(Path(os.environ["AGENTRL_TASK"]).read_text())["messages"]
    where = {"model": f"openai/{os.environ['OPENAI_MODEL']}", "api_base": os.environ["OPENAI_BASE_URL"]}
    while True:
        made = litellm.completion(**where, api_key=os.environ["OPENAI_API_KEY"], messages=messages, tools=[CALCULATOR])
        said = made.choices[0].message
        if not said.tool_calls:
            return
        messages.append(said.model_dump())
        for call in said.tool_calls:
            result = RESULTS[json.loads(call.function.arguments)["expression"]]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


main()
