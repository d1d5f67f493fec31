"""pydantic-ai: each of its output types on chat completions, and the default one on the other APIs."""

from typing import Any

from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from scenario import KEY, MODEL, URL, Number, calculator, report

CHAT = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
RESPONSES = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
MESSAGES = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL.removesuffix("/v1"), api_key=KEY))


def ask(question: str, model: Any, output: Any) -> Any:
    return Agent(model, tools=[calculator], output_type=output).run_sync(question).output


def tool_output(question: str) -> Number:
    return ask(question, CHAT, Number)


def native_output(question: str) -> Number:
    return ask(question, CHAT, NativeOutput(Number))


def prompted_output(question: str) -> Number:
    return ask(question, CHAT, PromptedOutput(Number))


def responses(question: str) -> Number:
    return ask(question, RESPONSES, Number)


def responses_native(question: str) -> Number:
    return ask(question, RESPONSES, NativeOutput(Number))


def messages(question: str) -> Number:
    return ask(question, MESSAGES, Number)


async def streamed(question: str) -> str:
    async with Agent(CHAT, tools=[calculator]).run_stream(question) as result:
        return await result.get_output()


report(tool_output, native_output, prompted_output, responses, responses_native, messages, streamed)
