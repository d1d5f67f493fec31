"""An agent that imports its SDK, as agents do, and reports which of its modules are there before its first call."""

import sys
from typing import Any

from openai import OpenAI

AT_THE_FIRST_CALL = ("openai.resources.chat.completions.completions", "h11", "encodings.idna", "anyio._backends._asyncio")


def looks(task: Any, llm: Any) -> dict[str, float]:
    assert OpenAI
    return {name: float(name in sys.modules) for name in AT_THE_FIRST_CALL}
