"""`python -m bench.faults.oom_victim CGROUP GROUP`: a supervisor whose child claims the group, then too much memory."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from agentrl.workers.stack.process import database
from agentrl.workers.stack.supervisor import SupervisedProcess, Supervisor
from agentrl.workflow.settings import settings
from agentrl.workflow.store import rollout_claims

HOARD = "open('/proc/self/oom_score_adj', 'w').write('1000'); input(); hoard = b'x' * 2**29"


def main(cgroup: str, group: str) -> None:
    """Starts the child, sees it die, and looks at it as a supervisor does."""
    (Path(cgroup) / "cgroup.procs").write_text(str(os.getpid()))
    process = subprocess.Popen([sys.executable, "-c", HOARD], stdin=subprocess.PIPE)
    child = SupervisedProcess("rollout,train", process, time.monotonic())
    assert rollout_claims.claim_group(database(), int(group), f"{socket.gethostname()}:{process.pid}/claim", -1.0)
    process.communicate(b"\n")
    assert process.returncode == -signal.SIGKILL, process.returncode
    supervisor = Supervisor(settings())
    supervisor._restart_ended(child)
    supervisor.news.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
