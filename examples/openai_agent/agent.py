"""An agent as people have one: the openai SDK, a tool of its own, a loop. Nothing in here knows who trains it.

`solve` is called once for each episode; `solve_async` is the same where an agent waits for several things at once.
"""

import ast
import json
import operator
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI, OpenAI

TURNS = 4
LONGEST = 200
"""Characters of an expression."""
OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an arithmetic expression exactly, for example (48 + 24) * 2.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def solve(task: Any, llm: Any) -> None:
    """Asks the model until it answers without a call."""
    client = OpenAI(base_url=llm.base_url, api_key=llm.api_key)
    messages: list[Any] = list(task.messages)
    for _ in range(TURNS):
        said = client.chat.completions.create(model=llm.model, messages=messages, tools=[CALCULATOR]).choices[0].message
        if not said.tool_calls:
            return
        messages += [said, *map(answer, said.tool_calls)]


async def solve_async(task: Any, llm: Any) -> None:
    """The same with the SDK's other client."""
    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        messages: list[Any] = list(task.messages)
        for _ in range(TURNS):
            made = await client.chat.completions.create(model=llm.model, messages=messages, tools=[CALCULATOR])
            said = made.choices[0].message
            if not said.tool_calls:
                return
            messages += [said, *map(answer, said.tool_calls)]


def answer(call: Any) -> dict[str, str]:
    """What the model reads of its call, which may be any text: a half-trained model wrote it."""
    try:
        result = calculate(json.loads(call.function.arguments)["expression"])
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError) as error:
        result = f"error: {type(error).__name__}"
    return {"role": "tool", "tool_call_id": call.id, "content": result}


def calculate(expression: str) -> str:
    """The value of an expression of whole numbers with + - * and parentheses."""
    if len(expression) > LONGEST:
        raise ValueError("too long")
    return str(value(ast.parse(expression.strip(), mode="eval").body))


def value(node: ast.expr) -> int:
    """The value of a part of it."""
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](value(left), value(right))
    raise ValueError("no arithmetic")
