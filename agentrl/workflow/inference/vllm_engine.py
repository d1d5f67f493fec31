"""The engine `vllm`: this process starts a vLLM server of its own, and samples with it as `openai_engine` does.

The server listens at a free port of the loopback address, with a random key. It starts at the first turn, and is started again
if it ends. It ends together with this process.
"""

import os
import secrets
import shlex
import signal
import socket
import subprocess
import threading
import time
from contextlib import closing, suppress
from logging import getLogger
from pathlib import Path

from agentrl.workflow.engines import GenerateRequest
from agentrl.workflow.engines.vllm import check_installed, python_of
from agentrl.workflow.errors import InfraError, ModelError, ServiceError
from agentrl.workflow.inference.http import Connection
from agentrl.workflow.inference.openai_engine import KEEP, OpenAIServer
from agentrl.workflow.inference.remote_engine import ServedEngine, ServerTurn
from agentrl.workflow.inference.server_responses import Cards
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.runtime.process_output import output_lines, read_end
from agentrl.workflow.settings import Settings

log = getLogger("agentrl.vllm")

START_SECONDS = 1800.0
"""The longest wait for the start of the server, in seconds. A large model takes minutes."""

STOP_SECONDS = 20.0
"""The time that the server has to end after SIGTERM, in seconds."""

ENDING_SECONDS = 5.0
"""The time in which a server that answers with an error may turn out to be ending, in seconds."""

MAX_ENDS, ENDS_WITHIN = 5, 1800.0
"""A server that ended so often within so many seconds is not started again."""

ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM allows for `--max-lora-rank`."""

GPU_SHARE = 0.5
"""The share of a GPU's memory that the server takes. The trainer needs the rest."""

_RUN = """
import ctypes, os, runpy, signal, sys
parent = int(sys.argv.pop(1))
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end with the worker
if os.getppid() != parent:
    sys.exit("the worker has ended")
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""


def start(policy: Policy, settings: Settings) -> ServedEngine:
    """Return the engine. Its server starts at the first turn.

    Raises:
        ConfigError: vLLM is not installed.
        ModelError: the rank of the adapters is higher than vLLM allows.
    """
    check_installed(settings)
    if policy.rank > ADAPTER_RANKS[-1]:
        raise ModelError(f"vLLM allows adapters of rank {ADAPTER_RANKS[-1]} at most, and model.lora_r is {policy.rank}.")
    return ServedEngine(policy, [OwnServer(policy, settings)], settings.slots)


class OwnServer:
    """A vLLM server that this process starts and watches, with the client for its routes. `url` is its URL since the last
    start.
    """

    def __init__(self, policy: Policy, settings: Settings) -> None:
        self._policy, self._settings = policy, settings
        self._client: OpenAIServer | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self._log = settings.root / "engines" / f"vllm-{os.getpid()}.log"
        self._ends: list[float] = []
        self.url = ""

    def greet(self) -> int:
        """Start the server if it does not run. Return its context window in tokens.

        Raises:
            ModelError: the server ended before it answered; the message has the last line of its log.
            ServiceError: the server did not answer in time.
        """
        if self._process is not None and self._process.poll() is not None:
            self._count_end()
        if self._client is None or self._process is None:
            self.start(_free_port())
        assert self._client is not None
        return self._client.greet()

    def sample(self, request: GenerateRequest, limit: int) -> ServerTurn:
        """Sample one turn. Raise ServiceError if the server has ended."""
        client, process = self._client, self._process
        if client is None or process is None:
            raise ServiceError("The vLLM server of this worker does not run.")
        try:
            return client.sample(request, limit)
        except (ServiceError, InfraError) as error:
            try:
                code = process.wait(ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                raise error from None
            raise ServiceError(f"The vLLM server ended (exit code {code}). It is started again.") from error

    def close(self) -> None:
        """End the server."""
        self._closed.set()
        self._stop()

    def _count_end(self) -> None:
        """Note that the server ended by itself. Raise ModelError if it did so too often."""
        self._stop()
        now = time.monotonic()
        self._ends = [*(moment for moment in self._ends if now - moment < ENDS_WITHIN), now]
        if len(self._ends) >= MAX_ENDS:
            self._ends = []
            reason = _last_error(self._log)
            raise ModelError(f"The vLLM server ended {MAX_ENDS} times: {reason}", f"Read {self._log}.")

    def start(self, port: int) -> None:
        """Start the server at this port, and wait until it answers. Raises as `greet` does."""
        key = secrets.token_urlsafe(24)
        self._process = _spawn(self._command(port), self._environment(key), self._log)
        log.info("vLLM starts on port %d; its log is %s", port, self._log)
        self.url = f"http://127.0.0.1:{port}"
        where = self._settings.model_copy(update={"engine_url": self.url, "engine_key": key})
        try:
            with closing(Connection(where, seconds=5.0)) as connection:
                self._wait_for_answer(connection)
        except BaseException:
            self._stop()
            raise
        self._client = OpenAIServer(self._policy, Connection(where))

    def _wait_for_answer(self, connection: Connection) -> None:
        """Wait until the server lists its models."""
        assert self._process is not None
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and not self._closed.is_set():
            if self._process.poll() is not None:
                raise ModelError(f"vLLM could not start: {_last_error(self._log)}", f"Read {self._log}.")
            try:
                connection.read(Cards, "/v1/models")
                return
            except ServiceError:
                self._closed.wait(0.5)
        raise ServiceError(f"vLLM did not answer within {START_SECONDS:g} seconds.", f"Read {self._log}.")

    def _stop(self) -> None:
        client, process = self._client, self._process
        self._client = self._process = None
        if client is not None:
            client.close()
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("vLLM did not end within %g seconds and is killed", STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def _command(self, port: int) -> list[str]:
        policy = self._policy
        rank = next(rank for rank in ADAPTER_RANKS if rank >= policy.rank)
        on_gpu = policy.device.type == "cuda"
        dtype = policy.config.dtype if policy.config.dtype != "auto" else "auto" if on_gpu else "float32"
        options = {
            "model": policy.folder,
            "served-model-name": policy.folder.name,
            "host": "127.0.0.1",
            "port": port,
            "dtype": dtype,
            "max-lora-rank": rank,
            "max-cpu-loras": KEEP + 2,
            "generation-config": "vllm",
            "logprobs-mode": "processed_logprobs",
            **({"gpu-memory-utilization": GPU_SHARE} if on_gpu else {}),
        }
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        switches = ["--enable-lora", *(["--trust-remote-code"] if policy.config.trust_remote_code else [])]
        # On a CPU, vLLM cannot divide a prompt whose request has a seed (a generator there has no offset).
        switches += [] if on_gpu else ["--enforce-eager", "--no-enable-chunked-prefill"]
        own = shlex.split(self._settings.vllm_args)  # the last one counts
        return [str(python_of(self._settings)), "-I", "-c", _RUN, str(os.getpid()), *arguments, *switches, *own]

    def _environment(self, key: str) -> dict[str, str]:
        device = self._policy.device
        own = {
            "VLLM_API_KEY": key,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
            **({"CUDA_VISIBLE_DEVICES": str(device.index)} if device.type == "cuda" and device.index else {}),
        }
        return {name: value for name, value in os.environ.items() if not name.startswith("AGENTRL_")} | own


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _spawn(command: list[str], environment: dict[str, str], file: Path) -> "subprocess.Popen[bytes]":
    """Start the server from a thread that lives as long as the server.

    The kernel ends a process with PR_SET_PDEATHSIG when the thread that started it ends.
    """
    started, processes = threading.Event(), list[subprocess.Popen[bytes]]()

    def run() -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
        finally:
            started.set()
        processes[0].wait()

    threading.Thread(target=run, name="vllm", daemon=True).start()
    started.wait()
    if not processes:
        raise ServiceError(f"{command[0]} could not be started.", "Type `agentrl engine install vllm`.")
    return processes[0]


def _last_error(file: Path) -> str:
    """Return the last line of the log that names an error, or the last line."""
    with file.open("rb") as log_file:
        lines = output_lines(read_end(log_file))
    errors = [line for line in lines if "Error" in line]
    return ((errors or lines or ["it wrote nothing"])[-1])[-300:]
