"""Text to SQL on SQLite with LangGraph: write a query, run it, repair it once; the reward is the right rows."""

import argparse
import re
import sqlite3
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

import agentrl

SCHEMA = "CREATE TABLE people (name TEXT, city TEXT, age INTEGER)"
PEOPLE = [("Ada", "London", 36), ("Alan", "London", 41), ("Grace", "New York", 85), ("Emmy", "Erlangen", 53)]
QUESTIONS = [
    ("How many people live in London?", "SELECT count(*) FROM people WHERE city = 'London'"),
    ("Who is older than 50?", "SELECT name FROM people WHERE age > 50"),
    ("What is the age of Ada?", "SELECT age FROM people WHERE name = 'Ada'"),
    ("Which cities are there?", "SELECT DISTINCT city FROM people"),
]
STEPS = 100_000
"""SQLite's steps that a query may take: a model writes any."""


class State(TypedDict):
    """What the graph's nodes hand on."""

    llm: agentrl.LLM
    question: str
    query: str
    error: str
    tries: int


def rows_of(query: str) -> list[Any]:
    """The rows of a query in a database of this process, which nothing can write and no query can hold for long."""
    database = sqlite3.connect(":memory:")
    try:
        database.execute(SCHEMA)
        database.executemany("INSERT INTO people VALUES (?, ?, ?)", PEOPLE)
        database.commit()
        database.execute("PRAGMA query_only = ON")
        database.set_progress_handler(lambda: 1, STEPS)
        return database.execute(query).fetchmany(100)
    finally:
        database.close()


def write(state: State) -> dict[str, Any]:
    """A query, or a better one after an error."""
    llm = state["llm"]
    model = ChatOpenAI(model=llm.model, base_url=llm.base_url, api_key=llm.api_key)
    asked = f"{SCHEMA}\n{state['question']} Answer with one SELECT."
    if state["error"]:
        asked += f"\n{state['query']}\nfailed: {state['error']}"
    found = re.search(r"SELECT[^;`]*", str(model.invoke(asked).content), re.IGNORECASE)
    return {"query": found[0].strip() if found else "", "tries": state["tries"] + 1}


def run_query(state: State) -> dict[str, Any]:
    """Whether it runs."""
    try:
        rows_of(state["query"] or "no query")
    except sqlite3.Error as error:
        return {"error": str(error)[:200]}
    return {"error": ""}


GRAPH = StateGraph(State)
GRAPH.add_node("write", write)
GRAPH.add_node("run", run_query)
GRAPH.add_edge(START, "write")
GRAPH.add_edge("write", "run")
GRAPH.add_conditional_edges("run", lambda state: "write" if state["error"] and state["tries"] < 2 else END)
SOLVE = GRAPH.compile()


def solve(task: agentrl.AgentTask, llm: agentrl.LLM) -> str:
    """The graph's last query."""
    ended = SOLVE.invoke(State(llm=llm, question=task.input, query="", error="", tries=0))
    return str(ended["query"])


def right(episode: agentrl.Episode) -> float:
    """1 for the rows of the reference, 0.1 for any rows."""
    try:
        found = rows_of(episode.answer or "")
    except (sqlite3.Error, sqlite3.Warning):
        return 0.0
    return 1.0 if sorted(found) == sorted(rows_of(episode.task.reference)) else 0.1


def main() -> None:
    """Trains it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--group-size", type=int, default=8)
    asked = parser.parse_args()
    rows = [{"question": question, "answer": query} for question, query in QUESTIONS]
    trainer = agentrl.Trainer("grpo", model=asked.model, rewards=[right], group_size=asked.group_size, max_new_tokens=64)
    run = trainer.fit(solve, rows, iterations=asked.iterations, tasks_per_iteration=len(rows))
    print(run.curve())
    print(f"{run.name}: {run.status}, {sum(1 for _ in run.episodes(min_reward=1).rows())} right queries")


if __name__ == "__main__":
    main()
