"""The engine `rolling` in a process that loses its device once: `--engine bench.gpu.lossy_engine:lossy`.

Each process that starts it adds its number to the file that DEVICE_LOST_FILE names; the first one trips a device-side assert
while it samples, after it has added LOST. Without a GPU the error is raised by each pass of that process from then on.
"""

import os
from dataclasses import replace
from pathlib import Path

from agentrl.workflow.engines import Engine, rolling
from agentrl.workflow.inference import sampler
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import Settings
from bench.gpu.injected import lose_device

FILE, LOST = "DEVICE_LOST_FILE", "lost"
PASSES_BEFORE = 3

lossy = replace(rolling.rolling, name="lossy", start="bench.gpu.lossy_engine:start")


def start(policy: Policy, settings: Settings) -> Engine:
    """Start the engine; in the first process with a fault."""
    file = Path(os.environ[FILE])
    is_first = not file.exists()
    _append(file, str(os.getpid()))
    if is_first:
        with policy.sampling() as model:
            lose_device(model, PASSES_BEFORE, notify=lambda: _append(file, LOST))
    return sampler.start(policy, settings)


def _append(file: Path, line: str) -> None:
    with file.open("a") as stream:
        stream.write(f"{line}\n")
