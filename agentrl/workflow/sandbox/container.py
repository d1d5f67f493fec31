"""A running container as the host uses it: its `docker run` process, and the frames that the host exchanges with `bridge.py`
over the process's pipes.

The program cannot change what the bridge sends, so the kind and the sender of a frame are trusted. The message in a `C` frame
comes from model-written code, so the code that reads it must validate it.
"""

import json
import os
import select
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryFile

from agentrl.workflow.errors import InfraError
from agentrl.workflow.sandbox import Limits, bridge, payload, seccomp
from agentrl.workflow.sandbox.bridge import FRAME
from agentrl.workflow.sandbox.cgroups import SPARE_PROCESSES, CgroupEvents
from agentrl.workflow.sandbox.keeper import ENTRIES
from agentrl.workflow.sandbox.limits_watch import Clock, Overrun, Use

KIND = "docker"
START_SECONDS = 60.0
END_SECONDS = 5.0
LOOK_SECONDS = 0.1
CHUNK = 1 << 16
MAX_FRAME_BYTES = 8 << 20
PYTHON = "python3"
SHM_BYTES = 1 << 20


@dataclass(frozen=True)
class KernelCounts:
    """The kernel's counts for all processes of a container. Times are in seconds."""

    events: CgroupEvents
    cpu_seconds: float
    waited_seconds: float = 0.0


def options(name: str, image: str, user: int, limits: Limits) -> list[str]:
    """Return the arguments of the docker command that start an interpreter in a container, up to the interpreter's own
    arguments. The program sees only the image and /tmp.
    """
    tmp = f"/tmp:rw,exec,nosuid,nodev,size={limits.tmp_bytes},nr_inodes={ENTRIES},uid={user},gid={user},mode=700"
    args = ["run", "--interactive", "--rm", "--pull", "never", "--name", name, "--log-driver", "none", "--network", "none"]
    args += ["--read-only", "--tmpfs", tmp, "--shm-size", str(SHM_BYTES), "--workdir", "/tmp", "--hostname", "sandbox"]
    args += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{user}:{user}"]
    args += ["--pids-limit", str(limits.processes + SPARE_PROCESSES), "--ulimit", "core=0:0"]
    args += ["--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)]
    for variable, value in payload.ENVIRONMENT.items():
        args += ["--env", f"{variable}={value}"]
    return [*args, "--entrypoint", PYTHON, image]


class Container:
    """A container and the program in it.

    Args:
        docker: the docker command.
        user: the user id and group id of the program.
        limits: the limits of the program.
        scripts: the names of the files of this package to send. The `main` of the last one is called.
        arguments: the arguments of that `main`. Descriptors have the numbers that `bridge` defines.
        code, stdin: the program and its standard input.
    """

    def __init__(
        self,
        docker: Sequence[str],
        image: str,
        user: int,
        limits: Limits,
        scripts: Sequence[str],
        arguments: Sequence[int],
        code: bytes = b"",
        stdin: bytes = b"",
    ) -> None:
        self._docker = list(docker)
        self._name = f"agentrl-sandbox-{uuid.uuid4().hex}"
        self._unread = b""
        self._kept: list[tuple[bytes, bytes]] = []
        self._log = TemporaryFile()  # noqa: SIM115 - closed with the container
        self._said = ""
        inside = [*payload.FLAGS, "-c", payload.standalone("proc", "freeze", "bridge")]
        self._process = subprocess.Popen(
            [*self._docker, *options(self._name, image, user, limits), *inside],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._out, self._in = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._out, False)
        self._waiting = bytearray(_opening_frame(scripts, arguments, code, stdin))
        self.counted = KernelCounts(CgroupEvents(), 0.0)

    def ask(self, kind: bytes, data: bytes = b"") -> None:
        """Queue a frame for the bridge. Queued frames are sent while `frames` runs."""
        self._waiting += FRAME.pack(kind, len(data)) + data

    def frames(self, seconds: float) -> list[tuple[bytes, bytes]]:
        """Wait up to `seconds` for frames, and return them. The kernel's counts are not returned but stored in `counted`. Raise
        EOFError if the container has ended.
        """
        frames, self._kept = [*self._kept, *self._split_frames()], []
        deadline, counted = time.monotonic() + seconds, self.counted
        while not frames and self.counted is counted and (left := deadline - time.monotonic()) > 0:
            reads, writes, _ = select.select([self._in], [self._out] if self._waiting else [], [], left)
            if writes:
                self._write()
            if reads:
                part = os.read(self._in, CHUNK)
                if not part:
                    raise EOFError
                self._unread += part
                frames = self._split_frames()
        return frames

    def wait_for_begin(self, seconds: float) -> bool:
        """Return True if the program began within `seconds`. `frames` later returns all other frames that arrived."""
        deadline = time.monotonic() + seconds
        came: list[tuple[bytes, bytes]] = []
        try:
            while not any(kind == b"R" for kind, _ in came) and (left := deadline - time.monotonic()) > 0:
                came += self.frames(left)
        except EOFError:
            came = [frame for frame in came if frame[0] == b"O"]
        self._kept = [frame for frame in came if frame[0] != b"R"]
        return len(self._kept) < len(came)

    def follow(self, limits: Limits, running: Callable[[], int], over: Callable[[bytes, bytes], bool]) -> Use:
        """Read the program's output until a limit is passed or `over` returns True. `over` is called with the kind and the data
        of each frame that is not output. `running` returns the number of running programs of this process. Raise EOFError if
        the container ended first.
        """
        clock, printed = Clock(limits, running), bytearray()
        overrun: Overrun | None = None
        before = counted = self.counted
        ended = False
        while not ended and overrun is None:
            for kind, data in self.frames(LOOK_SECONDS):
                if kind == b"O":
                    printed += data[: limits.output_bytes + 1 - len(printed)]
                else:
                    ended = over(kind, data) or ended
            if len(printed) > limits.output_bytes:
                overrun = "output_cap"
            elif self.counted is not counted:
                counted = self.counted
                waited = counted.waited_seconds - before.waited_seconds
                overrun, _ = clock.look(counted.cpu_seconds - before.cpu_seconds, waited)
            elif clock.remaining <= 0:  # the bridge does not report the usage
                overrun = "timeout_wall"
            self.ask(b"E")
        waited = self.counted.waited_seconds - before.waited_seconds
        return Use(overrun, bytes(printed[: limits.output_bytes]), clock.elapsed, waited)

    def close(self) -> str:
        """End the container, wait until it has ended, and return docker's error output. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if not self._log.closed:
            self._process.stdin.close()
            if not self._wait_until_gone(END_SECONDS):
                subprocess.run([*self._docker, "rm", "--force", self._name], capture_output=True, check=False)
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
            self._log.seek(0)
            self._said = self._log.read(1000).decode(errors="backslashreplace").strip()
            self._log.close()
        return self._said

    def _wait_until_gone(self, seconds: float) -> bool:
        """Return whether docker ended within `seconds`. Its output is discarded, so it does not block."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._in], [], [], left)[0] and not os.read(self._in, CHUNK):
                break
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.1, deadline - time.monotonic()))
        return self._process.returncode is not None

    def _write(self) -> None:
        try:
            del self._waiting[: os.write(self._out, self._waiting[:CHUNK])]
        except BrokenPipeError:
            self._waiting.clear()  # it has ended: the next read shows that

    def _split_frames(self) -> list[tuple[bytes, bytes]]:
        """Return the complete frames among the data read so far. Counts are not returned but stored in `counted`."""
        frames, at = [], 0
        while len(self._unread) >= at + FRAME.size:
            kind, length = FRAME.unpack_from(self._unread, at)
            if length > MAX_FRAME_BYTES:
                hint = "Check that the image's python3 prints nothing when it starts."
                raise InfraError("A container's bridge sent data that is not a frame.", hint)
            if len(self._unread) < at + FRAME.size + length:
                break
            data = self._unread[at + FRAME.size : at + FRAME.size + length]
            at += FRAME.size + length
            if kind == b"E":
                self.counted = _parse_counts(data)
            else:
                frames.append((kind, data))
        self._unread = self._unread[at:]
        return frames


def _opening_frame(scripts: Sequence[str], arguments: Sequence[int], code: bytes, stdin: bytes) -> bytes:
    sources = payload.sources(*scripts)
    header: bridge.Header = {
        "argv": payload.command(PYTHON, bridge.SOURCES, *arguments),
        "filter": seccomp.rules().hex(),
        "sources": len(sources),
        "code": len(code),
        "stdin": len(stdin),
    }
    return json.dumps(header).encode() + b"\n" + sources + code + stdin


def _parse_counts(data: bytes) -> KernelCounts:
    counts = json.loads(data)
    cpu = counts.get("cpu_ns", 0) / 1e9 or counts.get("cpu_us", 0) / 1e6
    return KernelCounts(CgroupEvents(counts.get("oom", 0), counts.get("pids", 0)), cpu, counts["waited"])
