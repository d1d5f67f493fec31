"""A side measured in a process of its own, so that its peak of memory is nobody else's.

A side is a function that prepares (loads the model, warms up) and returns the work; only the work is measured. It runs as
`python -m bench.performance.processes MODULE FUNCTION ARGUMENTS`, which prints one line of JSON.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

MARK = "measured: "
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Side:
    """What to measure: `module.prepare(**arguments)` returns a function whose call is timed.

    Args:
        module, prepare: where that function is.
        arguments: by name, as JSON holds them.
    """

    module: str
    prepare: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ran:
    """One run of a side.

    Args:
        seconds: of the work alone.
        before_mib, peak_mib: resident memory when the work began, and its peak during the work.
        gpu_mib, gpu_reserved_mib: the peaks of what torch allocated on a GPU, and kept there for it; 0 without one.
        value: what the work returned, as JSON holds it.
    """

    seconds: float
    before_mib: float
    peak_mib: float
    gpu_mib: float
    gpu_reserved_mib: float
    value: Any


def run(side: Side, timeout: float = 1800) -> Ran:
    """Measures the side in a fresh process.

    Raises:
        RuntimeError: it failed; the message has the last line of what it said, stderr all of it.
    """
    command = [sys.executable, "-m", __name__, side.module, side.prepare, json.dumps(dict(side.arguments))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if done.returncode or line is None:
        print(done.stderr, file=sys.stderr)
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"{side.module}.{side.prepare} ended with {done.returncode}: {last}")
    return Ran(**json.loads(line.removeprefix(MARK)))


def in_turns(sides: Mapping[str, Side], rounds: int = 5) -> dict[str, list[Ran]]:
    """Runs each of them so often, in turns, always in a fresh process."""
    ran: dict[str, list[Ran]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            ran[name].append(run(side))
            print(name, f"{ran[name][-1].seconds:.1f} s, {ran[name][-1].peak_mib:.0f} MiB", flush=True)
    return ran


def measured(work: Callable[[], Any]) -> Ran:
    """Does the work in this process; one of its kind at a time, for there is one peak."""
    torch = sys.modules.get("torch")  # a side that needs none is not made to load it
    gpu = torch.cuda if torch is not None and torch.cuda.is_available() else None
    if gpu:
        gpu.reset_peak_memory_stats()
    RESET.write_text("5")  # the peak so far is forgotten: what loading took is not the work's
    before = resident("VmRSS")
    began = time.perf_counter()
    value = work()
    if gpu:
        gpu.synchronize()
    seconds = time.perf_counter() - began
    peak = resident("VmHWM")
    allocated, reserved = (gpu.max_memory_allocated(), gpu.max_memory_reserved()) if gpu else (0, 0)
    return Ran(seconds, before, peak, allocated / 2**20, reserved / 2**20, value)


def resident(name: str) -> float:
    """MiB of this process, as Linux counts them: `VmRSS` now, `VmHWM` at most since the last `measured` began."""
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")) / 1024


def main() -> None:
    """Measures what the arguments name."""
    module, prepare, arguments = sys.argv[1:]
    ran = measured(getattr(import_module(module), prepare)(**json.loads(arguments)))
    print(MARK + json.dumps(vars(ran)), flush=True)


if __name__ == "__main__":
    main()
