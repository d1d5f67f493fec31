"""A control worker that writes down how long its passes take: `python -m bench.performance.timed_control FILE`.

A pass reads the rows, decides which messages are missing, and sends them. FILE gets a line of JSON for each pass: the number of
messages that are left for the next pass, and the pass's seconds, of which `cpu` the thread computed.
"""

import json
import sys
import time
from pathlib import Path

from agentrl.workers.stack import control_loop, worker
from agentrl.workflow.settings import settings


def main(file: Path) -> None:
    """Run the control worker until SIGTERM."""
    settings()
    tick = control_loop.tick

    def timed() -> int | None:
        began, computed = time.perf_counter(), time.thread_time()
        left = tick()
        line = {"left": left, "seconds": time.perf_counter() - began, "cpu": time.thread_time() - computed}
        with file.open("a") as lines:
            lines.write(f"{json.dumps(line)}\n")
        return left

    control_loop.tick = timed  # the loop looks its function up at each pass
    worker.run(["control"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
