"""Small agents on the libraries that people have, each as its own manual writes it. Nothing but `Answer` is agentrl's."""

import asyncio
import json
from typing import Any

from agentrl.workflow.agents import Answer
from examples.openai_agent.agent import CALCULATOR, answer, calculate


def client(llm: Any) -> Any:
    """The SDK's client."""
    from openai import OpenAI

    return OpenAI(base_url=llm.base_url, api_key=llm.api_key)


def streaming(task: Any, llm: Any) -> dict[str, float]:
    """The openai SDK, streaming: what came piece by piece is put together as the manual does."""
    messages, pieces, tokens = list(task.messages), 0, 0
    while True:
        text, calls = "", {}
        asked = {"model": llm.model, "messages": messages, "tools": [CALCULATOR]}
        for chunk in client(llm).chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            tokens += chunk.usage.completion_tokens if chunk.usage else 0
            for choice in chunk.choices:
                pieces += bool(choice.delta.content)
                text += choice.delta.content or ""
                for part in choice.delta.tool_calls or ():
                    if part.id:
                        calls[part.index] = part
                    else:
                        calls[part.index].function.arguments += part.function.arguments or ""
        if not calls:
            return {"pieces": float(pieces), "tokens": float(tokens)}
        made = [
            {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
            for c in calls.values()
        ]
        messages += [{"role": "assistant", "content": text or None, "tool_calls": made}, *map(answer, calls.values())]


def streaming_helper(task: Any, llm: Any) -> None:
    """The SDK's own helper, which checks what it is sent as it puts it together."""
    messages = list(task.messages)
    while True:
        with client(llm).chat.completions.stream(model=llm.model, messages=messages, tools=[CALCULATOR]) as stream:
            said = stream.get_final_completion().choices[0].message
        if not said.tool_calls:
            return
        messages += [said.model_dump(exclude_none=True, exclude={"parsed"}), *map(answer, said.tool_calls)]


async def side_by_side(task: Any, llm: Any) -> Answer:
    """Several calls at once of the same prompt, and one with n."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as asked:
        one = {"model": llm.model, "messages": list(task.messages)}
        said = await asyncio.gather(*(asked.chat.completions.create(**one) for _ in range(4)))
        several = await asked.chat.completions.create(**one, n=3, logprobs=True, top_logprobs=0)
    texts = {made.choices[0].message.content for made in said} | {choice.message.content for choice in several.choices}
    return Answer(max(texts), {"answers": float(len(several.choices) + len(said))})


async def pydantic_ai(task: Any, llm: Any) -> Answer:
    """An Agent with a plain tool."""
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(llm.model, provider=OpenAIProvider(base_url=llm.base_url, api_key=llm.api_key))
    return await _pydantic_ai(model, task)


async def pydantic_ai_responses(task: Any, llm: Any) -> Answer:
    """The same agent on the Responses API."""
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIResponsesModel(llm.model, provider=OpenAIProvider(base_url=llm.base_url, api_key=llm.api_key))
    return await _pydantic_ai(model, task)


async def pydantic_ai_messages(task: Any, llm: Any) -> Answer:
    """The same agent on Anthropic's Messages API."""
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    provider = AnthropicProvider(base_url=llm.base_url.removesuffix("/v1"), api_key=llm.api_key)
    return await _pydantic_ai(AnthropicModel(llm.model, provider=provider), task)


async def _pydantic_ai(model: Any, task: Any) -> Answer:
    from pydantic_ai import Agent

    agent = Agent(model, output_type=str)

    @agent.tool_plain
    def calculator(expression: str) -> str:
        """Computes an arithmetic expression exactly."""
        return calculate(expression)

    made = await agent.run(task.messages[-1]["content"])
    return Answer(made.output)


async def openai_agents(task: Any, llm: Any) -> Answer:
    """The OpenAI Agents SDK with the model class that it takes by default: Responses."""
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @function_tool
    def calculator(expression: str) -> str:
        """Computes an arithmetic expression exactly."""
        return calculate(expression)

    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as asked:
        agent = Agent(name="counts", tools=[calculator], model=OpenAIResponsesModel(llm.model, openai_client=asked))
        made = await Runner.run(agent, task.messages[-1]["content"])
    return Answer(str(made.final_output))


def previous_response(task: Any, llm: Any) -> None:
    """The openai SDK, which sends the new items alone and names the response before them."""
    tool = {"type": "function", "strict": False, **CALCULATOR["function"]}
    said = client(llm).responses.create(model=llm.model, input=task.messages[-1]["content"], tools=[tool])
    while calls := [item for item in said.output if item.type == "function_call"]:
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": calculate(**json.loads(call.arguments))}
            for call in calls
        ]
        said = client(llm).responses.create(model=llm.model, input=results, tools=[tool], previous_response_id=said.id)


def anthropic_tools(task: Any, llm: Any) -> None:
    """Anthropic's SDK and its helper, which runs the tools."""
    from anthropic import Anthropic, beta_tool

    @beta_tool
    def calculator(expression: str) -> str:
        """Computes an arithmetic expression exactly.

        Args:
            expression: for example 12+7
        """
        return calculate(expression)

    with Anthropic(base_url=llm.base_url.removesuffix("/v1"), api_key=llm.api_key) as asked:
        messages = [{"role": "user", "content": task.messages[-1]["content"]}]
        runner = asked.beta.messages.tool_runner(model=llm.model, max_tokens=1000, messages=messages, tools=[calculator])
        runner.until_done()


def langchain_responses(task: Any, llm: Any) -> Answer:
    """LangChain's agent on the Responses API."""
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    @tool
    def calculator(expression: str) -> str:
        """Computes an arithmetic expression exactly."""
        return calculate(expression)

    model = ChatOpenAI(model=llm.model, base_url=llm.base_url, api_key=llm.api_key, use_responses_api=True)
    made = create_react_agent(model, [calculator]).invoke({"messages": task.messages})
    return Answer(made["messages"][-1].text)
