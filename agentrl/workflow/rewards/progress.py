"""progress: what the programs that were tried out gained, step by step, on the tests that the question shows.

Each program that a step ran with the tool python is judged, as `tests_passed` judges an answer, by the share of the visible
tests that its function passes. A step earns by how much it raises that share above all before it; the part is their sum, the
best share reached, from 0.0 to 1.0. What stands in the call's row is the share after each program, in a list for each step.

A program that ends with an error, its own failed `assert` too, passes nothing. A task that shows no test gives 0.0.
"""

import json
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

from agentrl.workflow.rewards import Judge, Value
from agentrl.workflow.rewards.tests_passed import (
    JUDGE_SECONDS,
    WHOLE_CPU_SECONDS,
    Budget,
    opened,
    share,
    verdict_result,
    writable,
)
from agentrl.workflow.tools.python import SANDBOX, sandbox
from agentrl.workflow.trajectory import Episode, Step, ToolResult

TOOL = "python"
MAX_TRIED = 8
"""The first so many programs are judged."""


def asked(episode: Episode) -> Mapping[str, Any] | Value:
    """Return what is judged; 0.0 where no test is shown or nothing was tried."""
    metadata = episode.task.metadata
    left = iter(range(MAX_TRIED))
    tried = [[code for code, _ in zip(_programs(step), left, strict=False)] for step in episode.steps]
    visible = metadata.get("visible", ())
    if not visible or not any(tried):
        return [0.0] * len(episode.steps)
    return {"setup": metadata["setup"], "function": metadata["function"], "visible": visible, "tried": tried}


def _programs(step: Step) -> list[str]:
    codes = (call.arguments.get("code") for call in step.message.tool_calls if call.error is None and call.name == TOOL)
    return [code for code in codes if isinstance(code, str) and writable(code)]


def _progress(setup: str, tried: list[list[str]], function: str, visible: list[str]) -> ToolResult:
    """The share of the tests that each of the programs passes."""
    shares: list[list[float]] = []
    budget = Budget(WHOLE_CPU_SECONDS)
    for programs in tried:
        shares.append([])
        for code in programs:
            with opened() as session:
                shares[-1].append(share(session, (setup, code), function, visible, budget))
    return verdict_result(shares, budget.used)


def gained(shares: str) -> list[float]:
    """By how much each step raised the best share."""
    best = accumulate((max(step, default=0.0) for step in json.loads(shares)), max, initial=0.0)
    return [after - before for before, after in pairwise(best)]


_progress.__name__ = "progress"
progress = Judge(
    _progress, timeout_seconds=JUDGE_SECONDS, needs=sandbox, opens=sandbox, asks=asked, variables=SANDBOX, reads=gained
)
