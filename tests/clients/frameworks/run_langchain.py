"""LangChain and LangGraph: an agent, and each way to a structured output, on chat completions and Responses."""

from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from scenario import KEY, MODEL, URL, Number, report
from scenario import calculator as calculate

calculator = tool(calculate)


def model(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, max_retries=0, **options)


def agent(question: str) -> str:
    return create_react_agent(model(), [calculator]).invoke({"messages": [("user", question)]})["messages"][-1].text


def agent_format(question: str) -> Number:
    made = create_react_agent(model(), [calculator], response_format=Number).invoke({"messages": [("user", question)]})
    return made["structured_response"]


def streamed(question: str) -> str:
    made = list(create_react_agent(model(streaming=True), [calculator]).stream({"messages": [("user", question)]}))
    return made[-1]["agent"]["messages"][-1].text


def json_schema(question: str) -> Number:
    return model().with_structured_output(Number).invoke(question)


def function_calling(question: str) -> Number:
    return model().with_structured_output(Number, method="function_calling").invoke(question)


def json_mode(question: str) -> Number:
    asked = f"{question} Answer with JSON: an object with a key value."
    return model().with_structured_output(Number, method="json_mode").invoke(asked)


def any_tool(question: str) -> str:
    made = model().bind_tools([calculator], tool_choice="any", parallel_tool_calls=False).invoke(question)
    return calculator.invoke(made.tool_calls[0]["args"])


def responses_structured(question: str) -> Number:
    return model(use_responses_api=True).with_structured_output(Number).invoke(question)


report(agent, agent_format, streamed, json_schema, function_calling, json_mode, any_tool, responses_structured)
