"""A test of a sandbox, which runs a program in it; and the Python interpreters that a sandbox could use."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from agentrl.workflow.sandbox import Limits, Sandbox
from agentrl.workflow.settings import Settings

PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3", sys.executable)
PROBE = "print(6 * 7)"
ANSWER = "42\n"
PROBE_LIMITS = Limits(wall_seconds=60.0)


def interpreters(settings: Settings) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the interpreters to try: the path of each, and the folders that it needs in addition to /usr."""
    for python in (settings.sandbox_python,) if settings.sandbox_python else PYTHONS:
        if Path(python).exists():
            command = [python, "-I", "-c", "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"]
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
            prefixes = sorted({path for path in answer.stdout.splitlines() if path and not f"{path}/".startswith("/usr/")})
            yield python, tuple(prefixes)


def holds(sandbox: Sandbox) -> tuple[bool, str]:
    """Test a sandbox: return whether a program runs in it, and the program's output."""
    result = sandbox.run(PROBE, limits=PROBE_LIMITS)
    return result.output == ANSWER, " ".join(result.output.split())[:300]
