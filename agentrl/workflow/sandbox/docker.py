"""The sandbox made of containers, for machines on which only docker can create namespaces. Each program and each session has
its own container.

The image (AGENTRL_SANDBOX_IMAGE) needs a python3 of version 3.9 or newer. A container has a read-only image, no network, no
capabilities, no new privileges, a user that owns no files, and /tmp in memory. Docker limits memory and processes. Docker's
system call filter applies in addition to agentrl's. This sandbox is used only if the setting AGENTRL_SANDBOX names it. A
process that may use docker has the power of root on its machine, so it must be trusted like root.

Differences from bwrap:

- There is no user namespace, so the program's user id is a user id of the host.
- The program may create message queues.
- A start takes about 0.5 s instead of 0.02 s.
- The program sees the image instead of this machine's /usr.
- You must trust docker's daemon and runc, which run as root.
"""

import os
import shutil
import subprocess
import threading
from collections.abc import Sequence

from agentrl.workflow.errors import ConfigError, InfraError, SandboxUnavailable
from agentrl.workflow.runtime.process_output import last_line
from agentrl.workflow.sandbox import DEFAULTS, CodeResult, Limits, bridge, uid_pool
from agentrl.workflow.sandbox.container import KIND, START_SECONDS, Container
from agentrl.workflow.sandbox.container_session import open_session
from agentrl.workflow.sandbox.fair_semaphore import FairSemaphore
from agentrl.workflow.sandbox.limits_watch import decode_output, status
from agentrl.workflow.sandbox.run_program import ADDRESS_BYTES, whole_seconds
from agentrl.workflow.sandbox.self_test import holds
from agentrl.workflow.sandbox.session import CellSession
from agentrl.workflow.settings import Settings

PROCESS_RLIMIT = 1 << 20
"""The rlimit on processes. The kernel counts them by user, over all containers, so the value is high. Docker's limit applies to
each container.
"""


class Docker:
    """A `Sandbox` that runs containers of `image`. `user` is the user id and group id of the programs."""

    kind = KIND

    def __init__(self, image: str, user: int, docker: Sequence[str] = ("docker",)) -> None:
        self.image = image
        self.user = user
        self.command = docker
        self._turns = FairSemaphore(os.cpu_count() or 1)
        self._lock = threading.Lock()
        self._sessions: set[CellSession] = set()

    def run(self, code: str, stdin: str = "", limits: Limits = DEFAULTS) -> CodeResult:
        """See `Sandbox.run`."""
        numbers = (bridge.CODE, bridge.READY, whole_seconds(limits), ADDRESS_BYTES, PROCESS_RLIMIT)
        inputs = [part.encode(errors="surrogateescape") for part in (code, stdin)]
        with self._turns.hold():
            container = Container(self.command, self.image, self.user, limits, ["runner"], numbers, *inputs)
            try:
                return _follow_program(container, limits, self._turns)
            except InfraError as error:
                return CodeResult("sandbox_fault", str(error), None, 0.0, 0.0, KIND)

    def session(self, limits: Limits = DEFAULTS, reads: Sequence[str] = ()) -> CellSession:
        """See `Sandbox.session`."""
        if reads:
            raise ConfigError(f"A container cannot read {reads[0]!r} of this host.", "Copy the files into the image.")
        numbers = (bridge.CONTROL, whole_seconds(limits), ADDRESS_BYTES, PROCESS_RLIMIT)
        scripts = ("runner", "exact_json", "cells")
        container = Container(self.command, self.image, self.user, limits, scripts, numbers)
        session = open_session(container, limits, self._turns)
        with self._lock:
            self._sessions = {other for other in self._sessions if other.alive} | {session}
        return session

    def close(self) -> None:
        """See `Sandbox.close`."""
        with self._lock:
            sessions, self._sessions = self._sessions, set()
        for session in sessions:
            session.close()


def find(settings: Settings) -> Docker:
    """Create the docker sandbox, and test it by running a program. Raise ConfigError if no image is configured, or the range of
    user ids is invalid. Raise SandboxUnavailable if docker or the image is missing, or the test program does not run.
    """
    check(settings.sandbox_image)
    sandbox = Docker(settings.sandbox_image, uid_pool.uid_range(settings.sandbox_uids)[-1])
    runs, problem = holds(sandbox)
    if not runs:
        raise SandboxUnavailable(
            f"Programs cannot run in a container of {settings.sandbox_image}: {problem}", "Check that the image has a python3."
        )
    return sandbox


def check(image: str, docker: Sequence[str] = ("docker",)) -> None:
    """Raise ConfigError if no image is configured, SandboxUnavailable if docker or the image is missing."""
    if not image:
        raise ConfigError(
            "The docker sandbox was asked for, but AGENTRL_SANDBOX_IMAGE names no image.", "Try python:3.11-slim."
        )
    if shutil.which(docker[0]) is None:
        raise SandboxUnavailable("The docker sandbox was asked for, but there is no docker command.", "Install docker.")
    result = subprocess.run([*docker, "image", "inspect", "--format", "ok", image], capture_output=True, text=True, check=False)
    if result.returncode:
        reason = last_line(result.stderr)
        raise SandboxUnavailable(f"The docker sandbox cannot use the image {image}: {reason}", f"docker pull {image}")


def _follow_program(container: Container, limits: Limits, turns: FairSemaphore) -> CodeResult:
    """Wait for a program and return its result. Raise InfraError if it did not begin, or its container ended first."""
    code: list[int] = []

    def over(kind: bytes, data: bytes) -> bool:
        if kind == b"X":
            code.append(int(data))
        return kind == b"X"

    try:
        if not container.wait_for_begin(START_SECONDS):
            raise EOFError
        use = container.follow(limits, turns.running, over)
    except EOFError as error:
        printed = decode_output(b"".join(data for kind, data in container.frames(0) if kind == b"O"))
        raise InfraError(f"A container did not start: {printed}{container.close()}", "See `agentrl doctor`.") from error
    finally:
        container.close()
    used = container.counted
    came_to = status(limits, use.overrun, next(iter(code), None), used.cpu_seconds, used.events)
    exit_code = None if use.overrun else code[0]
    cpu, waited = used.cpu_seconds, use.waited_seconds
    return CodeResult(came_to, decode_output(use.output), exit_code, cpu, use.wall_seconds, KIND, waited_seconds=waited)
