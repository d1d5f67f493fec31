"""An agent as mini-swe-agent does it: no tool is declared, the command is read from the text."""

from typing import Any

from openai import OpenAI

from bench.learning.other_agents import talk


def solve(task: Any, llm: Any) -> None:
    """Asks the model until it asks for nothing."""
    client = OpenAI(base_url=llm.base_url, api_key=llm.api_key)

    def say(messages: list[dict[str, str]]) -> str:
        return client.chat.completions.create(model=llm.model, messages=messages).choices[0].message.content or ""  # type: ignore[arg-type]

    talk(say, task)
