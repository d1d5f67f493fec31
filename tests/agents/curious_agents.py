"""Agents that look at what is not theirs."""

import json
import os
import time
from pathlib import Path
from typing import Any

from agentrl.workflow.agents import Answer


def looks_around(task: Any, llm: Any) -> Answer:
    """Where a secret can be read, and which of the processes above can be signalled."""
    found, secret = [], task.metadata["secret"].encode()
    for process in filter(str.isdigit, os.listdir("/proc")):
        for name in ("environ", "cmdline"):
            try:
                if secret in Path("/proc", process, name).read_bytes():
                    found.append(f"{name} of {process}")
            except OSError:
                continue
    parent = os.getppid()
    while parent > 1:
        try:
            os.kill(parent, 0)
            found.append(f"signal to {parent}")
        except OSError:
            pass
        parent = int(Path("/proc", str(parent), "stat").read_text().rpartition(")")[2].split()[1])
    return Answer(json.dumps(found))


def vanishes(task: Any, llm: Any) -> None:
    os._exit(0)


def shares(task: Any, llm: Any) -> float:
    """Forks that read what they share take it only once."""
    held = bytearray(b"x" * (60 << 20))
    children = []
    for _ in range(4):
        if (child := os.fork()) == 0:
            assert sum(held[:: 1 << 12]) > 0
            time.sleep(1.0)
            os._exit(0)
        children.append(child)
    return float(sum(os.waitpid(child, 0)[1] == 0 for child in children))
