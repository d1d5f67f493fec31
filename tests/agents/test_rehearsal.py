"""A warm interpreter has called once, to nobody, with the SDK that its agent imported."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

import certifi
import pytest

from agentrl.workers.agents import processes
from agentrl.workers.agents.processes import AgentServers
from agentrl.workers.agents.rehearsal import TRUSTED
from tests.agents.an_sdk_agent import AT_THE_FIRST_CALL
from tests.agents.test_processes import order


@pytest.fixture(autouse=True)
def _own_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(processes, "servers", AgentServers())
    yield
    processes.servers.close()


def rewards(agent: str, **environment: str) -> Mapping[str, float] | None:
    path = {"PATH": os.environ["PATH"]}
    report = processes.run(order(environment=path | environment), f"tests.agents.an_sdk_agent:{agent}", lambda: False)
    assert report is not None
    assert not report.error, report.error
    return report.rewards


def test_rehearse_imports_modules_of_first_call() -> None:
    assert rewards("looks") == dict.fromkeys(AT_THE_FIRST_CALL, 1.0)


def test_rehearse_prepares_separate_tls_contexts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in TRUSTED:
        monkeypatch.delenv(name, raising=False)
    ready = {"read after client 0": 0.0, "read after client 1": 0.0, "read after client 2": 1.0}
    for _ in range(2):  # each agent
        assert rewards("connects") == {**ready, "contexts": 3.0, "alike": 1.0}


def test_rehearse_hands_out_no_context_for_other_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TRUSTED:
        monkeypatch.delenv(name, raising=False)
    found = rewards("connects", SSL_CERT_FILE=certifi.where())
    assert found is not None
    assert found["read after client 0"] == 1.0


def test_rehearse_without_sdk_imports_nothing() -> None:
    code = (
        "import sys; from agentrl.workers.agents.rehearsal import rehearse; before = set(sys.modules); rehearse(); "
        "assert not set(sys.modules) - before; import types; sys.modules['openai'] = types.ModuleType('openai'); rehearse(); "
        "print('fine')"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "fine\n"
