"""The engine `vllm`: an environment of its own, and a server that the process starts, watches and ends.

Here `tests/support/packages/vllm` stands for vLLM. `test_real_vllm.py` tries the real one (`make vllm-test`).
"""

import os
import signal
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli import doctor
from agentrl.cli.engine import engine as command
from agentrl.workers.requests.submit import prepare
from agentrl.workflow import engines
from agentrl.workflow.config import ModelConfig, build
from agentrl.workflow.engines import GenerateRequest
from agentrl.workflow.engines import vllm as environment
from agentrl.workflow.errors import ConfigError, ModelError, ServiceError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.inference import vllm_engine
from agentrl.workflow.inference.remote_engine import ServedEngine
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import Settings
from agentrl.workflow.trajectory import PolicyRef
from tests.support.real_stack import children_of
from tests.support.small_models import tiny_random

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

PACKAGES = Path(__file__).parents[1] / "support" / "packages"
REQUEST = GenerateRequest(tuple(range(10, 24)), PolicyRef("small", ""), key=1, position=0, max_new_tokens=8)


@pytest.fixture
def where(home: Path) -> Settings:
    """The settings of a data folder with an environment whose vLLM is the package of the tests."""
    found = Settings(home=home, slots=4)
    folder = environment.python_of(found).parents[1]
    venv.create(folder, symlinks=True)
    paths = [str(PACKAGES), str(Path(__file__).parents[2]), *(path for path in sys.path if path.endswith("site-packages"))]
    (next(folder.glob("lib/python*/site-packages")) / "paths.pth").write_text("\n".join(paths))
    (folder / "installed").write_text("0.32.0")
    return found


@pytest.fixture
def opened(where: Settings, tmp_path: Path) -> Iterator[tuple[ServedEngine, Path]]:
    """An engine, and the folder of its model."""
    model = tiny_random(tmp_path / "small")
    policy = Policy.load(ModelConfig(path=str(model), lora_r=4), str(model), "cpu", 1, weights=False)
    with ExitStack() as stack:
        engine = engines.start(environment.vllm, policy, where)
        assert isinstance(engine, ServedEngine)
        stack.callback(engine.close)
        yield engine, model


def servers() -> list[int]:
    """The pids of this process's servers."""
    return [pid for pid in children_of(os.getpid()) if b"vllm.entrypoints" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_until_gone(pid: int) -> None:
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until, f"process {pid} still runs"
        time.sleep(0.05)


def test_submit_warns_that_vllm_is_slow_without_gpu(where: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = build({"dataset.name": "arithmetic", "model.path": str(tiny_random(tmp_path / "model")), "model.lora_r": 4})
    on_vllm = asked.model_copy(update={"rollout": asked.rollout.model_copy(update={"engine": "vllm"})})
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    assert [remark for remark in prepare(None, on_vllm).remarks if "leave out --engine vllm" in remark]
    assert not [remark for remark in prepare(None, asked).remarks if "vllm" in remark]
    (programs / "nvidia-smi").write_text("#!/bin/sh\n")
    (programs / "nvidia-smi").chmod(0o755)
    assert not [remark for remark in prepare(None, on_vllm).remarks if "vllm" in remark]


def test_vllm_server_starts_samples_and_ends(opened: tuple[ServedEngine, Path]) -> None:
    engine, _ = opened
    assert servers() == []
    done = engine.submit(REQUEST).result(120)
    assert len(done.token_ids) == len(done.logprobs) > 0
    (pid,) = servers()
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    key = next(entry for entry in environ if entry.startswith(b"VLLM_API_KEY=")).partition(b"=")[2]
    assert key
    assert key not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert not any(entry.startswith(b"AGENTRL_") for entry in environ)
    engine.close()
    wait_until_gone(pid)


def test_vllm_killed_is_started_again(opened: tuple[ServedEngine, Path]) -> None:
    engine, _ = opened
    engine.submit(REQUEST).result(120)
    (pid,) = servers()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ServiceError, match=r"ended \(exit code -9\). It is started again"):
        engine.submit(replace(REQUEST, key=2)).result(60)
    assert engine.submit(replace(REQUEST, key=2)).result(120).token_ids
    assert servers() != [pid]


def test_vllm_that_keeps_ending_is_given_up(opened: tuple[ServedEngine, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = opened
    monkeypatch.setattr(vllm_engine, "MAX_ENDS", 1)
    engine.submit(REQUEST).result(120)
    os.kill(servers()[0], signal.SIGKILL)
    with pytest.raises(ServiceError):
        engine.submit(REQUEST).result(60)
    with pytest.raises(ModelError, match="ended 1 times"):
        engine.submit(REQUEST).result(60)


def test_vllm_that_cannot_start_says_why(opened: tuple[ServedEngine, Path]) -> None:
    engine, model = opened
    (model / "broken").touch()
    with pytest.raises(ModelError, match=r"could not start: ValueError: the model is broken.*Read /"):
        engine.submit(REQUEST).result(120)


def test_vllm_ends_with_a_killed_worker(where: Settings, tmp_path: Path) -> None:
    model = tiny_random(tmp_path / "small")
    program = f"""
import time
from pathlib import Path
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.inference import vllm_engine
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import Settings
policy = Policy.load(ModelConfig(path={str(model)!r}, lora_r=4), {str(model)!r}, "cpu", 1, weights=False)
engine = vllm_engine.start(policy, Settings(home={str(where.home)!r}))
engine.window()
print("ready", flush=True)
time.sleep(600)
"""
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
        (server,) = children_of(worker.pid)
    finally:
        worker.kill()
        worker.communicate()
    wait_until_gone(server)


def test_engine_command_installs_replaces_and_removes(home: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("vllm/__init__.py", "__version__ = '9.9'\n")
        file.writestr("vllm-9.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n")
        file.writestr("vllm-9.9.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("vllm-9.9.dist-info/RECORD", "")
    settings = Settings(home=home)
    with pytest.raises(ConfigError, match="agentrl engine install vllm"):
        environment.check_installed(settings)
    done = CliRunner().invoke(command, ["install", "vllm", "--package", str(wheel)])
    assert done.exit_code == 0, done.output
    assert "vLLM 9.9 is ready" in done.output
    environment.check_installed(settings)
    check = next(doctor._engine(settings))
    assert (check.state, check.found) == ("ok", f"vLLM 9.9 in {environment.python_of(settings).parents[1]}")
    with pytest.raises(ServiceError, match="pip could not install"):
        list(environment.install(settings, str(tmp_path / "none.whl")))
    with pytest.raises(ConfigError, match="not installed"):
        environment.check_installed(settings)
    assert environment.remove(settings)
    assert not environment.remove(settings)


def test_submit_refuses_what_vllm_cannot_do(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not know rollout\.top_p"):
        engines.check(environment.vllm, build({"rollout.top_p": 0.9, "rollout.engine": "vllm"}), trains=True)
    with pytest.raises(ConfigError, match="kind 'full'"):
        engines.check(environment.vllm, build({"model.lora_r": 0, "rollout.engine": "vllm"}), trains=True)
    assert Experiment(build({"rollout.engine": "vllm"})).engine is environment.vllm
