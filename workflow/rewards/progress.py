"""progress: what the programs that were tried out gained, step by step, on the tests that the question shows.

Each program that a step ran with the tool python is judged, as `tests_passed` judges an answer, by the share of the visible
tests that its function passes. A step earns by how much it raises that share above all before it; the part is their sum, the
best share reached, from 0.0 to 1.0. What stands in the call's row is the share after each program, in their order.

A program that ends with an error, its own failed `assert` too, passes nothing. A task that shows no test gives 0.0.
"""

import json
from collections.abc import Mapping
from typing import Any

from workflow.datasets.code import Case
from workflow.rewards import Judge
from workflow.rewards.tests_passed import JUDGE_SECONDS, WHOLE_CPU_SECONDS, opened, share, told, writable
from workflow.tools.python import sandbox
from workflow.trajectory import Episode, ToolResult

TOOL = "python"
MOST_TRIED = 8
"""The first so many programs are judged."""


def asked(episode: Episode) -> Mapping[str, Any] | float:
    """What is judged; 0.0 where no test is shown or nothing was tried."""
    metadata = episode.task.metadata
    calls = (call for step in episode.steps for call in step.message.tool_calls if call.error is None and call.name == TOOL)
    codes = (call.arguments.get("code") for call in calls)
    tried = [code for code in codes if isinstance(code, str) and writable(code)]
    visible = metadata.get("visible", ())
    if not visible or not tried:
        return 0.0
    question = {"setup": metadata["setup"], "function": metadata["function"], "visible": visible}
    return {**question, "tried": tried[:MOST_TRIED]}


def _progress(setup: str, tried: list[str], function: str, visible: list[str]) -> ToolResult:
    """The share of the tests that each of the programs passes."""
    cases = [Case.of(text) for text in visible]
    shares, left = [], WHOLE_CPU_SECONDS
    for code in tried:
        with opened() as session:
            passed, used = share(session, (setup, code), function, cases, left)
        shares.append(passed)
        left -= used
    return told(shares, WHOLE_CPU_SECONDS - left)


def best(shares: str) -> float:
    """The sum of what each step gained."""
    return float(max(json.loads(shares)))


_progress.__name__ = "progress"
progress = Judge(_progress, timeout_seconds=JUDGE_SECONDS, needs=sandbox, opens=sandbox, asks=asked, reads=best)
