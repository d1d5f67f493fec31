"""Agents for `make learn-agent` on other libraries than the example's, each as its own manual writes it.

Those that write their calls as text (`calc: 12+7`, answered by a plain message) begin from a model that was warmed up on such
conversations: `as_text` makes them.
"""

import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from agentrl.workflow.datasets.arithmetic import demonstrations, load
from examples.openai_agent.agent import TURNS, calculate

SHOWN = 16_384
"""Conversations of the warm start, as many as `sft --dataset arithmetic` has."""
CALC = re.compile(r"calc: (.+)")


def langgraph(task: Any, llm: Any) -> None:
    """langchain-openai, with a graph of two nodes."""
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    @tool
    def calculator(expression: str) -> str:
        """Computes an arithmetic expression exactly."""
        return result_of(expression)

    model = ChatOpenAI(model=llm.model, base_url=llm.base_url, api_key=llm.api_key).bind_tools([calculator])
    graph = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([calculator]))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    graph.compile().invoke({"messages": list(task.messages)}, {"recursion_limit": 2 * TURNS + 1})


def smolagents(task: Any, llm: Any) -> None:
    """The model of smolagents, whose agents take calls from the text."""
    from smolagents import OpenAIModel

    model = OpenAIModel(model_id=llm.model, api_base=llm.base_url, api_key=llm.api_key)

    def say(messages: list[dict[str, str]]) -> str:
        parts = [{"role": each["role"], "content": [{"type": "text", "text": each["content"]}]} for each in messages]
        return str(model.generate(parts).content or "")

    talk(say, task)


def text_tools(task: Any, llm: Any) -> None:
    """As mini-swe-agent does it: no tool is declared, the command is read from the text."""
    from openai import OpenAI

    client = OpenAI(base_url=llm.base_url, api_key=llm.api_key)

    def say(messages: list[dict[str, str]]) -> str:
        return client.chat.completions.create(model=llm.model, messages=messages).choices[0].message.content or ""  # type: ignore[arg-type]

    talk(say, task)


def talk(say: Callable[[list[dict[str, str]]], str], task: Any) -> None:
    """Turns until one asks for nothing."""
    messages = [dict(message) for message in task.messages]
    for _ in range(TURNS):
        said = say(messages)
        asked = CALC.fullmatch(said.strip())
        if asked is None:
            return
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": result_of(asked[1])}]


def result_of(expression: str) -> str:
    """The value, or what is wrong."""
    try:
        return calculate(expression)
    except (ValueError, SyntaxError, RecursionError) as error:
        return f"error: {type(error).__name__}"


def write_texts(file: Path) -> None:
    """The demonstrations of `arithmetic` as conversations whose calls are text, a line each."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps({'messages': list(as_text(shown))})}\n" for shown in _conversations()))


def as_text(shown: Any) -> Iterator[dict[str, str]]:
    """A demonstration with its call written out, and the result as a message of the user's."""
    for message in shown:
        if message.tool_calls:
            yield {"role": "assistant", "content": f"calc: {message.tool_calls[0].arguments['expression']}"}
        else:
            yield {"role": "user" if message.role == "tool" else message.role, "content": message.content}


def _conversations() -> Iterator[Any]:
    return demonstrations(tuple(islice(load("warmup"), SHOWN)), seed=0)
