"""Runs a function agent as a program, for the sandbox: `python -P -m agentrl.workers.agents.function SPEC`.

The program gets its task and the model's address like any other program, and writes the function's result to its answer file.
"""

import asyncio
import inspect
import json
import os
import sys
from pathlib import Path

from agentrl.workflow.agents import LLM, AgentTask, freeze_clock, read_result
from agentrl.workflow.agents.classes import as_function
from agentrl.workflow.plugins import find


def main(spec: str) -> None:
    """Call the function once and write its result to the answer file."""
    freeze_clock()
    task = AgentTask(**json.loads(Path(os.environ["AGENTRL_TASK"]).read_text()))
    llm = LLM(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], os.environ["OPENAI_MODEL"])
    value = as_function(find("agents", spec))(task, llm)
    read = read_result(asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value)
    Path(os.environ["AGENTRL_ANSWER"]).write_text(json.dumps({"text": read.answer, "rewards": read.rewards}))


async def _awaited(value: object) -> object:
    return await value  # type: ignore[misc]


if __name__ == "__main__":
    main(sys.argv[1])
