"""What the agents of `make learn-agent` on other libraries than the example's share.

Each has a module of its own: what that imports is there in every fork.

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
