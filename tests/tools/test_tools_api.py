"""What makes a function a tool: what the model is told of it, what it may be given, what it may cost."""

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from agentrl.workers.jobs import tool_call
from agentrl.workers.jobs.tool_call import run_tool
from agentrl.workers.requests.submit import prepare
from agentrl.workers.stack.dispatch import MAX_CALLS, NO_REPLY
from agentrl.workflow.config import build
from agentrl.workflow.envs import Env, offered_tools
from agentrl.workflow.errors import ConfigError, InfraError, ServiceError, ToolFailure
from agentrl.workflow.plugins import find, names
from agentrl.workflow.runtime.once_per_process import Once
from agentrl.workflow.settings import settings
from agentrl.workflow.store import steps
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.tool_calls import CallWork
from agentrl.workflow.tools import Tool
from agentrl.workflow.trajectory import ToolCall
from tests.support.played_runs import CALL, claim, sampled, start, submission, values
from tests.support.small_models import tiny_random


class Point(BaseModel):
    """A place."""

    x: int
    y: int = 0


def travel(
    to: Point, by: Literal["foot", "train"] = "foot", schema: Annotated[int, Field(ge=1, description="days")] = 1
) -> str:
    """Travels
    to a place.

    What stands here is for people.
    """
    return f"{to.x},{to.y} by {by} in {schema}"


def work(tool: Tool, **arguments: Any) -> CallWork:
    """A call of it."""
    return CallWork(1, "math", tool.name, arguments, tool.effects)


def test_tool_schema_and_arguments_follow_signature() -> None:
    tool = Tool(travel)
    told = tool.schema["function"]
    assert (told["name"], told["description"]) == ("travel", "Travels to a place.")
    assert told["parameters"]["required"] == ["to"]
    assert told["parameters"]["properties"]["by"] == {"default": "foot", "enum": ["foot", "train"], "type": "string"}
    assert told["parameters"]["properties"]["schema"]["description"] == "days"
    assert tool.call({"to": {"x": 3}, "schema": 2}) == "3,0 by foot in 2"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "to: Field required"),
        ({"to": {"x": "far"}}, "to.x: Input should be a valid integer"),
        ({"to": {"x": 1}, "by": "boat"}, "by: Input should be 'foot' or 'train'"),
        ({"to": {"x": 1}, "schema": 0}, "schema: Input should be greater than or equal to 1"),
        ({"to": {"x": 1}, "argument_0": 1}, "argument_0: Extra inputs are not permitted"),
        ({str(number): 1 for number in range(50)}, "; and 46 more"),
        ({"k" * 100_000: "v" * 100_000}, "Extra inputs"),
    ],
)
def test_tool_arguments_that_do_not_fit_get_expected_ones(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolFailure) as told:
        Tool(travel).call(arguments)
    assert said in str(told.value)
    assert str(told.value).endswith("It takes to (value), by (string, optional), schema (integer, optional).")
    assert len(str(told.value)) < 2000


def test_tool_refuses_types_without_schema() -> None:
    def untyped(x) -> str:  # type: ignore[no-untyped-def]
        return ""

    def many(*x: int) -> str:
        return ""

    def strange(x: threading.Lock) -> str:  # type: ignore[valid-type]
        return ""

    def lost(x: "NoSuchType") -> str:  # type: ignore[name-defined]  # noqa: F821
        return ""

    for function in (untyped, many, strange, lost):
        with pytest.raises(ConfigError, match=f"the tool '{function.__name__}'|The tool '{function.__name__}'"):
            Tool(function).check()


def test_tool_refuses_async_function() -> None:
    async def later(text: str) -> str:
        """Says it later."""
        return text

    with pytest.raises(ConfigError, match="The tool 'later' is an async function"):
        Tool(later).check()


def test_tool_result_is_cut_with_notice() -> None:
    def chatter(letters: int) -> str:
        """Says much."""
        if letters < 0:
            raise ToolFailure("n" * -letters)
        return "y" * letters

    tool = Tool(chatter, max_characters=10)
    assert tool.call({"letters": 10}) == "y" * 10
    assert tool.call({"letters": 12}) == "y" * 10 + "\n[cut: 2 more characters]"
    assert run_tool(tool, work(tool, letters=-12)).content == "n" * 10 + "\n[cut: 2 more characters]"


def test_tool_resource_opens_once_outside_call_time() -> None:
    made = []
    release = threading.Event()

    def opened() -> list[int]:
        assert release.wait(60)
        made.append(1)
        return made

    opening = Once(opened)

    def count() -> str:
        """Says how often it was made."""
        return str(len(opening()))

    tool = Tool(count, timeout_seconds=0.5, opens=opening)
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(run_tool(tool, work(tool)).content)) for _ in range(4)]
    for thread in threads:
        thread.start()
    threads[0].join(1.0)  # longer than a call may take
    assert not results
    release.set()
    for thread in threads:
        thread.join()
    assert results == ["1"] * 4


def test_tool_resource_failure_is_of_tool_or_system() -> None:
    def nothing() -> str:
        """Does nothing."""
        return ""

    def broken() -> None:
        raise ValueError("no index")

    def away() -> None:
        raise ServiceError("The search does not answer.")

    told = run_tool(Tool(nothing, opens=broken), work(Tool(nothing)))
    assert (told.content, told.error_class) == ("nothing failed: ValueError: no index", "tool_crash")
    with pytest.raises(InfraError, match=r"nothing cannot run on .*: The search does not answer"):
        run_tool(Tool(nothing, opens=away), work(Tool(nothing)))


def unready() -> None:
    """What the machine lacks."""
    raise ConfigError("No index is here.", "Make one.")


def failing() -> str:
    """The system fails it."""
    raise InfraError("The sandbox is down.")


failing_tool = Tool(failing)
unready_tool = Tool(failing, needs=unready)


entered, may_end = SimpleQueue[str](), threading.Event()


def lingering() -> str:
    """Takes its time."""
    entered.put("one")
    assert may_end.wait(60)
    return "done"


lingering_tool = Tool(lingering, timeout_seconds=60.0)
meeting, running = [threading.Barrier(1)], list[int]()


def counting() -> str:
    """Waits until the other calls run too; returns how many run."""
    running.append(1)
    meeting[0].wait(60)
    found = len(running)
    meeting[0].wait(60)
    running.pop()
    return str(found)


counting_tool = Tool(counting)


def asked(db: Database, tool: str, call: ToolCall) -> int:
    """The number of a call of the tool `module:name`, which a run's model has just made."""
    wanted = submission()
    group, *_ = start(db, replace(wanted, config={**wanted.config, "tools": [tool]}))
    claimed = claim(db, group)
    ((number,), *_) = steps.commit_sampled(db, claimed.fence, [sampled(claimed, calls=(replace(CALL, call=call),))])
    return number


def test_tool_call_sent_again_while_running_runs_once(own_database: Database) -> None:
    number = asked(own_database, f"{__name__}:lingering_tool", ToolCall("lingering", {}))
    first = threading.Thread(target=tool_call.calls, args=([number], NO_REPLY))
    first.start()
    assert entered.get(timeout=60)
    threading.Timer(0.5, may_end.set).start()
    tool_call.calls([number], NO_REPLY)
    first.join()
    assert entered.empty()
    assert values(own_database, "SELECT result FROM tool_calls") == ["done"]


def test_tool_call_failed_by_system_has_no_result(own_database: Database) -> None:
    number = asked(own_database, f"{__name__}:failing_tool", ToolCall("failing", {}))
    with pytest.raises(InfraError, match=r"failing cannot run on .*: The sandbox is down\."):
        tool_call.calls([number], "nobody")
    assert values(own_database, "SELECT result FROM tool_calls") == [None]


def test_failed_call_does_not_stop_others_of_message(own_database: Database) -> None:
    wanted = submission(tasks=1)
    config = {**wanted.config, "tools": [f"{__name__}:failing_tool"]}
    work = claim(own_database, start(own_database, replace(wanted, config=config))[0])
    records = (CALL, replace(CALL, call=ToolCall("failing", {})), CALL)
    ((*calls,),) = steps.commit_sampled(own_database, work.fence, [sampled(work, calls=records)])
    with pytest.raises(InfraError, match=r"failing cannot run on .*: The sandbox is down\."):
        tool_call.calls(calls, NO_REPLY)
    assert values(own_database, "SELECT result FROM tool_calls ORDER BY id") == ["42", None, "42"]


@pytest.mark.parametrize("reason", ["stopping", "redelivered"])
def test_calls_are_sent_on_one_by_one(own_database: Database, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    work = claim(own_database, start(own_database, submission(tasks=1))[0])
    ((*calls,),) = steps.commit_sampled(own_database, work.fence, [sampled(work, calls=(CALL, CALL))])
    sent = list[tuple[list[int], str]]()
    monkeypatch.setattr(tool_call, "send_calls", lambda calls, reply_to: sent.append((calls, reply_to)))
    stopped = threading.Event()
    monkeypatch.setattr(tool_call, "stopping", stopped)
    if reason == "stopping":
        stopped.set()
    tool_call.calls.push_request(delivery_info={"redelivered": reason == "redelivered"})
    try:
        tool_call.calls.run(calls, "nobody")
    finally:
        tool_call.calls.pop_request()
    assert sorted(sent) == [([call], "nobody") for call in calls]
    assert values(own_database, "SELECT result FROM tool_calls") == [None, None]


@pytest.mark.parametrize("count", [1, 2])
def test_calls_of_message_share_slots_of_worker(own_database: Database, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    wanted = submission(tasks=1)
    config = {**wanted.config, "tools": [f"{__name__}:counting_tool"]}
    work = claim(own_database, start(own_database, replace(wanted, config=config))[0])
    records = (replace(CALL, call=ToolCall("counting", {})),) * MAX_CALLS
    ((*calls,),) = steps.commit_sampled(own_database, work.fence, [sampled(work, calls=records)])
    monkeypatch.setattr(tool_call, "_slots", None)
    tool_call.limit_calls(count)
    meeting[0] = threading.Barrier(count)
    tool_call.calls(calls, NO_REPLY)
    assert values(own_database, "SELECT result FROM tool_calls") == [str(count)] * MAX_CALLS


def test_submit_refuses_tool_that_machine_cannot_serve(own_database: Database, tmp_path: Path) -> None:
    asked = {"dataset.name": "arithmetic", "model.path": str(tiny_random(tmp_path / "model"))}
    with pytest.raises(ConfigError, match="No index is here"):
        prepare(own_database, build({**asked, "tools": f"{__name__}:unready_tool"}))
    for name in ("search", "sql", "fetch"):
        with pytest.raises(ConfigError, match=f"AGENTRL_{name.upper()}"):
            prepare(own_database, build({**asked, "tools": name}))


@pytest.fixture
def user_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A user's own module of tools."""
    (tmp_path / "user_tools.py").write_text(
        "from agentrl.workflow.tools import Tool\n\n"
        "@Tool\ndef shout(text: str) -> str:\n    '''Shouts.'''\n    return text.upper()\n"
        "def calculator() -> str:\n    '''Another.'''\n    return ''\nother = Tool(calculator)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "user_tools"
    sys.modules.pop("user_tools", None)


def test_run_adds_tools_by_name_and_path(user_tools: str) -> None:
    env = find("envs", "math")
    config = build({"tools": ["echo", f"{user_tools}:shout", "calculator"]})
    assert list(offered_tools(env, config)) == ["calculator", "echo", "shout"]
    assert offered_tools(env, config)["shout"].call({"text": "hi"}) == "HI"
    assert offered_tools(env, build({})).keys() == {"calculator"}
    with pytest.raises(ConfigError, match="Two tools have the same name 'calculator'"):
        offered_tools(env, build({"tools": f"{user_tools}:other"}))


def test_env_takes_tools_by_name_or_object() -> None:
    assert list(Env(tools=("calculator", Tool(travel))).toolset()) == ["calculator", "travel"]


def test_tools_shipped_have_schemas_and_limits() -> None:
    for name in names("tools"):
        tool = find("tools", name)
        assert tool.schema["function"]["description"]
        assert 0 < tool.timeout_seconds <= 60
        assert 0 < tool.max_characters <= 65536


def test_echo_repeats_text() -> None:
    assert find("tools", "echo").call({"text": "a\x00b\ud800 \n"}) == "a\x00b\ud800 \n"


def test_tools_worker_finds_tool_of_run(own_database: Database, user_tools: str) -> None:
    number = asked(own_database, f"{user_tools}:shout", ToolCall("shout", {"text": "hi"}))
    from agentrl.workers.stack.replies import Replies

    tool_call.calls([number], Replies(settings()).address)
    assert values(own_database, "SELECT result FROM tool_calls") == ["HI"]
