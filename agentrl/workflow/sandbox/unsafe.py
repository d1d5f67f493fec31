"""No sandbox, with `AGENTRL_SANDBOX=none-unsafe`: model-written code runs as this user, on this host.

What remains: limits on each process, the parent's deadlines, and an environment without this process's variables. A program's
children are killed with it unless they start their own session. The program can read and write everything that this user can.
"""

import os
import signal
import subprocess
from contextlib import suppress

from agentrl.workflow.sandbox import Limits, payload, spawn
from agentrl.workflow.sandbox.cgroups import Cgroup
from agentrl.workflow.sandbox.launch import Inside, Launch


class Bare:
    """A process and its session, as a `launch.RunningSandbox`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self.cgroup = Cgroup({})
        self.end_fd = os.pidfd_open(process.pid)
        self._closed = False

    def members(self) -> set[int]:
        """See `RunningSandbox.members`: the processes of the same process session, without those that left it."""
        processes = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(ProcessLookupError):
                if os.getsid(int(name)) == self.process.pid:
                    processes.add(int(name))
        return processes

    def stop(self) -> None:
        """See `RunningSandbox.stop`. Processes are stopped one by one, because without a sandbox they cannot be stopped in one
        step.
        """
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """See `RunningSandbox.go_on`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self.members():
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def close(self) -> int:
        """See `RunningSandbox.close`."""
        if not self._closed:
            self._closed = True
            self._signal(signal.SIGKILL)
            spawn.bury(self.process, self.cgroup)
            os.close(self.end_fd)
        return self.process.wait()


def launch(python: str) -> Launch:
    """Return a launcher of programs in that interpreter, without any confinement."""

    def start(limits: Limits, inside: Inside) -> Bare:
        source = spawn.memory_file(payload.sources(*inside.scripts))
        try:
            command = payload.command(python, source, *inside.files, *inside.numbers)
            return Bare(spawn.start_process(command, inside, [source, *inside.files], env=payload.ENVIRONMENT, cwd="/tmp"))
        finally:
            os.close(source)

    return Launch("unsafe", start)
