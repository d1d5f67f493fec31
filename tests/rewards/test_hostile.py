"""Hostile values: whatever a model, a tool or a dataset says, each reward that ships gives a number, and nobody waits for it.

Every file of `workflow/rewards` is tried, a new one too. A wrong answer is wrong and its episode is scored; a reference that no
answer could be compared with is the one thing that is refused, with a ValueError that names it.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from agentrl.workflow.config import RolloutConfig
from agentrl.workflow.datasets.code import code_metadata
from agentrl.workflow.errors import RewardError
from agentrl.workflow.plugins import find, names
from agentrl.workflow.rewards import Judge, Reward, score
from agentrl.workflow.sandbox.function_tests import Case
from agentrl.workflow.trajectory import Episode, ToolCall, ToolResult
from tests.rewards.test_code import box as box
from tests.rewards.test_rewards import episode, turn

MEGABYTE = 1_000_000
TEXTS = {
    "digits": "7" * 100_000,
    "a fraction of digits": "0." + "7" * 100_000,
    "a large exponent": "1e999999999",
    "a power": "9**9**9**9",
    "thousands": "1," + "111," * 100_000 + "1",
    "NaN": "nan",
    "infinity": "-inf",
    "a quotient of nothing": "1/0",
    "half a surrogate pair": "7\ud800\udfff",
    "NUL": "\x007\x00",
    "a megabyte of a letter": "x" * MEGABYTE,
    "a megabyte of spaces": "the" + " " * MEGABYTE + "answer",
    "a megabyte of lines": "\n" * MEGABYTE + "7",
    "a megabyte of numbers": "7 " * (MEGABYTE // 2),
    "a megabyte of signs": "-$" * (MEGABYTE // 2),
    "a megabyte of marks": "#### " * (MEGABYTE // 5),
    "a megabyte of marks on lines": "\n #### " * (MEGABYTE // 7),
    "a megabyte of boxes": "\\boxed{" * (MEGABYTE // 7),
    "a megabyte of brackets": "(" * MEGABYTE,
    "a megabyte of quotation marks": "'" * MEGABYTE,
    "a megabyte of blocks": "```python\n" * (MEGABYTE // 10),
    "a megabyte of fences": "```" + " " * MEGABYTE,
    "a megabyte of tags": "<think>" * (MEGABYTE // 7),
    "letters that fold to eighteen": "\ufdfa" * (MEGABYTE // 3),
    "accents out of order": "a" + "\u0300\u0316" * (MEGABYTE // 4),
    "more accents out of order": "a" + "\u0300" * (MEGABYTE // 4) + "\u0316" * (MEGABYTE // 4),
    "a formula nested deep": "\\frac{" * 100_000,
    "a program that never ends": "while True: pass",
    "a program of a megabyte": "x = " + "1+" * (MEGABYTE // 2) + "1",
    "a program nested deep": "f = " + "(" * 5000 + ")" * 5000,
    "a query without end": "WITH RECURSIVE a(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM a) SELECT n FROM a",
    "a query for much": "SELECT hex(zeroblob(100000000))",
    "a query nested deep": "SELECT " + "(" * 50_000 + "1" + ")" * 50_000,
    "a query of quotation marks": "SELECT " + "''''" * 20_000 + " ORDER BY 1",
    "nothing": "",
}
MAX_CPU = 20.0
"""Seconds of this process for one text: what hangs takes minutes."""

REFERENCES = {"sql_match": "SELECT 1", "tests_passed": "def f(n): return n", "progress": "def f(n): return n"}
READ_NO_REFERENCE = ("format", "length", "overlong", "progress", "tests_passed", "tool_use")
"""They are not tried with hostile references: another reference changes nothing of what they give, where tests are cases."""
COUNT = ("length", "overlong", "tool_use")
"""They look at how much was said and called: the brief texts are enough."""
JUDGES = tuple(name for name in names("rewards") if isinstance(find("rewards", name), Judge))
"""Those that run what they read, in the sandbox: each text may cost there what it allows, seconds."""

BRIEF = ("digits", "NaN", "half a surrogate pair", "a megabyte of a letter", "nothing")
FORMULAS = ("a power", "thousands", "a megabyte of boxes", "a formula nested deep")
TELLING = (
    *FORMULAS,
    *("a megabyte of blocks", "a program that never ends", "a program of a megabyte", "a program nested deep"),
)
"""For judges besides: what computes without end, what is large where they look, what is nested in each language."""
PARTS = [
    *((name, BRIEF if name in (*COUNT, *JUDGES) else tuple(TEXTS)) for name in names("rewards")),
    *(pytest.param(name, TELLING, marks=pytest.mark.slow) for name in JUDGES),
]


@pytest.fixture
def sandboxed(request: pytest.FixtureRequest) -> Callable[[str], Reward]:
    """The reward of a name, with a sandbox where it needs one."""

    def found(name: str) -> Reward:
        if name in JUDGES:
            request.getfixturevalue("box")
        reward: Reward = find("rewards", name)
        return reward

    return found


@contextmanager
def about(text: str) -> Iterator[None]:
    """Says which text it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"the text: {text}")
        raise


def finished(name: str, answer: str, reference: str, said: str = "") -> Episode:
    """An episode that called a tool with the answer, heard something, and answers; with all that a reward could ask for."""
    called = replace(turn("", ToolCall("python", {"code": answer})), results=(ToolResult(said), ToolResult(answer)))
    made = episode(called, replace(turn(answer, thought=answer), results=()), reference=reference)
    case = Case((1,), 1, "near", 0.1)
    metadata = {**code_metadata("f", [case], visible=[case]), "database": "bookshop.sql", "aliases": [reference]}
    return replace(made, task=replace(made.task, metadata=metadata), limits=RolloutConfig())


def scored(name: str, asked: Episode) -> float:
    """The reward's number, found within its time."""
    began = time.process_time()
    try:
        part = score(asked, {name: 1.0})[name]
    finally:
        assert time.process_time() - began < MAX_CPU
    assert all(map(math.isfinite, part if isinstance(part, tuple) else (part,)))
    return math.fsum(part) if isinstance(part, tuple) else part


def refused(name: str, asked: Episode) -> None:
    """A reward may refuse the task's own reference, and says so."""
    try:
        scored(name, asked)
    except RewardError as error:
        said = str(error)
        assert "ValueError" in said or "did not judge" in said or "ToolFailure" in said
        assert "reference" in said
        assert len(said) < 1000


@pytest.mark.parametrize(("name", "texts"), PARTS)
def test_reward_of_hostile_answer_is_wrong_but_scored(
    sandboxed: Callable[[str], Reward], name: str, texts: tuple[str, ...]
) -> None:
    reward = sandboxed(name)
    right = REFERENCES.get(name, "72")
    for text in texts:
        with about(text):
            earned = scored(name, finished(name, TEXTS[text], right, TEXTS[text]))
            if isinstance(reward, Judge) or name in ("numeric_answer", "text_answer", "sql_match", "echoed"):
                assert earned == 0.0, text


OF_REFERENCES = [
    *((name, BRIEF if name in JUDGES else tuple(TEXTS)) for name in names("rewards") if name not in READ_NO_REFERENCE),
    *(pytest.param(name, FORMULAS, marks=pytest.mark.slow) for name in JUDGES if name not in READ_NO_REFERENCE),
]


@pytest.mark.parametrize(("name", "texts"), OF_REFERENCES)
@pytest.mark.slow
def test_reward_of_hostile_reference_is_refused_or_compared(
    sandboxed: Callable[[str], Reward], name: str, texts: tuple[str, ...]
) -> None:
    sandboxed(name)
    for text in texts:
        with about(text):
            refused(name, finished(name, "72", TEXTS[text]))
            refused(name, finished(name, TEXTS[text], TEXTS[text], TEXTS[text]))


@pytest.mark.parametrize("name", READ_NO_REFERENCE)
@pytest.mark.parametrize("answer", ["72", "def f(n): return 1", "<think>no</think>"])
def test_reward_without_reference_ignores_it(sandboxed: Callable[[str], Reward], name: str, answer: str) -> None:
    sandboxed(name)
    assert len({scored(name, finished(name, answer, reference)) for reference in ("72", "def f(n): return 1", answer, "")}) == 1
