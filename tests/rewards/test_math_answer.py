"""math_answer: what math-verify, held by the sandbox, takes for the reference; what a text cannot do there."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.workers.jobs.tool_call import run_tool
from agentrl.workflow.errors import ConfigError, RewardError, SandboxUnavailable
from agentrl.workflow.plugins import find
from agentrl.workflow.rewards import math_answer, score
from agentrl.workflow.sandbox import Limits
from agentrl.workflow.sandbox.session import CellSession
from agentrl.workflow.store.tool_calls import CallWork
from agentrl.workflow.tools.python import sandbox
from tests.conftest import missing
from tests.rewards.test_code import box as box
from tests.rewards.test_rewards import episode, turn


@pytest.fixture(scope="module")
def held(box: None) -> Iterator[None]:
    """A sandbox in which math-verify can be loaded."""
    try:
        math_answer.installed()
    except ConfigError as error:
        missing(str(error))
    yield
    math_answer._warm.forget()


def right(answer: str, reference: str) -> float:
    """Of one final turn."""
    found = score(episode(turn(answer), reference=reference), {"math_answer": 1.0})["math_answer"]
    assert isinstance(found, float)
    return found


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("#### 72", "72"), ("It is $72$.", "72"), ("\\boxed{0.5}", "\\frac{1}{2}"), ("#### 0.5", "1/2"), ("#### 1200", "1,200"),
        ("so $1 + x$", "x + 1"), ("#### \\sqrt{12}", "2\\sqrt{3}"), ("$\\{2, 1\\}$", "\\{1, 2\\}"), ("$(1, 2]$", "$(1, 2]$"),
        ("The final answer is $\\frac{2}{4}$. I hope it is correct.", "0.5"), ("24", "48/2 = <<48/2=24>>24\n#### 24"),
    ],
)  # fmt: skip
def test_math_answer_accepts_equivalent_answer(held: None, answer: str, reference: str) -> None:
    assert right(answer, reference) == 1.0


@pytest.mark.parametrize(
    ("answer", "reference"),
    [("", "72"), ("no idea", "72"), ("#### 71", "72"), ("$(1, 2)$", "$(1, 2]$"), ("$x + 2$", "x + 1"), ("72 #### ", "72")],
)
def test_math_answer_rejects_other_answer(held: None, answer: str, reference: str) -> None:
    assert right(answer, reference) == 0.0


@pytest.mark.parametrize("answer", ["$9^{9^{9^{9}}}$", "(" * 3000, "\\frac{" * 2000, "$\\sqrt" * 2000, "\x00\udcff"])
def test_math_answer_rejects_text_it_cannot_process(held: None, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_answer, "LIMITS", Limits(cpu_seconds=1.0))
    math_answer._warm.forget()
    assert right(answer, "72") == 0.0
    assert right("#### 72", "72") == 1.0
    math_answer._warm.forget()


def test_math_answer_judges_only_finished_answer(held: None) -> None:
    judge = find("rewards", "math_answer")
    assert judge.asks(replace(episode(turn("72")), stop_reason="max_tokens")) == 0.0
    assert judge.asks(episode(turn("72"))) == {"reference": "72", "answer": "72"}


def test_math_answer_reference_without_mathematics_is_error(held: None) -> None:
    with pytest.raises(RewardError, match="contains no mathematical expression"):
        right("72", " ")


def test_math_answer_reports_verdict_and_sandbox(held: None) -> None:
    judge = find("rewards", "math_answer")
    told = run_tool(judge, CallWork(1, "math", "math_answer", {"reference": "1/2", "answer": "0.5"}, "none", kind="grade"))
    assert (judge.reads(told.content), told.error_class) == (1.0, None)
    assert told.exit is not None
    assert (told.exit.sandbox, told.exit.status) == (sandbox().kind, "ok")


def test_math_answer_runs_at_most_one_session_per_core(held: None) -> None:
    before = math_answer._warm.idle
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: right(f"#### {number}/4", "1/4"), range(8)))
    assert found == [0.0, 1.0] + [0.0] * 6
    assert math_answer._warm.idle == before == (os.cpu_count() or 1)


def test_session_call_not_kept_restores_state(held: None) -> None:
    session = sandbox().session()
    assert isinstance(session, CellSession)
    leaves = "if os.fork() == 0:\n        time.sleep(1000)\n"
    session.run(f"import os, time\nseen = []\ndef note(x):\n    seen.append(x)\n    {leaves}    return seen")
    session.call("note", [0], keeps=False)  # with it goes what the cell before has left
    before = session._line._box.members()
    session.call("note", [0], keeps=False)
    assert session._line._box.members() == before
    told = [session.call("note", [number], keeps=keeps) for number, keeps in ((1, False), (2, False), (3, True), (4, False))]
    assert [result.value for result in told] == ["[1]", "[2]", "[3]", "[3, 4]"]
    assert {result.status for result in told} == {"ok"}
    assert session.run("seen").output == "[3]\n"
    session.close()


def test_session_extra_folder_is_readable_only_there(held: None, short_folder: Path) -> None:
    folder = str(short_folder)  # in /tmp, of which the sandbox has its own
    short_folder.chmod(0o755)
    file = f"{folder}/words.txt"
    Path(file).write_text("word")
    look = f"import os\nprint(os.path.exists({file!r}) and open({file!r}).read() == 'word')"
    shown, plain = sandbox().session(reads=(folder,)), sandbox().session()
    assert shown.run(look).output == "True\n"
    assert shown.run(f"open({folder + '/more.py'!r}, 'w')").status == "error"
    if sandbox().kind == "bwrap":
        assert plain.run(look).output == "False\n"
    shown.close()
    plain.close()


def test_math_answer_without_packages_says_what_to_install(held: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_answer, "PACKAGES", ("no_such_package",))
    math_answer._warm.forget()
    with pytest.raises(ConfigError, match=r"pip install .*\[math\]"):
        find("rewards", "math_answer").check()


def test_math_answer_reports_packages_sandbox_cannot_load(held: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> tuple[Any, ...]:
        return ()

    monkeypatch.setattr(math_answer, "installed", nothing)
    math_answer._warm.forget()
    with pytest.raises(SandboxUnavailable, match="No module named 'math_verify'"):
        find("rewards", "math_answer").check()
    math_answer._warm.forget()
