"""Every reward and tool that runs code, on every sandbox."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from agentrl.workflow.errors import ConfigError, SandboxUnavailable
from agentrl.workflow.judging import code_judge
from agentrl.workflow.plugins import find, names
from agentrl.workflow.rewards import Judge, math_answer, tests_passed
from agentrl.workflow.runtime.warm_processes import Warm
from agentrl.workflow.sandbox import Sandbox, Session
from agentrl.workflow.sandbox.boxed import Boxed
from agentrl.workflow.sandbox.find import find_unsafe
from agentrl.workflow.sandbox.function_tests import Case
from agentrl.workflow.tools.python import CodeTool, Notebook, sandbox
from agentrl.workflow.trajectory import Episode, Message, Step, Task, ToolCall
from tests.conftest import missing
from tests.sandbox.test_sandbox_backends import KINDS
from tests.sandbox.test_sandbox_backends import docker_sandbox as docker_sandbox
from tests.sandbox.test_sandbox_backends import landlock_sandbox as landlock_sandbox
from tests.sandbox.test_sandbox_backends import ordinary_sandbox as ordinary_sandbox
from tests.support.sandbox_fixtures import SETTINGS, machine

FIXTURES = {
    "bwrap": "bwrap_sandbox",
    "none-unsafe": "unsafe_sandbox",
    **dict(zip(KINDS, ("landlock_sandbox", "ordinary_sandbox", "docker_sandbox"), strict=True)),
}
DOUBLE = "def f(x):\n    return 2 * x"
CASES = [Case((2,), 4, "equal").text]


@pytest.fixture(scope="module")
def bwrap_sandbox() -> Iterator[Sandbox]:
    made = Boxed(replace(machine(), nests=False))
    yield made
    made.close()


@pytest.fixture(scope="module")
def unsafe_sandbox() -> Iterator[Sandbox]:
    made = find_unsafe(SETTINGS)
    yield made
    made.close()


@pytest.fixture(scope="module", params=FIXTURES)
def used(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Make each kind of sandbox the sandbox of this process."""
    made: Sandbox = request.getfixturevalue(FIXTURES[request.param])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "_made", cache(lambda: made))
        pools = (code_judge.judges, math_answer._warm)
        for pool in pools:
            pool.forget()
        tests_passed._judged.cache_clear()
        math_answer._judged.cache_clear()
        yield made
        for pool in pools:
            _close_sessions(pool)


def _close_sessions(pool: Warm[Session]) -> None:
    """Close the sessions that a pool keeps; dropped alone, they would be found by the garbage collection of a later test."""
    places = pool._places()
    while not places.empty():
        if (session := places.get()) is not None:
            session.close()
    pool.forget()


def code_episode(answer: str, *calls: ToolCall) -> Episode:
    metadata = {"setup": "", "function": "f", "hidden": CASES, "visible": CASES}
    steps = (Step(0, (), (), (), (), "stop", Message("assistant", "", "", calls), 0),) if calls else ()
    last = Step(len(steps), (), (), (), (), "stop", Message("assistant", answer), 0)
    task = Task("t", (Message("user", "?"),), DOUBLE, metadata)
    return Episode(task, steps=(*steps, last), status="done", stop_reason="answered")


def math_episode(answer: str) -> Episode:
    return replace(code_episode(answer), task=Task("t", (Message("user", "?"),), "1/2"))


JUDGED = {
    "tests_passed": (code_episode(DOUBLE), 1.0),
    "progress": (code_episode(DOUBLE, ToolCall("python", {"code": DOUBLE})), [1.0, 0.0]),
    "math_answer": (math_episode("\\boxed{0.5}"), 1.0),
}


def test_judges_are_all_tested_here() -> None:
    assert JUDGED.keys() == {name for name in names("rewards") if isinstance(find("rewards", name), Judge)}


@pytest.mark.parametrize("name", JUDGED)
def test_judge_scores_a_right_answer_in_full(used: Sandbox, name: str) -> None:
    judge, (episode, value) = find("rewards", name), JUDGED[name]
    if name == "math_answer":
        try:
            math_answer.installed()
        except ConfigError as error:
            missing(str(error))
        if used.kind == "docker":  # the image holds Python alone
            with pytest.raises(SandboxUnavailable, match="AGENTRL_SANDBOX_IMAGE"):
                judge(episode)
            return
    judge.check()
    assert judge(episode) == value


@pytest.mark.parametrize("name", [name for name in names("tools") if isinstance(find("tools", name), CodeTool)])
def test_code_tool_runs_a_program(used: Sandbox, name: str) -> None:
    notebook, tool = Notebook(), find("tools", name)
    result = notebook.run(tool, {"code": "print(6 * 7)"})
    notebook.close()
    assert (result.content, result.error_class) == ("42", None)
