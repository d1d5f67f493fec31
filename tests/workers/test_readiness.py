"""Readiness of workers: the file of health checks follows the broker, and a lost broker is two lines: lost, and back."""

import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from agentrl.workers.stack import broker
from agentrl.workers.stack.readiness import Readiness
from agentrl.workers.stack.worker import make_worker
from agentrl.workflow.settings import Settings
from tests.conftest import missing


def test_readiness_logs_each_change_once_and_keeps_its_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "ready"
    file.touch()  # of a process that was killed
    caplog.set_level(logging.INFO, "agentrl.ready")
    state = Readiness(file)
    assert not file.exists()
    for change, present in ((state.confirm, True), (lambda: state.lose("The broker is away."), False), (state.confirm, True)):
        change()
        change()
        assert file.exists() is present
    assert caplog.messages == ["ready", "not ready: The broker is away. Retrying until it answers.", "ready again"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_readiness_follows_broker_and_logs_loss_once(tmp_path: Path) -> None:
    where = Settings(home=tmp_path)
    if broker.find_server(where) is None:
        missing("a Redis server")
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    url, ready, log = f"redis://127.0.0.1:{port}/0", tmp_path / "ready", tmp_path / "log"
    ready.touch()  # of a process that was killed
    environment = os.environ | {"AGENTRL_HOME": str(tmp_path), "AGENTRL_BROKER_URL": url, "AGENTRL_READY_FILE": str(ready)}
    server = start_server(where, port)
    command = [sys.executable, "-m", "agentrl.cli", "worker", "tools"]
    with log.open("wb") as output:
        worker = subprocess.Popen(command, env=environment, stderr=output, stdout=output)
    try:
        wait_until(lambda: "starting tools" in log.read_text())
        wait_until(ready.exists)
        server.kill()
        server.wait()
        wait_until(lambda: not ready.exists())
        time.sleep(5.0)  # several attempts to reach it again
        server = start_server(where, port)
        wait_until(ready.exists)
    finally:
        worker.terminate()
        worker.wait(30)
        server.kill()
        server.wait()
    lines = re.findall(r"(?m)^[-\d]{10} [:,\d]{12} [IWEC] (?!py.warnings .*Running)(.*)$", log.read_text())  # root is warned of
    changes = ["agentrl.ready ready", "agentrl.ready not ready", "agentrl.ready ready again"]
    assert [line.partition(":")[0] for line in lines] == ["agentrl.worker starting tools", *changes]
    assert "@" not in lines[0]


def start_server(where: Settings, port: int) -> "subprocess.Popen[bytes]":
    """A Redis on that port, which answers."""
    command = [broker.find_server(where) or "", "--port", str(port), "--dir", str(where.root), "--save", ""]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_until(lambda: broker.is_answering(Settings(broker_url=f"redis://127.0.0.1:{port}/0")))
    return server


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_node_names_differ_by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers of `--scale rollout=2` have host names of their own, and pid 1; presence counts workers by node name."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    names = set()
    for host in ("one", "other"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        names.add(make_worker(["train"], 1, kind="WorkController").hostname)
    assert names == {"train-1@one", "train-1@other"}
