"""progress: the progress of an episode's programs, per step, on the tests in the question.

A program is the code of one call of the tool python. It is judged by the share of visible tests that its function passes; see
`tests_passed`. A step earns the amount by which it raises the best share so far. The sum over the steps is the best share, from
0.0 to 1.0. The database row of the judge's call stores the shares of all programs, in one list per step.

A program that ends with an error, including a failed `assert` of its own, passes no test. A task without visible tests gives
0.0.
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
"""The most programs of an episode that are judged. Later programs are ignored."""


def asked(episode: Episode) -> Mapping[str, Any] | Value:
    """Return the judge's arguments, or a list of zeros if the question shows no test or no program was run."""
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
    """Return the share of tests that each program passes, from 0 to 1, as text."""
    shares: list[list[float]] = []
    budget = Budget(WHOLE_CPU_SECONDS)
    for programs in tried:
        shares.append([])
        for code in programs:
            with opened() as session:
                shares[-1].append(share(session, (setup, code), function, visible, budget))
    return verdict_result(shares, budget.used)


def gained(shares: str) -> list[float]:
    """Return, for each step, the amount by which it raised the best share."""
    best = accumulate((max(step, default=0.0) for step in json.loads(shares)), max, initial=0.0)
    return [after - before for before, after in pairwise(best)]


_progress.__name__ = "progress"
progress = Judge(
    _progress, timeout_seconds=JUDGE_SECONDS, needs=sandbox, opens=sandbox, asks=asked, variables=SANDBOX, reads=gained
)
