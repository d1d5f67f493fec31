"""No sandbox, for `AGENTRL_SANDBOX=none-unsafe`: model-written code runs as the current user on this host.

Three protections remain: limits on each process, the timeouts that the parent enforces, and an environment without the
variables of this process. A program's children are killed with the program, except those that start a new process session. The
program can read and write everything that the current user can.
"""

import os
import signal
import subprocess
from contextlib import suppress

from agentrl.workflow.sandbox import Limits, payload, spawn
from agentrl.workflow.sandbox.cgroups import Cgroup
from agentrl.workflow.sandbox.launch import Inside, Launch


class Bare:
    """A process and the processes in its process session, as a `launch.RunningSandbox`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self.cgroup = Cgroup({})
        self.end_fd = os.pidfd_open(process.pid)
        self._closed = False

    def members(self) -> set[int]:
        """See `RunningSandbox.members`: the processes of the same process session. Processes that started a new process session
        are missed.
        """
        processes = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(ProcessLookupError):
                if os.getsid(int(name)) == self.process.pid:
                    processes.add(int(name))
        return processes

    def stop(self) -> None:
        """See `RunningSandbox.stop`. Without a sandbox the processes are stopped one by one."""
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
    """Return a launcher of programs in the interpreter `python`, without any confinement."""

    def start(limits: Limits, inside: Inside) -> Bare:
        source = spawn.memory_file(payload.sources(*inside.scripts))
        try:
            command = payload.command(python, source, *inside.files, *inside.numbers)
            return Bare(spawn.start_process(command, inside, [source, *inside.files], env=payload.ENVIRONMENT, cwd="/tmp"))
        finally:
            os.close(source)

    return Launch("unsafe", start)
