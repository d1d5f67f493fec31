"""What the programs of this folder share: where the policy is, the tool, the structured output, and how they report."""

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

URL, KEY, MODEL = (os.environ[f"OPENAI_{name}"] for name in ("BASE_URL", "API_KEY", "MODEL"))
QUESTION = "What is 15 minus 8?"


class Number(BaseModel):
    """The number that was asked for."""

    value: int


def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly.

    Args:
        expression: for example 12+7
    """
    return {"15-8": "7"}[expression]


def report(*scenarios: Callable[[str], Any]) -> None:
    """Asks each scenario its question, and prints a line of JSON with its name and its answer, or the error."""
    for scenario in scenarios:
        try:
            said = scenario(f"{QUESTION} ({scenario.__name__})")
            said = asyncio.run(said) if inspect.isawaitable(said) else said
            said = said.model_dump() if isinstance(said, BaseModel) else said
            line = json.dumps([scenario.__name__, said], ensure_ascii=False)
        except Exception as error:  # noqa: BLE001 - the others are tried all the same
            traceback.print_exc(file=sys.stderr)
            line = json.dumps([scenario.__name__, f"{type(error).__name__}: {error}"])
        print(f"\n{line}", flush=True)  # a client may have printed the beginning of a line
