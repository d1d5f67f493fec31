"""An agent by rule: it earns by what its prompt tells it."""

from typing import Any

from openai import OpenAI

import agentrl
from tests.support.scripted_critic import ruled_parts


def solve(task: agentrl.AgentTask, llm: agentrl.LLM, resources: Any) -> agentrl.Answer:
    """Asks the model once, so that there is a turn, and scores its prompt."""
    said = resources["prompt"].format(question=task.input)
    with OpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": said[:60]}], max_tokens=1)
    return agentrl.Answer(said[-40:], {"base": 0.1, **{part: 0.3 * value for part, value in ruled_parts(said).items()}})


class Rolls(agentrl.Agent):
    """The same as a class."""

    def rollout(self, task: agentrl.AgentTask, resources: dict[str, Any], llm: agentrl.LLM) -> agentrl.Answer:
        """One turn."""
        return solve(task, llm, resources)
