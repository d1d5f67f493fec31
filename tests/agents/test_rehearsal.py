"""A warm interpreter has called once, to nobody, with the SDK that its agent imported."""

import subprocess
import sys
from typing import Any

from agentrl.workers.agents import processes
from agentrl.workers.agents.processes import AgentServers
from tests.agents.an_sdk_agent import AT_THE_FIRST_CALL
from tests.agents.test_processes import order


def test_an_agent_finds_imported_what_its_sdk_imports_at_the_first_call(monkeypatch: Any) -> None:
    monkeypatch.setattr(processes, "servers", AgentServers())
    report = processes.run(order(), "tests.agents.an_sdk_agent:looks", lambda: False)
    processes.servers.close()
    assert report is not None
    assert report.rewards == dict.fromkeys(AT_THE_FIRST_CALL, 1.0)


def test_without_an_sdk_nothing_is_imported_and_a_strange_one_hurts_nobody() -> None:
    code = (
        "import sys; from agentrl.workers.agents.rehearsal import rehearse; before = set(sys.modules); rehearse(); "
        "assert not set(sys.modules) - before; import types; sys.modules['openai'] = types.ModuleType('openai'); rehearse(); "
        "print('fine')"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "fine\n"
