# /// script
# dependencies = ["autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"]
# ///
"""AutoGen: an AssistantAgent with its defaults, streamed, without parallel calls, and with a structured output."""

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from scenario import KEY, MODEL, URL, Number, calculator, report

INFO = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}


async def ask(question: str, client: dict[str, Any] | None = None, **options: Any) -> Any:
    model = OpenAIChatCompletionClient(model=MODEL, base_url=URL, api_key=KEY, model_info=INFO, max_retries=0, **(client or {}))
    agent = AssistantAgent("assistant", model, **options)
    result = await agent.run(task=question)
    await model.close()
    return result.messages[-1].content


async def agent(question: str) -> str:
    return await ask(question, tools=[calculator], max_tool_iterations=3)


async def streamed(question: str) -> str:
    return await ask(question, tools=[calculator], max_tool_iterations=3, model_client_stream=True)


async def one_call(question: str) -> str:
    return await ask(question, {"parallel_tool_calls": False}, tools=[calculator], max_tool_iterations=3)


async def reflects(question: str) -> str:
    """The second request of this way offers no tools, so that it begins another chain."""
    return await ask(question, tools=[calculator], reflect_on_tool_use=True)


async def structured(question: str) -> Number:
    return await ask(question, output_content_type=Number)


async def tool_and_structured(question: str) -> Number:
    tool = FunctionTool(calculator, "Computes an arithmetic expression exactly.", strict=True)  # as the SDK requires then
    return await ask(question, tools=[tool], output_content_type=Number)


report(agent, streamed, one_call, reflects, structured, tool_and_structured)
