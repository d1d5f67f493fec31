"""Tools of MCP servers: what they say is asked once, their process is kept, and its death costs no more than it must."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue

import pytest

from agentrl.cli.main import main
from agentrl.workers.jobs import pending_calls, tool_call
from agentrl.workers.jobs.episode_loop import GroupRollout
from agentrl.workers.requests.submit import prepare
from agentrl.workers.stack import dispatch
from agentrl.workers.stack.celery_app import make_app
from agentrl.workers.stack.replies import Replies
from agentrl.workflow.config import RunConfig, ServedTool, build
from agentrl.workflow.envs import Env, offered_tools
from agentrl.workflow.errors import ConfigError, InfraError, ToolFailure, UnknownOutcome
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.mcp import mcp_servers, mcp_tool
from agentrl.workflow.plugins import find
from agentrl.workflow.settings import settings
from agentrl.workflow.store import planning
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.tool_calls import CallWork
from tests.conftest import missing
from tests.support.played_runs import claim, values
from tests.support.scripted_engine import ScriptedEngine
from tests.support.small_models import chat, tiny_random

SERVER = Path(__file__).parents[1] / "support" / "mcp_server.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server writes down what it does."""
    if find_spec("mcp") is None:
        missing("the mcp SDK")
    return tmp_path_factory.mktemp("mcp")


@pytest.fixture(scope="module")
def listed(folder: Path) -> tuple[ServedTool, ...]:
    """What it offers, asked once."""
    return mcp_tool.list_tools(mcp_servers.PREFIX + shlex.join([sys.executable, str(SERVER), str(folder)]))


@pytest.fixture
def name(listed: tuple[ServedTool, ...]) -> Iterator[str]:
    """The server's name; its processes end with the test."""
    yield listed[0].server
    mcp_servers.stop_servers()


@pytest.fixture
def served(listed: tuple[ServedTool, ...], name: str) -> dict[str, mcp_tool.McpTool]:
    """Its tools."""
    return {told.name: mcp_tool.McpTool.of(told) for told in listed}


@pytest.mark.usefixtures("forked_programs")
def test_mcp_tools_have_schemas_and_effects_from_hints(served: dict[str, mcp_tool.McpTool]) -> None:
    add = served["add"].schema["function"]
    assert (add["name"], add["description"]) == ("add", "Adds two whole numbers.")
    assert add["parameters"]["properties"]["a"]["type"] == "integer"
    assert {tool.name: tool.effects for tool in served.values() if tool.effects != "none"} == {
        "stumble": "repeatable",
        "charge": "once",
    }
    for tool in served.values():
        tool.check()


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.slow
def test_mcp_calls_share_process_that_restarts_after_death(served: dict[str, mcp_tool.McpTool], name: str) -> None:
    assert served["add"].call({"a": 1, "b": 2}) == "3"
    first = served["process"].call({})
    assert first == served["process"].call({})
    os.kill(int(first), signal.SIGKILL)
    assert served["process"].call({}) != first
    assert served["stumble"].call({}) == "up again"
    assert mcp_servers.server(name).started == 3


@pytest.mark.usefixtures("forked_programs")
def test_mcp_call_with_effects_is_unknown_after_server_death(served: dict[str, mcp_tool.McpTool], folder: Path) -> None:
    with pytest.raises(UnknownOutcome, match="may or may not have taken effect"):
        served["charge"].call({})
    assert (folder / "charged").read_text() == "x"
    work = CallWork(1, "math", "charge", {}, "once")
    assert tool_call.run_tool(served["charge"], work).error_class == "unknown_outcome"


@pytest.mark.usefixtures("forked_programs")
def test_mcp_server_that_keeps_dying_is_system_failure(served: dict[str, mcp_tool.McpTool]) -> None:
    with pytest.raises(InfraError, match="ended twice"):
        served["doomed"].call({})
    gone = ServedTool(server="mcp:no_such_command_anywhere", name="x", parameters={"type": "object"})
    with pytest.raises(InfraError, match="did not start: FileNotFoundError"):
        mcp_tool.McpTool.of(gone).call({})


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("add", {"a": "x"}, "should be a valid integer"),
        ("add", {"a": 1}, "Field required"),
        ("refuse", {}, "refuse"),
        ("nothing", {}, "nothing"),
    ],
)
def test_mcp_server_error_is_shown_to_model(
    served: dict[str, mcp_tool.McpTool], name: str, tool: str, arguments: dict[str, object], said: str
) -> None:
    made = served.get(tool) or mcp_tool.McpTool.of(ServedTool(server=name, name=tool, parameters={"type": "object"}))
    with pytest.raises(ToolFailure, match=said):
        made.call(arguments)


@pytest.mark.usefixtures("forked_programs")
def test_mcp_result_is_text_within_limits(served: dict[str, mcp_tool.McpTool]) -> None:
    assert served["mixed"].call({}).splitlines() == ["a\x00b", "[image that cannot be shown]"]
    assert served["long"].call({}).endswith("[cut: 34464 more characters]")
    slow = replace(served["slow"], timeout_seconds=0.2)
    assert tool_call.run_tool(slow, CallWork(1, "math", "slow", {}, "none")).error_class == "timeout"
    assert served["add"].call({"a": 2, "b": 2}) == "4"


def test_mcp_start_time_is_not_part_of_call(served: dict[str, mcp_tool.McpTool]) -> None:
    add = replace(served["add"], timeout_seconds=0.4)  # less than an interpreter takes to import the SDK
    assert tool_call.run_tool(add, CallWork(1, "math", "add", {"a": 1, "b": 1}, "none")).content == "2"


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.slow
def test_mcp_call_cut_by_worker_end_starts_no_server(served: dict[str, mcp_tool.McpTool], name: str, folder: Path) -> None:
    (folder / "slow").unlink(missing_ok=True)
    server = mcp_servers.server(name)
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(served["slow"].call, {})
        wait_for(lambda: (folder / "slow").exists())
        mcp_servers.stop_servers()
        with pytest.raises(InfraError, match="is being stopped"):
            cut.result()
    assert server.started == 1


def wait_for(met: Callable[[], bool]) -> None:
    """Waits until the condition is met, a minute at most."""
    deadline = time.monotonic() + 60
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.slow
def test_mcp_server_ends_with_its_process(listed: tuple[ServedTool, ...], number: int) -> None:
    told = next(told for told in listed if told.name == "process").model_dump()
    code = (
        "import signal, sys, time\nfrom agentrl.workflow.mcp import mcp_tool\nfrom agentrl.workflow.config import ServedTool\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        f"print(mcp_tool.McpTool.of(ServedTool(**{told!r})).call({{}}), flush=True)\ntime.sleep(600)\n"
    )
    user = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert user.stdout is not None
    server = int(user.stdout.readline())
    user.send_signal(number)
    user.wait(60)
    user.stdout.close()
    wait_for(lambda: not command_of(f"/proc/{server}/cmdline"))


def command_of(file: str) -> bytes:
    """The command line of a process; nothing where it has ended."""
    try:
        return Path(file).read_bytes()
    except OSError:
        return b""


@pytest.mark.usefixtures("forked_programs")
def test_mcp_server_environment_is_minimal(monkeypatch: pytest.MonkeyPatch, served: dict[str, mcp_tool.McpTool]) -> None:
    monkeypatch.setenv("AGENTRL_ENGINE_KEY", "hush")
    assert served["secret"].call({"name": "AGENTRL_ENGINE_KEY"}) == "unknown"
    assert served["secret"].call({"name": "PATH"}) == os.environ["PATH"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("mcp:", "Missing command"),
        ("mcp:'", "is not a command"),
        ("mcp:no_such_command_anywhere", "No such file"),
        ("mcp:true", "did not list its tools"),
        ("mcp:sh -c 'seq 300000 >&2; echo why >&2; echo >&2'", "did not list its tools: why."),
        (f"mcp:{sys.executable} -c 'raise SystemExit(\"words of its own\")'", "words of its own"),
    ],
)
def test_mcp_server_invalid_is_refused_at_submit(name: str, asked: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        mcp_tool.list_tools(asked)


def test_mcp_command_files_have_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my server.py").touch()
    assert (
        mcp_tool.absolute_name("mcp:python 'my server.py' ./none.py -v") == f"mcp:python '{tmp_path}/my server.py' ./none.py -v"
    )
    assert mcp_tool.absolute_name("calculator") == "calculator"


def test_mcp_server_in_env_and_duplicate_tool_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="--tools 'mcp:x'"):
        Env(tools=("mcp:x",)).toolset()
    twin = ServedTool(server="mcp:x", name="calculator", parameters={"type": "object"})
    config = build({"tools": ("mcp:x",)}).model_copy(update={"served_tools": (twin,)})
    with pytest.raises(ConfigError, match="Two tools have the same name 'calculator'"):
        offered_tools(find("envs", "math"), config)


@pytest.mark.parametrize("called", ["t" * 129, "a\x1b[2J\nb", " ", "", "größe", "a\n"])
def test_mcp_tool_with_ambiguous_name_is_not_offered(called: str) -> None:
    told = ServedTool.model_construct(server="mcp:x", name=called, description="d", parameters={"type": "object"})
    config = build({"tools": ("mcp:x",)}).model_copy(update={"served_tools": (told,)})
    with pytest.raises(ConfigError, match="of 'mcp:x' has an invalid name") as refused:
        offered_tools(find("envs", "math"), config)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300
    with pytest.raises(ConfigError, match="has an invalid name"):
        mcp_tool.McpTool.of(told).check()


@pytest.mark.parametrize("called", ["t" * 128, "files/read.all", "get-it_2"])
def test_mcp_tool_names_of_128_characters_are_offered(called: str) -> None:
    mcp_tool.McpTool.of(ServedTool(server="mcp:x", name=called, description="d", parameters={"type": "object"})).check()


@pytest.mark.parametrize(
    ("description", "parameters", "said"),
    [
        ("d" * 70_000, {"type": "object"}, "description and parameters of 70"),
        ("d", {"type": "object", "x": ["y" * 1000] * 70}, "description and parameters of 70"),
        ("d", {"type": "object", "x": math.inf}, "that JSON cannot store"),
        ("\udfff", {"type": "object"}, "that JSON cannot store"),
    ],
)
def test_mcp_tool_with_invalid_description_is_refused(description: str, parameters: dict[str, object], said: str) -> None:
    told = ServedTool.model_construct(server="mcp:x", name="a", description=description, parameters=parameters)
    with pytest.raises(ConfigError, match=f"'a' of 'mcp:x' has a description .*{said.removeprefix('description ')}"):
        mcp_tool.McpTool.of(told).check()


# --- from submit to the result ----------------------------------------------------------------------------------------------


def asked(tmp_path: Path, *names: str) -> RunConfig:
    """A run on one task with these tools beside the calculator."""
    model = str(tiny_random(tmp_path / "model"))
    values = {"dataset.name": "arithmetic", "dataset.max_tasks": 1, "model.path": model, "rollout.group_size": 2}
    return build({**values, "rollout.tasks_per_iteration": 1, "rollout.max_new_tokens": 200, "tools": names})


@pytest.mark.usefixtures("forked_programs")
def test_mcp_tool_works_from_submit_to_transcript(
    own_database: Database, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = Replies(settings())
    monkeypatch.setattr(pending_calls, "_replies", lambda: replies)
    monkeypatch.setattr(dispatch, "app", make_app(settings()))
    prepared = prepare(own_database, asked(tmp_path, name, "echo"))
    made = planning.submit(own_database, prepared.submission)
    groups = planning.start_iteration(own_database, planning.open_iterations(own_database, made.id)[0])
    work = claim(own_database, groups[0])
    experiment = Experiment.load(work.config, work.weights)
    config = experiment.config
    assert config.tools == (name, "echo")
    assert {told.name for told in config.served_tools} >= {"add", "charge"}
    spoken = chat()
    calls = [("add", {"a": 40, "b": 2}), ("echo", {"text": "hi"}), ("calculator", {"expression": "1"}), ("pay", {})]
    said = "".join(f"<tool_call>{json.dumps({'name': tool, 'arguments': given})}</tool_call>" for tool, given in calls)
    ids = [(*spoken.tokenizer.encode(text, add_special_tokens=False), min(spoken.end_ids)) for text in (said, "42")]
    engine = ScriptedEngine([ids[0], ids[0], ids[1], ids[1]], workers=1)
    driver = GroupRollout(own_database, work, experiment, engine, spoken, SimpleQueue(), set())
    assert {schema["function"]["name"] for schema in driver.schemas} >= {"calculator", "echo", "add", "slow"}
    driver.start()
    while driver.is_live:
        driver.handle([driver.inbox.get(timeout=60)])
        for number in values(own_database, "SELECT id FROM tool_calls WHERE result IS NULL"):
            tool_call.calls([number], pending_calls._replies().address)
    told = values(own_database, "SELECT result FROM tool_calls ORDER BY episode_id, id")
    assert told[:3] == told[4:7] == ["42", "hi", "1"]
    assert told[3].startswith("unknown tool 'pay'; known: add, ")
    again = prepare(own_database, config.model_copy(update={"name": None}), kind="eval")
    assert again.config.served_tools == config.served_tools
    assert build(config.flat()) == config  # as forks are made


@pytest.mark.slow
def test_submit_takes_mcp_tools_and_shows_recorded_ones(
    home: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "--dataset", "arithmetic", "--model", str(tiny_random(tmp_path / "model")), "--dry-run", "--json"]
    assert main([*words, "--tools", name, "--tools", "echo"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert config["tools"] == [name, "echo"]
    assert "add" in {told["name"] for told in config["served_tools"]}
    assert main([*words, "--tools", "ecko"]) == 2
    assert "Did you mean 'echo'?" in capsys.readouterr().err


def test_mcp_tools_listed_but_not_chosen_are_refused(tmp_path: Path, own_database: Database) -> None:
    strange = ServedTool(server="mcp:x", name="y", parameters={"type": "object"})
    with pytest.raises(ConfigError, match="'mcp:x', which is not in `tools`"):
        prepare(own_database, asked(tmp_path).model_copy(update={"served_tools": (strange,)}))
