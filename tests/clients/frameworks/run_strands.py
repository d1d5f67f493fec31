# /// script
# dependencies = ["strands-agents[anthropic,openai]==1.62.0"]
# ///
"""Strands: an Agent with a tool, which always streams, on each of the APIs, and its structured outputs."""

from typing import Any

from scenario import KEY, MODEL, URL, Number, report
from scenario import calculator as calculate
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel

calculator = tool(calculate)


def make_agent(model_class: Any = OpenAIModel) -> Agent:
    model = model_class(client_args={"base_url": URL, "api_key": KEY}, model_id=MODEL)
    return Agent(model=model, tools=[calculator], callback_handler=None)


def agent(question: str) -> str:
    return str(make_agent()(question)).strip()


def structured_model(question: str) -> Number:
    return make_agent()(question, structured_output_model=Number).structured_output


def structured(question: str) -> Number:
    """The older way, which asks the model with a response format."""
    return make_agent().structured_output(Number, question)


def responses(question: str) -> str:
    return str(make_agent(OpenAIResponsesModel)(question)).strip()


def responses_structured(question: str) -> Number:
    return make_agent(OpenAIResponsesModel)(question, structured_output_model=Number).structured_output


def messages(question: str) -> str:
    client = {"base_url": URL.removesuffix("/v1"), "api_key": KEY}
    model = AnthropicModel(client_args=client, model_id=MODEL, max_tokens=1000)
    return str(Agent(model=model, tools=[calculator], callback_handler=None)(question)).strip()


report(responses, responses_structured, messages, agent, structured_model, structured)
