"""An agent on langchain-openai, with a graph of two nodes."""

from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from bench.learning.other_agents import result_of
from examples.openai_agent.agent import TURNS


@tool
def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly."""
    return result_of(expression)


def solve(task: Any, llm: Any) -> None:
    """Asks the model until it answers without a call."""
    model = ChatOpenAI(model=llm.model, base_url=llm.base_url, api_key=llm.api_key).bind_tools([calculator])
    graph = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([calculator]))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    graph.compile().invoke({"messages": list(task.messages)}, {"recursion_limit": 2 * TURNS + 1})
