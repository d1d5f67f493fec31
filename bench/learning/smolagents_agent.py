"""The model of smolagents, whose agents take calls from the text."""

from typing import Any

from smolagents import OpenAIModel

from bench.learning.other_agents import talk


def solve(task: Any, llm: Any) -> None:
    """Asks the model until it asks for nothing."""
    model = OpenAIModel(model_id=llm.model, api_base=llm.base_url, api_key=llm.api_key)

    def say(messages: list[dict[str, str]]) -> str:
        parts = [{"role": each["role"], "content": [{"type": "text", "text": each["content"]}]} for each in messages]
        return str(model.generate(parts).content or "")

    talk(say, task)
