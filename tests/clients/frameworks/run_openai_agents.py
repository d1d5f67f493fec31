"""The OpenAI Agents SDK: tools, handoffs, streams and structured outputs, with both of its model classes."""

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from scenario import KEY, MODEL, URL, Number, report
from scenario import calculator as calculate

set_tracing_disabled(True)
calculator = function_tool(calculate)


def make_agent(model_class: Any = OpenAIResponsesModel, **options: Any) -> Any:
    model = model_class(MODEL, openai_client=AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))
    return Agent(name="counter", tools=[calculator], model=model, **options)


async def agent(question: str) -> str:
    return (await Runner.run(make_agent(), question)).final_output


async def streamed(question: str) -> str:
    result = Runner.run_streamed(make_agent(), question)
    async for _ in result.stream_events():
        pass
    return result.final_output


async def structured(question: str) -> Number:
    return (await Runner.run(make_agent(output_type=Number), question)).final_output


async def required(question: str) -> str:
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    return (await Runner.run(make_agent(model_settings=settings), question)).final_output


async def chat(question: str) -> str:
    return (await Runner.run(make_agent(OpenAIChatCompletionsModel), question)).final_output


async def chat_structured(question: str) -> Number:
    return (await Runner.run(make_agent(OpenAIChatCompletionsModel, output_type=Number), question)).final_output


report(agent, streamed, structured, required, chat, chat_structured)
