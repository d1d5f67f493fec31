"""Tools in a real tools worker, behind a real Redis: the calls of a turn run side by side, and a server is shared by them."""

import base64
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentrl.workers.stack import broker, dispatch
from agentrl.workers.stack.celery_app import make_app
from agentrl.workflow.mcp import mcp_servers, mcp_tool
from agentrl.workflow.settings import Settings
from agentrl.workflow.store import steps
from agentrl.workflow.tools import Tool
from tests.conftest import missing
from tests.support.played_runs import CALL, claim, sampled, start, submission, values
from tests.support.real_stack import Stack

pytestmark = pytest.mark.usefixtures("forked_programs_of_module")

PARTY = 4
SERVER = Path(__file__).parents[1] / "support" / "mcp_server.py"


def meet(folder: str, name: str) -> str:
    """Waits until everybody is there."""
    (Path(folder) / name).touch()
    deadline = time.monotonic() + 60
    while len(list(Path(folder).iterdir())) < PARTY:
        assert time.monotonic() < deadline, "nobody else came"
        time.sleep(0.01)
    return "all are there"


meet_tool = Tool(meet, timeout_seconds=90.0)


@pytest.fixture
def stack(short_folder: Path, redis_server: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A tools worker on a database of its own."""
    url = f"{broker.SOCKET_SCHEME}{broker.socket_path(redis_server)}?virtual_host=0"
    made = Stack(short_folder / "here", AGENTRL_BROKER_URL=url)
    monkeypatch.setattr(dispatch, "app", make_app(made.settings))
    assert made.database
    made.worker("tools")
    yield made
    made.close()


def test_messages_carry_several_calls_each(redis_server: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "app", make_app(redis_server))
    with broker.connect_redis(redis_server) as redis:
        before = redis.llen("agentrl.tools")
        dispatch.send_calls(range(1, 2 * dispatch.MAX_CALLS + 2), dispatch.NO_REPLY)
        sent = [json.loads(base64.b64decode(json.loads(line)["body"]))[0][0] for line in redis.lrange("agentrl.tools", 0, -1)]
    assert len(sent) - before == 3
    assert sorted(call for calls in sent[:3] for call in calls) == list(range(1, 2 * dispatch.MAX_CALLS + 2))


@pytest.mark.slow
def test_tools_worker_runs_calls_of_turn_in_parallel(stack: Stack, tmp_path: Path) -> None:
    if find_spec("mcp") is None:
        missing("the mcp SDK")
    name = mcp_servers.PREFIX + shlex.join([sys.executable, str(SERVER), str(tmp_path)])
    served = [told.model_dump(mode="json") for told in mcp_tool.list_tools(name)]
    wanted = submission()
    config = {**wanted.config, "tools": ["tests.tools.test_tools_queue:meet_tool", name], "served_tools": served}
    work = claim(stack.database, start(stack.database, replace(wanted, config=config))[0])
    party = tmp_path / "party"
    party.mkdir()
    arguments = [("meet", {"folder": str(party), "name": str(guest)}) for guest in range(PARTY)] + [("process", {})] * 2
    records = tuple(replace(CALL, call=replace(CALL.call, name=tool, arguments=given)) for tool, given in arguments)
    (calls, *_) = steps.commit_sampled(stack.database, work.fence, [sampled(work, calls=records)])
    dispatch.send_calls(calls, "nobody")
    open_calls = "SELECT id FROM tool_calls WHERE result IS NULL"
    stack.wait(lambda: not values(stack.database, open_calls), "the calls being answered")
    told = values(stack.database, "SELECT result FROM tool_calls ORDER BY id")
    assert told[:PARTY] == ["all are there"] * PARTY
    assert told[PARTY].isdecimal()
    assert told[PARTY] == told[PARTY + 1]
