"""A part of the fault loop, played in a process of its own: whatever process dies at whatever point, the run ends the same.

See `bench.faults`. `make faults` tries every hit of every point; the tests try one of each, the first, a middle or the last.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from agentrl.workers.stack import broker
from agentrl.workflow.settings import Settings
from tests.conftest import missing


def recovered(folder: Path, *options: str) -> set[tuple[str, str]]:
    """Play one fault at each point that the options of `python -m bench.faults` choose; return world and point of those hit.

    Fail if the run after any of them is not as if nothing had happened.
    """
    if broker.find_server(Settings(home=folder)) is None:
        missing("a Redis server")
    answer = folder / "faults.json"
    command = [sys.executable, "-m", "bench.faults", "--sample", "--json", str(answer), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.exists(), done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(answer.read_text())
    assert [row for row in rows if row["outcome"] == "violated"] == []
    return {(row["env"], row["fault"]) for row in rows if row["outcome"] == "recovered"}
