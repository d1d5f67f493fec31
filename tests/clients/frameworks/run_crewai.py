# /// script
# dependencies = ["crewai[anthropic]==1.15.30"]
# ///
"""CrewAI: a crew of one agent and one task, with text and with a structured output."""

import os

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}
from typing import Any

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from scenario import KEY, MODEL, URL, Number, report
from scenario import calculator as calculate

calculator = tool("calculator")(calculate)


def crew(question: str, llm: dict[str, Any] | None = None, **output: Any) -> Any:
    llm = LLM(**{"model": f"openai/{MODEL}", "base_url": URL, "api_key": KEY, **(llm or {})})
    agent = Agent(role="Counter", goal="Count", backstory="You count.", llm=llm, tools=[calculator], max_iter=4)
    task = Task(description=question, expected_output="a number", agent=agent, **output)
    return Crew(agents=[agent], tasks=[task]).kickoff()


def text(question: str) -> str:
    return crew(question).raw


def streamed(question: str) -> str:
    return crew(question, {"stream": True}).raw


def responses(question: str) -> str:
    return crew(question, {"api": "responses"}).raw


def responses_pydantic(question: str) -> Number:
    return crew(question, {"api": "responses"}, output_pydantic=Number).pydantic


def messages(question: str) -> str:
    return crew(question, {"model": MODEL, "provider": "anthropic", "base_url": URL.removesuffix("/v1")}).raw


def output_pydantic(question: str) -> Number:
    return crew(question, output_pydantic=Number).pydantic


def output_json(question: str) -> Any:
    return crew(question, output_json=Number).json_dict


def direct(question: str) -> Any:
    """The LLM alone, with a response format."""
    return LLM(model=f"openai/{MODEL}", base_url=URL, api_key=KEY, response_format=Number).call(question)


report(text, streamed, responses, responses_pydantic, messages, output_pydantic, output_json, direct)
